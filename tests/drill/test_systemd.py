"""Jobs as services of a real systemd, in a container: started, stopped, killed, hung, rebooted, completed, halted.

The units are those that `elastictrain service install` writes, and start what they say: `elastictrain run`, with real
ranks.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from elastictrain.supervisor.record import read_status
from tests.drill.container import ELASTICTRAIN, Container, skip_unless_possible
from tests.drill.paced import DETACHED, GLOBAL_BATCH, HURRY_FILE, STEPS_FILE
from tests.process.helpers import ROOT, read_json_lines, run_cli, train, wait_until

STEPS = 800
SNAPSHOT_STEPS = 10
STATE = Path("/var/lib/elastictrain")
WATCHDOG_S = 6

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def job(name: str, folder: Path | None = None, num_ranks: int = 2, **params: Any) -> dict[str, Any]:
    """The job file of a small job. Its task writes into `folder`, if not into the state directory."""
    task_params = {"folder": str(folder or STATE / name), **params}
    return {
        "name": name,
        "task": "tests.drill.paced:Task",
        "params": task_params,
        "train": {"max_steps": STEPS, "global_batch_size": GLOBAL_BATCH, "micro_batch_size": 1},
        "data": {"shuffle": False},
        "elastic": {"device": "cpu", "nproc_per_node": num_ranks, "threads_per_rank": 1},
        "checkpoint": {"every_steps": SNAPSHOT_STEPS},
        "metrics": {"tensorboard": False, "every_steps": 5},
    }


JOBS = {
    "steady": job("steady", pause_s=0.1, detaches=True),
    "modest": job("modest", num_ranks=1, pause_s=0.1),
    # Only one test starts it: it can be started once, for it keeps its state, and fails in its first step after that.
    "doomed": {**job("doomed", num_ranks=1, fail_at=5), "supervisor": {"same_step_failures": 1}},
    "broken": {**job("broken", num_ranks=1), "task": "tests.drill.paced:Tusk"},
}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    """A machine on which the jobs of `JOBS` are services."""
    skip_unless_possible()
    folder = tmp_path_factory.mktemp("machine")
    install = [sys.executable, "-m", "elastictrain.cli.main", "service", "install", "--bin", ELASTICTRAIN]
    subprocess.run([*install, "--root", str(folder / "root")], cwd=ROOT, check=True, capture_output=True)
    installed = folder / "root"
    files = {f"/{path.relative_to(installed)}": path.read_text() for path in installed.rglob("*") if path.is_file()}
    drop_in = f"[Service]\nWatchdogSec={WATCHDOG_S}\nTimeoutAbortSec=2\nRestartSec=0.5\n"
    files["/etc/systemd/system/elastictrain@.service.d/drill.conf"] = drop_in
    for name, content in JOBS.items():
        files[f"/etc/elastictrain/{name}.toml"] = tomli_w.dumps(content)
    container = Container(folder / "container", files)
    try:
        container.boot()
        yield container
    finally:
        container.destroy()


def unit(name: str) -> str:
    return f"elastictrain@{name}.service"


def status(machine: Container, name: str) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(machine.run(ELASTICTRAIN, "status", name, "--json", check=False))
    return decoded


def start(machine: Container, name: str) -> None:
    machine.run("systemctl", "start", "--no-block", unit(name))


def wait_for_unit(machine: Container, name: str, *states: str) -> dict[str, str]:
    """What systemd knows of a service, once it is in one of these states."""
    wait_until(lambda: machine.show(unit(name))["ActiveState"] in states, 120.0)
    return machine.show(unit(name))


class Steady:
    """The job that everything happens to: where it is, by its own record of the samples that it was given."""

    def __init__(self, machine: Container) -> None:
        self.machine = machine
        self.folder = machine.state / "steady"

    def steps(self) -> dict[int, list[int]]:
        """The steps that were begun, by incarnation."""
        found: dict[int, list[int]] = {}
        path = self.folder / STEPS_FILE
        for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
            if line.endswith("\n"):
                incarnation, step = json.loads(line)
                found.setdefault(incarnation, []).append(step)
        return found

    def trains(self, after: int = 0) -> dict[str, Any]:
        """Waits until an incarnation later than `after` trains, for more than an interval of snapshots; its status."""

        def condition() -> dict[str, Any] | None:
            steps = self.steps()
            newest = max(steps, default=0)
            if newest <= after or len(steps[newest]) <= SNAPSHOT_STEPS + 5:
                return None  # seen without a look at the status, which takes time from those that start
            now = status(self.machine, "steady")
            return now if now["state"] == "training" and now["incarnation"] == newest else None

        found: dict[str, Any] = wait_until(condition, 120.0)
        return found

    def goes_on(self, before: dict[str, Any], *, redone: int) -> dict[str, Any]:
        """Waits until it trains in the next incarnation, and sees to it that no sample was left out.

        Args:
            before: its status before what happened.
            redone: how many of its last steps, at most, are done again.
        """
        now = self.trains(after=before["incarnation"])
        assert now["incarnation"] == before["incarnation"] + 1
        steps = self.steps()
        last, first = steps[before["incarnation"]][-1], steps[now["incarnation"]][0]
        assert last + 1 - redone <= first <= last + 1, (first, last)
        assert steps[now["incarnation"]] == list(range(first, steps[now["incarnation"]][-1] + 1))
        return now

    def processes(self) -> set[str]:
        """Process ids, inside, of its service."""
        found = self.machine.run("sh", "-c", f"grep -sl {unit('steady')} /proc/[0-9]*/cgroup", check=False)
        return {path.split("/")[2] for path in found.split()}

    def detached(self) -> set[str]:
        """Those of them that left the ranks that started them, for good."""
        return set(self.machine.run("pgrep", "-x", "-f", f"sleep {DETACHED}", check=False).split())


def test_whatever_happens_it_ends_as_if_nothing_had(machine: Container, tmp_path: Path) -> None:
    """Stop, kills, a hang of the supervisor, reboot and power cut: on at the exact step, and the same weights."""
    steady = Steady(machine)

    # READY when the ranks train.
    start(machine, "steady")
    shown = wait_for_unit(machine, "steady", "active")
    assert steady.steps()[1], "it is ready, and no rank has begun a step"
    now = steady.trains()
    assert now["daemon"]["pid"] == int(shown["MainPID"])
    assert now["daemon"]["socket"] == "/run/elastictrain/steady/control.sock"
    shown = machine.show(unit("steady"))
    assert (shown["Type"], shown["StatusText"]) == ("notify", now["reason"])

    # A stop loses nothing at all, and is no failure.
    old, detached = now, steady.detached()
    assert len(detached) == 2, "of each rank"
    machine.run("systemctl", "stop", unit("steady"))
    shown = machine.show(unit("steady"))
    assert (shown["ActiveState"], shown["Result"], shown["ExecMainStatus"]) == ("inactive", "success", "0")
    assert not steady.detached()
    stopped = status(machine, "steady")
    assert (stopped["state"], stopped["daemon_running"]) == ("stopped", False)
    start(machine, "steady")
    now = steady.goes_on(old, redone=0)
    assert now["num_restarts"] == 0

    # A killed rank.
    old = now
    machine.run("kill", "-KILL", str(old["ranks"][1]["pid"]))
    now = steady.goes_on(old, redone=1)
    assert now["daemon"]["pid"] == old["daemon"]["pid"]
    assert "rank 1 was ended by SIGKILL" in now["restarts"][-1]["cause"]

    # A killed supervisor is back by itself, and nothing of its group is left; its ranks have kept their last step.
    old, group, restarts = now, steady.processes(), machine.show(unit("steady"))["NRestarts"]
    assert steady.detached() <= group
    machine.run("kill", "-KILL", str(old["daemon"]["pid"]))
    now = steady.goes_on(old, redone=1)
    assert not group & steady.processes()
    assert len(steady.detached()) == 2
    assert int(machine.show(unit("steady"))["NRestarts"]) == int(restarts) + 1
    assert now["restarts"][-1]["cause"].startswith("the supervisor ended without a word")

    # One that stands still is replaced.
    old, group = now, steady.processes()
    machine.run("kill", "-STOP", str(old["daemon"]["pid"]))
    now = steady.goes_on(old, redone=1)
    assert not group & steady.processes()

    # An orderly reboot is a stop.
    old = now
    machine.run("systemctl", "reboot", check=False)
    machine.wait_down()
    assert read_status(steady.folder, "steady").state == "stopped"
    machine.boot([unit("steady")])
    now = steady.goes_on(old, redone=0)

    # A power cut takes what was in memory with it.
    old = now
    machine.destroy()
    assert read_status(steady.folder, "steady").state == "not_running"
    machine.boot([unit("steady")])
    now = steady.goes_on(old, redone=2 * SNAPSHOT_STEPS)
    assert now["num_restarts"] == old["num_restarts"] + 1

    # A complete job ends its service, and does so again when that is started once more.
    (steady.folder / HURRY_FILE).touch()
    for _ in range(2):
        shown = wait_for_unit(machine, "steady", "inactive", "failed")
        assert (shown["ActiveState"], shown["Result"], shown["NRestarts"]) == ("inactive", "success", "0")
        done = status(machine, "steady")
        assert (done["state"], done["global_step"]) == ("completed", STEPS)
        machine.run("systemctl", "start", unit("steady"))
    kept = run_cli("checkpoints", "show", "--state-dir", steady.folder, "--json")
    assert json.loads(kept.stdout)["global_step"] == STEPS
    assert json.loads(kept.stdout)["model_digest"] == undisturbed(tmp_path)


def undisturbed(folder: Path) -> str:
    """The digest of the same job when nothing happens."""
    (folder / "job.toml").write_text(tomli_w.dumps(job("steady", folder)))
    trained = train(folder, world_size=2)
    assert [step for _, step in read_json_lines(folder / STEPS_FILE)] == list(range(STEPS))
    shown = run_cli("checkpoints", "show", "--state-dir", trained.state_dir, "--json")
    digest: str = json.loads(shown.stdout)["model_digest"]
    return digest


def test_it_runs_as_its_own_user_and_may_do_little(machine: Container) -> None:
    start(machine, "modest")
    wait_until((machine.state / "modest" / "control.json").exists)
    pid = machine.show(unit("modest"))["MainPID"]
    process = machine.run("cat", f"/proc/{pid}/status")
    fields = dict(line.split(":", 1) for line in process.splitlines())
    uid = machine.run("id", "-u", "elastictrain")
    assert fields["Uid"].split() == [uid] * 4
    assert fields["NoNewPrivs"].strip() == "1"
    assert int(fields["CapBnd"], 16) == 0
    owner, group, mode = machine.run("stat", "-c", "%U %G %a", "/run/elastictrain/modest/control.sock").split()
    assert (owner, group, mode) == ("elastictrain", "elastictrain", "660")
    mounts = machine.run("cat", f"/proc/{pid}/mounts").splitlines()
    options = {line.split()[1]: line.split()[3].split(",") for line in mounts}
    assert "ro" in options["/usr"]
    assert "rw" in options["/var/lib/elastictrain/modest"]
    machine.run("systemctl", "stop", unit("modest"))


def test_a_halted_job_waits_for_a_person(machine: Container) -> None:
    start(machine, "doomed")
    wait_for_unit(machine, "doomed", "active")
    wait_until(lambda: status(machine, "doomed")["state"] == "halted", 120.0)
    halted = status(machine, "doomed")
    assert "step 6 fails" in halted["reason"]
    wait_until(lambda: "step 6 fails" in machine.show(unit("doomed"))["StatusText"])
    assert machine.run("sh", "-c", f"{ELASTICTRAIN} status doomed >/dev/null; echo $?") == "79"
    machine.run(ELASTICTRAIN, "resume", "doomed")
    wait_until(lambda: status(machine, "doomed")["incarnation"] > halted["incarnation"])
    machine.run("systemctl", "stop", unit("doomed"))
    assert machine.show(unit("doomed"))["Result"] == "success"


def test_an_enabled_job_starts_at_boot_and_with_its_target(machine: Container) -> None:
    """Nobody has to enable the target as well. The container itself boots no further than to basic.target."""
    machine.run("systemctl", "enable", unit("doomed"))
    for target in ("multi-user.target", "elastictrain.target"):
        assert unit("doomed") in machine.show(target)["Wants"].split()


def test_a_job_that_is_not_there_cannot_be_started(machine: Container) -> None:
    failed = machine.run("sh", "-c", f"systemctl start {unit('nowhere')} 2>&1; echo $?")
    assert failed.endswith("\n1"), failed
    assert "nowhere" in failed


def test_a_job_that_cannot_start_fails_once_and_says_why(machine: Container) -> None:
    failed = machine.run("sh", "-c", f"systemctl start {unit('broken')} 2>&1; echo $?")
    assert failed.endswith("\n1"), failed
    shown = machine.show(unit("broken"))
    assert (shown["ActiveState"], shown["Result"], shown["NRestarts"]) == ("failed", "exit-code", "0")
    assert shown["ExecMainStatus"] == "78"
    assert "Tusk" in status(machine, "broken")["reason"]
