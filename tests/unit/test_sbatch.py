"""The Slurm script: what can be said of it without a Slurm. tests/drill/test_slurm.py runs it."""

from __future__ import annotations

import re
import shutil
import subprocess

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
