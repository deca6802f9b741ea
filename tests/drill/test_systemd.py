"""Jobs as services of a real systemd, in a container: started, stopped, killed, hung, rebooted, completed, halted.

The units are those that `elastictrain service install` writes. What they start is FAKE or, where that is None, what the
unit itself says: `elastictrain run`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from elastictrain.supervisor.record import read_status
from tests.drill.container import ELASTICTRAIN, Container, skip_unless_possible
from tests.process.helpers import ROOT, wait_until

FAKE: str | None = "/opt/bin/python-module elastictrain.testing.fake_supervisor %S/elastictrain/%i --job %i"
"""Stands in for ExecStart= of the unit; its own arguments follow, from `JOBS`. None runs what the unit says."""

JOBS = {
    "steady": "--max-steps 1000000 --step-s 0.02",
    "short": "--max-steps 100 --step-s 0.02",
    "doomed": "--halt-at 50 --step-s 0.02 --exit-when-halted",
}
WATCHDOG_S = 3

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    """A machine on which the jobs of `JOBS` are services that start at boot."""
    skip_unless_possible()
    folder = tmp_path_factory.mktemp("machine")
    install = [sys.executable, "-m", "elastictrain.cli.main", "service", "install", "--bin", ELASTICTRAIN]
    subprocess.run([*install, "--root", str(folder / "root")], cwd=ROOT, check=True, capture_output=True)
    installed = folder / "root"
    files = {f"/{path.relative_to(installed)}": path.read_text() for path in installed.rglob("*") if path.is_file()}
    for job, arguments in JOBS.items():
        drop_in = f"[Service]\nWatchdogSec={WATCHDOG_S}\nTimeoutAbortSec=2\nRestartSec=0.5\n"
        if FAKE is not None:
            drop_in += f"ExecStart=\nExecStart={FAKE} {arguments}\n"
        files[f"/etc/systemd/system/elastictrain@{job}.service.d/drill.conf"] = drop_in
        files[f"/etc/elastictrain/{job}.toml"] = f'name = "{job}"\n'
    container = Container(folder / "container", [f"elastictrain@{job}.service" for job in JOBS], files)
    try:
        container.boot()
        yield container
    finally:
        container.destroy()


def unit(job: str) -> str:
    return f"elastictrain@{job}.service"


def wait_active(machine: Container, job: str) -> dict[str, str]:
    wait_until(lambda: machine.show(unit(job))["ActiveState"] == "active")
    return machine.show(unit(job))


def status(machine: Container, job: str) -> dict[str, Any]:
    text = machine.run(ELASTICTRAIN, "status", "--state-dir", f"/var/lib/elastictrain/{job}", "--json", check=False)
    decoded: dict[str, Any] = json.loads(text)
    return decoded


def goes_on(machine: Container, job: str, before: dict[str, Any]) -> dict[str, Any]:
    """Waits until the job trains beyond where it was, in a later incarnation; its status then."""

    def later() -> dict[str, Any] | None:
        now = status(machine, job)
        is_later = now["state"] == "training" and now["incarnation"] > before["incarnation"]
        return now if is_later and now["global_step"] > before["global_step"] else None

    found: dict[str, Any] = wait_until(later)
    return found


def test_it_is_ready_when_it_trains_and_says_what_it_does(machine: Container) -> None:
    shown = wait_active(machine, "steady")
    assert shown["Type"] == "notify"
    wait_until(lambda: "step" in machine.show(unit("steady"))["StatusText"])
    now = status(machine, "steady")
    assert (now["state"], now["daemon"]["pid"]) == ("training", int(shown["MainPID"]))
    assert now["daemon"]["socket"] == "/run/elastictrain/steady/control.sock"


def test_it_runs_as_its_own_user_and_may_do_little(machine: Container) -> None:
    pid = wait_active(machine, "steady")["MainPID"]
    process = machine.run("cat", f"/proc/{pid}/status")
    fields = dict(line.split(":", 1) for line in process.splitlines())
    uid = machine.run("id", "-u", "elastictrain")
    assert fields["Uid"].split() == [uid] * 4
    assert fields["NoNewPrivs"].strip() == "1"
    assert int(fields["CapBnd"], 16) == 0
    owner, group, mode = machine.run("stat", "-c", "%U %G %a", "/run/elastictrain/steady/control.sock").split()
    assert (owner, group, mode) == ("elastictrain", "elastictrain", "660")
    mounts = machine.run("cat", f"/proc/{pid}/mounts").splitlines()
    options = {line.split()[1]: line.split()[3].split(",") for line in mounts}
    assert "ro" in options["/usr"]
    assert "rw" in options["/var/lib/elastictrain/steady"]


def test_stop_keeps_the_state_and_start_goes_on(machine: Container) -> None:
    wait_active(machine, "steady")
    machine.run("systemctl", "stop", unit("steady"))
    shown = machine.show(unit("steady"))
    assert (shown["ActiveState"], shown["Result"], shown["ExecMainStatus"]) == ("inactive", "success", "0")
    stopped = status(machine, "steady")
    assert (stopped["state"], stopped["daemon_running"]) == ("stopped", False)
    machine.run("systemctl", "start", unit("steady"))
    now = goes_on(machine, "steady", stopped)
    assert now["num_restarts"] == stopped["num_restarts"], "a stop is no failure"


def test_a_killed_supervisor_is_back_by_itself(machine: Container) -> None:
    before = machine.show(unit("steady"))
    old = status(machine, "steady")
    machine.run("kill", "-KILL", wait_active(machine, "steady")["MainPID"])
    now = goes_on(machine, "steady", old)
    after = machine.show(unit("steady"))
    assert int(after["NRestarts"]) == int(before["NRestarts"]) + 1
    assert now["num_restarts"] == old["num_restarts"] + 1
    assert now["restarts"][-1]["cause"].startswith("the supervisor ended without a word")


def test_a_supervisor_that_stands_still_is_replaced(machine: Container) -> None:
    shown = wait_active(machine, "steady")
    old = status(machine, "steady")
    machine.run("kill", "-STOP", shown["MainPID"])
    assert goes_on(machine, "steady", old)["daemon"]["pid"] != int(shown["MainPID"])


def test_a_complete_job_is_not_started_again(machine: Container) -> None:
    wait_until(lambda: machine.show(unit("short"))["ActiveState"] == "inactive")
    shown = machine.show(unit("short"))
    assert (shown["Result"], shown["NRestarts"]) == ("success", "0")
    done = status(machine, "short")
    assert (done["state"], done["global_step"]) == ("completed", 100)


def test_a_halted_job_is_not_started_again(machine: Container) -> None:
    wait_until(lambda: machine.show(unit("doomed"))["ActiveState"] == "failed")
    shown = machine.show(unit("doomed"))
    assert (shown["Result"], shown["ExecMainStatus"], shown["NRestarts"]) == ("exit-code", "79", "0")
    halted = status(machine, "doomed")
    assert (halted["state"], halted["reason"]) == ("halted", "step 50 fails: again and again")


def test_after_a_reboot_it_goes_on_by_itself(machine: Container) -> None:
    wait_active(machine, "steady")
    old = status(machine, "steady")
    machine.run("systemctl", "reboot", check=False)
    machine.wait_down()
    kept = read_status(machine.state / "steady", "steady")
    assert kept.state == "stopped", "the machine's shutdown is an orderly stop"
    machine.boot()
    assert goes_on(machine, "steady", old)["state"] == "training"


def test_after_a_power_cut_it_goes_on_by_itself(machine: Container) -> None:
    wait_active(machine, "steady")
    old = status(machine, "steady")
    machine.destroy()
    assert read_status(machine.state / "steady", "steady").state == "not_running"
    machine.boot()
    now = goes_on(machine, "steady", old)
    assert now["num_restarts"] == old["num_restarts"] + 1
