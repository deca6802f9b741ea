"""One pod, as a kubelet makes it from our manifests: the same command, user, environment and mounts, and nothing else.

What a cluster adds (scheduling, names, replacement) is not here. Root file system and process namespace are those of a
container (systemd-nspawn); volumes belong to root and the pod's fsGroup, with the set-group-ID bit, as in a cluster.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import psutil

from tests.drill.container import Container
from tests.manifests import container, pod_spec


class Pod(Container):
    """A pod with one container.

    Args:
        kind: Job or StatefulSet.
        folder: for its volumes and its log.
        job_toml: content of the ConfigMap.
        secret: environment from the Secret.
        claims: volumes that outlive the pod: mount path to folder.
    """

    def __init__(
        self, kind: str, folder: Path, job_toml: str, secret: Mapping[str, str], claims: Mapping[str, Path]
    ) -> None:
        super().__init__(
            folder,
            {
                "/etc/elastictrain/job.toml": job_toml,
                "/etc/hosts": "127.0.0.1 localhost\n127.0.0.1 train-0.train train-0\n",
            },
        )
        self._main = container(kind)
        user = pod_spec(kind)["securityContext"]
        self._group: int = user["fsGroup"]
        self._as_user = ["/usr/bin/setpriv", f"--reuid={user['runAsUser']}", f"--regid={user['runAsGroup']}"]
        self._as_user += ["--clear-groups", "--no-new-privs", "--bounding-set=-all"]
        given = {entry["name"]: entry["value"] for entry in self._main["env"]}
        self._environment = {"PATH": "/opt/bin:/usr/bin:/bin", **secret, **given}
        for mount in self._main["volumeMounts"]:
            if mount["name"] != "job":
                self._mount(mount["mountPath"], claims.get(mount["mountPath"], folder / mount["name"]))
        for path, claim in claims.items():
            if path not in {mount["mountPath"] for mount in self._main["volumeMounts"]}:
                self._mount(path, claim)

    def _mount(self, path: str, volume: Path) -> None:
        volume.mkdir(parents=True, exist_ok=True)
        os.chown(volume, 0, self._group)
        volume.chmod(0o2777)
        self._binds.append(f"--bind={volume}:{path}")

    def start(self) -> None:
        """Starts its command as process 1."""
        command = [*self._main["command"], *self._main["args"]]
        expanded = [re.sub(r"\$\((\w+)\)", lambda name: self._environment[name[1]], word) for word in command]
        nspawn = ["systemd-nspawn", "-D", "/", "--volatile=yes", "--read-only", "--keep-unit", "--register=no"]
        nspawn += ["--quiet", "--private-network", f"--machine=pod-{os.getpid()}", "--hostname=train-0", *self._binds]
        nspawn += [f"--setenv={name}={value}" for name, value in self._environment.items()]
        with self.console.open("ab") as console:
            self._nspawn = subprocess.Popen(
                [*nspawn, *self._as_user, *expanded],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _init(self) -> int | None:
        assert self._nspawn is not None
        try:
            for child in psutil.Process(self._nspawn.pid).children():
                lines = Path(f"/proc/{child.pid}/status").read_text().splitlines()
                inside = next(line.split()[-1] for line in lines if line.startswith("NSpid:"))
                if inside == "1" and child.cmdline()[0].startswith("/opt/"):
                    return child.pid  # not before: it has its mounts by then
        except (psutil.NoSuchProcess, OSError, IndexError):
            pass
        return None

    @property
    def is_running(self) -> bool:
        assert self._nspawn is not None
        assert self._nspawn.poll() is None, self.console.read_text(errors="replace")[-4000:]
        return self._init() is not None

    def exec(self, command: list[str]) -> int:
        """Exit code of a command that is run inside, as a probe or a hook is."""
        init = self._init()
        if init is None:
            return -1
        enter = ["nsenter", f"--target={init}", "--mount", "--uts", "--ipc", "--net", "--pid", "--root", "--wd"]
        done = subprocess.run(
            [*enter, *self._as_user, *command],
            capture_output=True,
            text=True,
            check=False,
            env=self._environment,
            timeout=120,
        )
        return done.returncode

    def probe(self, which: str) -> int:
        """Exit code of its startup, liveness or readiness probe."""
        command: list[str] = self._main[f"{which}Probe"]["exec"]["command"]
        return self.exec(command)

    def delete(self) -> tuple[int, int]:
        """The end of a pod: its hook, then SIGTERM to process 1. The exit codes of both."""
        hook = self.exec(self._main["lifecycle"]["preStop"]["exec"]["command"])
        init = self._init()
        assert init is not None
        psutil.Process(init).terminate()
        return hook, self.wait()

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        assert self._nspawn is not None
        return self._nspawn.wait(120)
