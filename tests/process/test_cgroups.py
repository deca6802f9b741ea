"""The control group of a worker group: whatever is started in it ends with it, and it is gone after."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from elastictrain import cgroups
from elastictrain.leftovers import sweep
from elastictrain.protocol import RUNS_DIR
from tests.process.helpers import ROOT, run_cli, start_cli, wait_until
from tests.process.test_supervisor import ours, trains, write_faulty
from tests.process.test_watch import play

IN_A_GROUP = """
import sys; from pathlib import Path
from elastictrain import cgroups
entered = cgroups.enter(Path(sys.argv[1]))
print(entered or "", flush=True)
sys.stdin.read()
"""


def entered(run_dir: Path, *under: str) -> tuple[subprocess.Popen[str], str]:
    """A process that enters a group of its own, if it can, and then waits; and the group's folder."""
    command = [*under, sys.executable, "-c", IN_A_GROUP, str(run_dir)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Folder of an incarnation, on a machine where control groups can be made."""
    made = tmp_path / RUNS_DIR / "0001"
    made.mkdir(parents=True)
    process, group = entered(made)
    process.communicate()
    if not group:
        pytest.skip("no control group can be made here")
    cgroups.end(made)
    return made


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_sweep_ends_whoever_is_in_the_group_and_removes_it(tmp_path: Path, run_dir: Path) -> None:
    process, group = entered(run_dir)
    assert cgroups.group_of(run_dir) == Path(group)
    assert str(process.pid) in (Path(group) / "cgroup.procs").read_text().split()
    sweep(tmp_path)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    wait_until(lambda: sweep(tmp_path) == 0 and not Path(group).exists())
    assert cgroups.group_of(run_dir) is None
    assert not (run_dir / cgroups.CGROUP_FILE).exists()


def test_one_may_leave(run_dir: Path) -> None:
    script = IN_A_GROUP.replace("print(", "import os; cgroups.take_out(Path(sys.argv[1]), os.getpid()); print(")
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(run_dir)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    group = Path(process.stdout.readline().strip())
    assert (group / "cgroup.procs").read_text() == ""
    assert cgroups.end(run_dir) is False
    assert not group.exists()
    assert process.poll() is None
    process.communicate()


def test_where_there_can_be_none_all_goes_on_without(run_dir: Path) -> None:
    """As in a service with ProtectControlGroups=yes: the file system is read-only."""
    parent = cgroups._own_group()
    assert parent is not None
    mount = next(p for p in (parent, *parent.parents) if p.is_mount())
    read_only = f'mount -o remount,bind,ro {mount} && exec "$@"'
    process, group = entered(run_dir, "unshare", "--mount", "sh", "-c", read_only, "sh")
    process.communicate()
    assert (process.returncode, group) == (0, "")
    assert cgroups.group_of(run_dir) is None
    assert cgroups.end(run_dir) is False


def test_a_folder_that_is_not_a_group_of_ours_is_left_alone(run_dir: Path, tmp_path: Path) -> None:
    parent = cgroups._own_group()
    for claimed in (parent, tmp_path, "elastictrain-", "\0"):
        (run_dir / cgroups.CGROUP_FILE).write_text(f"{claimed}\n")
        assert cgroups.group_of(run_dir) is None
        assert cgroups.end(run_dir) is False


@pytest.mark.usefixtures("run_dir")
def test_a_process_that_hides_ends_with_its_group(tmp_path: Path) -> None:
    """It has a session of its own, takes no notice of its parent's end, and has an empty environment."""
    state = tmp_path / "played"
    play(state, (1, 5, "stranger"))
    assert is_gone(int((state / "stranger").read_text()))
    assert not list(state.glob(f"{RUNS_DIR}/*/{cgroups.CGROUP_FILE}"))


@pytest.mark.usefixtures("run_dir")
def test_status_names_the_group_and_nothing_is_left_of_it(tmp_path: Path) -> None:
    """Ranks and agent are in it; the launcher and the persister, which may outlive them, are not."""
    state = tmp_path / "state"
    path = write_faulty(tmp_path, params={"pause_s": 0.05}, train={"max_steps": 10**6}, data={"num_workers": 1})
    with start_cli("run", path, "--state-dir", state, "--output", "json") as process:
        wait_until(lambda: trains(state))
        told = json.loads(run_cli("status", "--state-dir", state, "--json").stdout)
        group = Path(told["daemon"]["cgroup"])

        def members() -> set[int]:
            return {int(pid) for pid in (group / "cgroup.procs").read_text().split()}

        def persisters() -> set[int]:
            found = set()
            for other in psutil.process_iter():
                try:
                    if "elastictrain.checkpoint.persister" in other.cmdline() and process.pid in [
                        parent.pid for parent in other.parents()
                    ]:
                        found.add(other.pid)
                except psutil.Error:
                    continue
            return found

        wait_until(lambda: persisters() and not persisters() & members())
        inside = {p.pid for p in ours(state) if "elastictrain.training.launcher" not in p.cmdline()}
        assert inside <= members()
        assert {process.pid, os.getpid()}.isdisjoint(members())
        process.kill()
        wait_until(lambda: not ours(state) and not group.exists())
        assert not list(state.glob(f"{RUNS_DIR}/*/{cgroups.CGROUP_FILE}"))
