"""What a scheduler asks and reads: the probes, and the exit code of a run that was stopped before its end."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.process.fake import fake_supervisor
from tests.process.helpers import run_cli, start_cli, wait_until, write_job


def test_probes(tmp_path: Path) -> None:
    """A node that is drained lives and is not ready; one whose supervisor stands still does not even live."""
    state = ("--state-dir", tmp_path / "alpha")
    with fake_supervisor(tmp_path / "alpha", "--max-steps", "100000") as process:
        for what in ("live", "ready"):
            done = wait_until(lambda what=what: (d := run_cli("probe", what, *state)) and d.code == 0 and d)
            assert done.stdout.startswith("training: ")
        assert run_cli("drain", *state).code == 0
        assert run_cli("probe", "live", *state).code == 0
        drained = run_cli("probe", "ready", *state)
        assert (drained.code, drained.stdout.partition(":")[0]) == (1, "drained")
        process.send_signal(signal.SIGSTOP)
        for what in ("live", "ready"):
            hung = run_cli("probe", what, *state, "--timeout", "0.5")
            assert hung.code == 69
            assert "does not answer" in hung.stderr
    gone = run_cli("probe", "live", *state)
    assert gone.code == 69, "its journal, which says drained, is no sign of life"
    assert run_cli("probe", "live", "--state-dir", tmp_path / "none").code == 66
    wrong = run_cli("probe", "healthy", *state)
    assert wrong.code == 64
    assert "'live', 'ready'" in wrong.stderr


def test_the_code_of_a_run_that_was_stopped(tmp_path: Path) -> None:
    """A scheduler that starts a job again unless it ends with 0 must see that this was not the end; and see the end."""
    job = write_job(tmp_path, "tests.process.tasks:Regression", train={"max_steps": 10**9})
    command = ("run", job, "--state-dir", tmp_path / "state", "--output", "json", "--stopped-code", "80")
    with start_cli(*command) as process:
        wait_until(lambda: run_cli("probe", "ready", "--state-dir", tmp_path / "state").code == 0)
        process.send_signal(signal.SIGTERM)
        process.communicate()
        assert process.returncode == 80
    done = run_cli(*command, "--set", "train.max_steps=2")
    assert done.code == 0, done.stderr
