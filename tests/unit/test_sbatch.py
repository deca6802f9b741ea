"""The Slurm script: what can be said of it without a Slurm. tests/drill/test_slurm.py runs it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from elastictrain.cli.service_units import Installation
from elastictrain.config.schema import CheckpointConfig
from elastictrain.supervisor.settings import STOP_GRACE_S
from tests.manifests import container
from tests.process.helpers import ROOT

SCRIPT = ROOT / "deploy" / "slurm" / "train.sbatch"
SLURM_INACCURACY_S = 60.0
"""sbatch(1) on --signal: the signal may come up to 60 seconds earlier than asked for."""


def test_it_is_sound_as_a_script() -> None:
    assert subprocess.run(["bash", "-n", SCRIPT], capture_output=True, text=True, check=False).stderr == ""
    if shutil.which("shellcheck") is None:
        pytest.skip("the rest needs shellcheck (Debian package shellcheck)")
    found = subprocess.run(["shellcheck", SCRIPT], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


def test_its_codes_are_those_of_systemd_and_kubernetes() -> None:
    text = SCRIPT.read_text()
    unit = "\n".join(Installation(("/usr/bin/elastictrain",)).files().values())
    prevented = re.search(r"^RestartPreventExitStatus=(.*)$", unit, re.MULTILINE)
    hopeless = re.search(r"^  ([\d |]+)\) exit \"\$code\"", text, re.MULTILINE)
    stopped = re.search(r"^STOPPED=(\d+)", text, re.MULTILINE)
    assert prevented is not None
    assert hopeless is not None
    assert stopped is not None
    assert hopeless[1].split(" | ") == prevented[1].split()
    args = container("Job")["args"]
    assert args[args.index("--stopped-code") + 1] == stopped[1]


def test_it_is_told_early_enough() -> None:
    told = re.search(r"^#SBATCH --signal=B:TERM@(\d+)", SCRIPT.read_text(), re.MULTILINE)
    assert told is not None
    stop_s = CheckpointConfig().preempt_deadline_s + STOP_GRACE_S
    assert int(told[1]) >= stop_s + SLURM_INACCURACY_S + 30


# ---- several nodes, with a Slurm that is played

SRUN = """#!/bin/bash
# The supervisor of the first node ends; those of the others do once they hear of it, by the store or by a signal.
echo "srun $*" >> "$PLAYED/calls"
case " $* " in
  *" --relative=0 "*)
    until grep --quiet relative=1 "$PLAYED/calls"; do sleep 0.01; done
    exit "$FIRST" ;;
  *)
    [ "$HEAR" = store ] || read -r signal < "$PLAYED/told"
    exit "$OTHERS" ;;
esac
"""
SCANCEL = """#!/bin/bash
echo "scancel $*" >> "$PLAYED/calls"
case "$*" in
  "--signal=$HEAR 7."1) echo "$HEAR" > "$PLAYED/told" ;;
  *.0) exit 1 ;;
esac
"""
SQUEUE = "#!/bin/bash\necho RUNNING\n"
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo node0; else echo "scontrol $*" >> "$PLAYED/calls"; fi
"""


def play(folder: Path, *, first: int, hear: str, others: int = 80, patience_s: int = 120) -> tuple[int, list[str]]:
    """Runs the script on three nodes.

    Args:
        folder: for everything.
        first: what the supervisor of the first node ends with.
        hear: from what the others know that it is time to end: "store", or one of the signals.
        others: what they end with.
        patience_s: of the script with those who should end by themselves.

    Returns:
        Its code, and what it asked of Slurm.
    """
    programs = folder / "bin"
    programs.mkdir()
    for name, text in {"srun": SRUN, "scancel": SCANCEL, "squeue": SQUEUE, "scontrol": SCONTROL}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    os.mkfifo(folder / "told")
    script = re.sub(r"^PATIENCE_S=\d+", f"PATIENCE_S={patience_s}", SCRIPT.read_text(), flags=re.MULTILINE)
    done = subprocess.run(
        ["bash", "-c", script, "train.sbatch", "job.toml"],
        env={
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PLAYED": str(folder),
            "FIRST": str(first),
            "HEAR": hear,
            "OTHERS": str(others),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NAME": "train",
            "SLURM_JOB_NODELIST": "node[0-2]",
            "SLURM_JOB_NUM_NODES": "3",
        },
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.stderr
    return done.returncode, (folder / "calls").read_text().splitlines()


def told(calls: list[str], signal: str) -> bool:
    return f"scancel --signal={signal} 7.1" in calls


def test_the_first_node_and_the_others_are_a_step_each(tmp_path: Path) -> None:
    _, calls = play(tmp_path, first=0, hear="store", others=0)
    steps = sorted(call for call in calls if call.startswith("srun"))
    assert all("c10d://node0:20007" in step and 'elastic.nodes="1:3"' in step for step in steps)
    assert ["--relative=0 --nodes=1 --ntasks=1 " in steps[0], "--relative=1 --nodes=2 --ntasks=2 " in steps[1]] == [
        True
    ] * 2


@pytest.mark.parametrize(
    ("first", "code", "is_queued"),
    [(137, 0, True), (75, 0, True), (79, 79, False), (78, 78, False)],
    ids=["killed", "storage away", "halted", "refused"],
)
def test_the_end_of_the_first_node_ends_the_others(tmp_path: Path, first: int, code: int, is_queued: bool) -> None:
    """They have lost the store, and would wait for it until the time is over."""
    ended, calls = play(tmp_path, first=first, hear="TERM")
    assert ended == code
    assert told(calls, "TERM")
    assert not told(calls, "KILL")
    assert ("scontrol requeue 7" in calls) == is_queued


@pytest.mark.parametrize(("first", "others"), [(80, 80), (0, 0), (0, 78), (0, 79)])
def test_who_ends_with_the_job_is_not_told_once_more(tmp_path: Path, first: int, others: int) -> None:
    """Nor does it matter that one of them was refused, or halted, while the others went on."""
    code, calls = play(tmp_path, first=first, hear="store", others=others)
    assert code == 0
    assert not [call for call in calls if call.startswith("scancel")]
    assert ("scontrol requeue 7" in calls) == (first == 80)


@pytest.mark.parametrize(("first", "hear"), [(80, "TERM"), (0, "TERM"), (137, "KILL"), (80, "KILL")])
def test_who_does_not_end_is_made_to(tmp_path: Path, first: int, hear: str) -> None:
    code, calls = play(tmp_path, first=first, hear=hear, patience_s=1)  # what it waits for never comes by itself
    assert code == 0
    assert told(calls, "TERM")
    assert told(calls, hear)
    assert ("scontrol requeue 7" in calls) == (first != 0)
