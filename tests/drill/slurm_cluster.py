"""Slurm on loopback: munged, slurmctld and a slurmd per node, of our own, with ports and folders of their own."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from elastictrain.drill.nodes.etcd import free_ports
from tests.process.helpers import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
GRACE_TIME_S = 90
"""Of a preemption."""
CONFIG = """
ClusterName=drill
SlurmctldHost=localhost
SlurmUser=root
SlurmctldPort={ctld_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/ctld
SlurmdSpoolDir={folder}/slurmd-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=90
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
AccountingStorageType=accounting_storage/none
PartitionName=low Nodes=ALL Default=YES State=UP PriorityTier=1 GraceTime={grace_time_s}
PartitionName=high Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF
"""
NODE = "NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs={num_cpus} State=UNKNOWN\n"


def skip_unless_possible() -> None:
    """Slurm's daemons start other people's jobs: they want root."""
    if os.getuid() != 0:
        pytest.skip("slurmd needs root")
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not here: apt-get install slurmctld slurmd slurm-client munge")


class Slurm:
    """A cluster of nodes that are all this host: Debian's Slurm is made for several slurmd on one.

    Args:
        folder: for everything.
        num_nodes: node0, node1 and so on.
    """

    def __init__(self, folder: Path, num_nodes: int) -> None:
        self._folder = folder
        self._nodes = [f"node{i}" for i in range(num_nodes)]
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        munge = self._folder / "munge"
        for folder in (munge, self._folder / "ctld", *(self._folder / f"slurmd-{node}" for node in self._nodes)):
            folder.mkdir(parents=True)
        munge.chmod(0o700)
        (munge / "key").touch(0o400)
        (munge / "key").write_bytes(secrets.token_bytes(64))
        ctld_port, *ports = free_ports(1 + len(self._nodes))
        (self._folder / "slurm.conf").write_text(
            "".join(
                NODE.format(name=name, port=port, num_cpus=os.cpu_count())
                for name, port in zip(self._nodes, ports, strict=True)
            )
            + CONFIG.format(folder=self._folder, ctld_port=ctld_port, grace_time_s=GRACE_TIME_S)
        )
        names = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        # --force: it does not like the folders above ours, which others may write to.
        self._daemon("munged", "--foreground", "--force", *(f"--{key}={munge / name}" for key, name in names.items()))
        wait_until((munge / "socket").exists)
        self._daemon("slurmctld", "-D", "-c")
        for node in self._nodes:
            self._daemon("slurmd", "-D", "-N", node)
        idle = ["sinfo", "--noheader", "--Node", "--partition=low", "--states=idle", "--format=%N"]
        wait_until(lambda: self.run(*idle, check=False).split() == self._nodes)

    def _daemon(self, program: str, *args: str) -> None:
        with (self._folder / f"{program}.log").open("ab") as log:
            self._daemons.append(
                subprocess.Popen(
                    [shutil.which(program) or program, *args],
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )

    def run(self, *command: str, check: bool = True, environment: Mapping[str, str] | None = None) -> str:
        """Runs one of Slurm's commands; returns its output, stripped."""
        done = subprocess.run(
            command,
            env={**self._environment, **(environment or {})},
            cwd=self._folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def show(self, job: str) -> dict[str, str]:
        """What it knows of a job."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def stop(self) -> None:
        """Ends all jobs, then the daemons."""
        if self._daemons:
            jobs = self.run("squeue", "--noheader", "--format=%i", check=False).split()
            if jobs:
                self.run("scancel", "--signal=KILL", "--full", *jobs, check=False)
                self.run("scancel", *jobs, check=False)
                wait_until(lambda: not self.run("squeue", "--noheader", check=False))
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(30)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
