"""A machine with a systemd of its own: a container made of this machine's /usr, booted by systemd-nspawn.

Everything else in it is fresh at each boot, but for what is bound into it: Python, the packages, this repository, and
the folder of job states, which outlives a reboot. Commands run in it through nsenter.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from tests.process.helpers import ROOT, wait_until

PYTHON = "/opt/python"
REPOSITORY = "/opt/elastictrain"
ELASTICTRAIN = "/opt/bin/elastictrain"
BOOT_DEADLINE_S = 90.0


def skip_unless_possible() -> None:
    """A container needs root, systemd-nspawn and nsenter."""
    if os.getuid() != 0:
        pytest.skip("booting a container needs root")
    for tool in ("systemd-nspawn", "nsenter"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not here: apt-get install systemd-container util-linux")


class Container:
    """One machine.

    Args:
        folder: for what is bound into it, and the log of its console.
        files: further files: path inside, content. Written once; they are read-only inside.
    """

    def __init__(self, folder: Path, files: Mapping[str, str]) -> None:
        self._folder = folder
        self.console = folder / "console.log"
        self.state = folder / "state"
        """What is /var/lib/elastictrain inside."""
        self.state.mkdir(parents=True)
        self._nspawn: subprocess.Popen[bytes] | None = None
        self._binds = [f"--bind={self.state}:/var/lib/elastictrain", f"--bind-ro={ROOT}:{REPOSITORY}"]
        self._binds.append(f"--bind-ro={sys.base_prefix}:{PYTHON}")
        packages = [p for p in sys.path if p.endswith("site-packages") and Path(p).is_dir()]
        inside = [f"/opt/packages-{number}" for number, _ in enumerate(packages)]
        self._binds += [f"--bind-ro={outer}:{inner}" for outer, inner in zip(packages, inside, strict=True)]
        path = ":".join([REPOSITORY, *inside])
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        environment = f"PYTHONPATH={path} PYTHONDONTWRITEBYTECODE=1 LD_LIBRARY_PATH={PYTHON}/lib"
        start = f'#!/bin/sh\nexport {environment}\nexec {PYTHON}/bin/{version} -m "$@"\n'
        command = '#!/bin/sh\nexec /opt/bin/python-module elastictrain.cli.main "$@"\n'
        for inner, text in {"/opt/bin/python-module": start, ELASTICTRAIN: command, **files}.items():
            self._bind_file(inner, text)

    def _bind_file(self, inner: str, text: str) -> None:
        outer = self._folder / "files" / inner.lstrip("/")
        outer.parent.mkdir(parents=True, exist_ok=True)
        outer.write_text(text)
        outer.chmod(0o755 if inner.startswith("/opt/bin") else 0o644)
        # A colon or comma would be an option of --bind-ro; an @ is not.
        self._binds.append(f"--bind-ro={outer}:{inner}")

    def boot(self, wants: Sequence[str] = ()) -> None:
        """Starts it, and waits until its systemd takes commands.

        Args:
            wants: units that are started at boot.
        """
        command = ["systemd-nspawn", "-D", "/", "--volatile=yes", "--keep-unit", "--register=no", "--quiet"]
        command += ["--bind-ro=/etc/hosts", *self._binds, "--boot", "systemd.firstboot=no", "systemd.unit=basic.target"]
        command += [f"systemd.wants={unit}" for unit in wants]
        with self.console.open("ab") as console:
            self._nspawn = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=console, stderr=subprocess.STDOUT, start_new_session=True
            )
        wait_until(self._is_up, BOOT_DEADLINE_S)

    def _is_up(self) -> bool:
        assert self._nspawn is not None
        assert self._nspawn.poll() is None, self.console.read_text(errors="replace")[-4000:]
        return self._init() is not None and self.run("systemctl", "is-active", "basic.target", check=False) == "active"

    def _init(self) -> int | None:
        """Process id, outside, of its process 1; None before that is systemd: who enters earlier stops the boot."""
        assert self._nspawn is not None
        try:
            for child in psutil.Process(self._nspawn.pid).children():
                lines = Path(f"/proc/{child.pid}/status").read_text().splitlines()
                inside = next(line.split()[-1] for line in lines if line.startswith("NSpid:"))
                if child.name() == "systemd" and inside == "1":
                    return child.pid
        except (psutil.NoSuchProcess, OSError):
            pass
        return None

    def run(self, *command: str, check: bool = True) -> str:
        """Runs a command inside; returns its output, stripped."""
        init = self._init()
        assert init is not None, "the container is down"
        done = subprocess.run(
            [
                "nsenter",
                "--target",
                str(init),
                "--mount",
                "--uts",
                "--ipc",
                "--net",
                "--pid",
                "--root",
                "--wd",
                *command,
            ],
            capture_output=True,
            text=True,
            check=False,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"},
            timeout=60,
        )
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def show(self, unit: str) -> dict[str, str]:
        """What systemd knows of a unit."""
        lines = self.run("systemctl", "show", unit).splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def wait_down(self) -> None:
        """Waits until it has shut down, after a reboot was asked for."""
        assert self._nspawn is not None
        self._nspawn.wait(BOOT_DEADLINE_S)

    def destroy(self) -> None:
        """Pulls the plug."""
        if self._nspawn is not None and self._nspawn.poll() is None:
            init = self._init()
            if init is not None:
                psutil.Process(init).kill()
            try:
                self._nspawn.wait(20)
            except subprocess.TimeoutExpired:
                self._nspawn.kill()
                self._nspawn.wait()
