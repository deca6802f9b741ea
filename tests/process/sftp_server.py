"""Real OpenSSH on loopback, for tests of stores that are neither folders nor object stores."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
NEEDS_SSHD = pytest.mark.skipif(SSHD is None, reason="needs the program sshd (Debian package openssh-server)")


class Sftp:
    """A server that can be taken away, with all its connections, and come back on the same port.

    Args:
        folder: for its keys and its configuration.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        for name in ("host_key", "user_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
        self._config = folder / "sshd_config"
        self._config.write_text(
            f"HostKey {folder}/host_key\nAuthorizedKeysFile {folder}/user_key.pub\nStrictModes no\nUsePAM no\n"
            "PasswordAuthentication no\nPermitRootLogin yes\nPidFile none\nSubsystem sftp internal-sftp\n"
        )
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # as its systemd unit does
        self.port = 0
        self._connections: list[subprocess.Popen[bytes]] = []
        self.start()
        self.options: dict[str, Any] = {
            "port": self.port,
            "username": getpass.getuser(),
            "key_filename": str(folder / "user_key"),
            "allow_agent": False,
            "look_for_keys": False,
        }

    def start(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, args=(self._listener,))
        self._acceptor.start()

    def stop(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes who waits in accept
        self._acceptor.join()
        self._listener.close()
        for connection in self._connections:
            os.killpg(connection.pid, 9)
            connection.wait()
        self._connections.clear()

    def _accept(self, listener: socket.socket) -> None:
        assert SSHD is not None
        while True:
            try:
                connected, _ = listener.accept()
            except OSError:
                return
            with connected:
                command = [SSHD, "-i", "-e", "-f", str(self._config)]
                self._connections.append(
                    subprocess.Popen(
                        command, stdin=connected, stdout=connected, stderr=subprocess.DEVNULL, start_new_session=True
                    )
                )
