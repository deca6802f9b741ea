"""The commands around a supervisor, as people and scripts use them: with one, without one, with one that hangs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastictrain.cli.status_show import StatusRequest, parse_plain
from elastictrain.core.events import Kind
from elastictrain.supervisor.record import Record, read_status
from tests.process.fake import fake_supervisor, status_of
from tests.process.helpers import ROOT, Finished, run_cli, start_cli, wait_until


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Path]:
    """A folder in which the job `alpha` trains."""
    with fake_supervisor(tmp_path / "checkpoints" / "alpha", "--max-steps", "100000", "--step-s", "0.01"):
        yield tmp_path


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """A folder in which the job `alpha` has halted and `beta` was completed; no supervisor runs."""
    for name, kind in (("alpha", Kind.HALTED), ("beta", Kind.COMPLETED)):
        folder = tmp_path / "checkpoints" / name
        folder.mkdir(parents=True)
        record = Record(folder, name)
        record.append(Kind.SUPERVISOR_STARTED, {"pid": 1, "version": "0"})
        record.append(Kind.INCARNATION_STARTED, {"incarnation": 1, "world_size": 2})
        record.append(Kind.RANKS_TRAINING, {"incarnation": 1, "global_step": 0})
        record.append(Kind.PROGRESS, {"step": 10, "max_steps": 10, "loss": 0.25, "steps_per_s": 2.0, "incarnation": 1})
        record.append(Kind.SNAPSHOT_DURABLE, {"at_step": 10})
        record.append(kind, {"reason": "step 11 fails"} if kind == Kind.HALTED else {})
        record.close()
    return tmp_path


def test_status_for_people(work: Path) -> None:
    wait_until(lambda: status_of(work / "checkpoints" / "alpha")["global_step"] > 10)
    # On a busy machine the supervisor may not answer in time; then it is the journal that does.
    done = wait_until(lambda: (d := run_cli("status", "alpha", cwd=work)) and "forward" in d.stdout and d)
    assert done.code == 0, done.stderr
    for words in ("alpha", "training", "since step 0", "/ 100,000", "steps/s", "goodput", "forward", "cpu", "ETA"):
        assert words in done.stdout
    assert "not running" not in done.stdout


def test_status_of_all_jobs(stopped: Path) -> None:
    done = run_cli("status", cwd=stopped)
    assert done.code == 0
    assert "alpha" in done.stdout
    assert "halted" in done.stdout
    assert "beta" in done.stdout
    documents = json.loads(run_cli("status", "--json", cwd=stopped).stdout)
    assert [(d["job"], d["state"]) for d in documents] == [("alpha", "halted"), ("beta", "completed")]
    assert "No job has run here" in run_cli("status", cwd=stopped / "checkpoints").stdout


def test_status_without_a_supervisor(stopped: Path) -> None:
    done = run_cli("status", "alpha", cwd=stopped)
    assert done.code == 79
    assert "halted  step 11 fails" in done.stdout
    assert "not running" in done.stdout
    document = json.loads(run_cli("status", "--state-dir", "checkpoints/alpha", "--json", cwd=stopped).stdout)
    assert (document["daemon_running"], document["loss"], document["snapshots"]["durable"]["step"]) == (False, 0.25, 10)
    assert run_cli("status", "beta", cwd=stopped).code == 5


def test_jobs_of_services_are_found_by_name(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this user's service manager lie where those of the machine's do, under another root."""
    services = stopped / "xdg" / "elastictrain"
    services.mkdir(parents=True)
    monkeypatch.setenv("XDG_STATE_HOME", str(stopped / "xdg"))
    (stopped / "checkpoints" / "beta").rename(services / "beta")
    assert run_cli("status", "beta", cwd=stopped).code == 5
    documents = json.loads(run_cli("status", "--json", cwd=stopped).stdout)
    assert [(d["job"], d["state_dir"]) for d in documents] == [
        ("alpha", str(stopped / "checkpoints" / "alpha")),
        ("beta", str(services / "beta")),
    ]
    assert "completed" in run_cli("events", "beta", cwd=stopped).stdout
    assert "no supervisor of beta" in run_cli("checkpoint", "beta", cwd=stopped).stderr
    for folder in ("checkpoints", "elsewhere"):
        (stopped / folder).mkdir(exist_ok=True)
    assert "beta" in run_cli("status", cwd=stopped / "elsewhere").stdout


def test_of_two_jobs_of_one_name_the_one_that_runs_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    service, by_hand = tmp_path / "xdg" / "elastictrain" / "alpha", tmp_path / "checkpoints" / "alpha"
    with fake_supervisor(by_hand, "--max-steps", "5"):
        wait_until(lambda: read_status(by_hand, "alpha").state == "completed")
    with fake_supervisor(service, "--max-steps", "100000"):
        assert json.loads(run_cli("status", "alpha", "--json", cwd=tmp_path).stdout)["state_dir"] == str(service)
        listed = run_cli("status", cwd=tmp_path).stdout
        assert listed.count("alpha (") == 2
        assert run_cli("stop", "alpha", cwd=tmp_path).code == 0
    ambiguous = run_cli("status", "alpha", cwd=tmp_path)
    assert ambiguous.code == 64
    assert str(service) in ambiguous.stderr
    assert "checkpoints/alpha" in ambiguous.stderr


def test_a_job_that_this_user_may_not_see(stopped: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("becoming another user needs root")
    with tempfile.TemporaryDirectory() as name:  # where others may look, as they may not into pytest's own folder
        work = Path(name)
        work.chmod(0o755)
        shutil.copytree(stopped / "checkpoints", work / "checkpoints")
        (work / "checkpoints" / "alpha").chmod(0o700)
        check_what_nobody_sees(work)


def check_what_nobody_sees(work: Path) -> None:

    def as_nobody(*args: str) -> subprocess.CompletedProcess[str]:
        code = (
            "import os, sys; sys.path.insert(0, os.environ['PYTHONPATH'])\n"
            "from elastictrain.cli import app, daemon, job_dirs, status_show, status_view\n"
            "import elastictrain.supervisor.journal, elastictrain.supervisor.record, rich.console, typer.rich_utils\n"
            "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
            "from elastictrain.cli.main import main; main()"
        )
        return subprocess.run(
            [sys.executable, "-c", code, *args],
            cwd=work,
            env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
            capture_output=True,
            text=True,
            check=False,
        )

    named = as_nobody("status", "alpha")
    assert named.returncode == 77, named.stderr
    assert "checkpoints/alpha is not for this user to see" in named.stderr
    listed = as_nobody("status", "--json")
    assert listed.returncode == 0, listed.stderr
    assert [d["job"] for d in json.loads(listed.stdout)] == ["beta"]
    assert "checkpoints/alpha is not for this user to see" in listed.stderr


def test_exit_codes_of_a_job_that_comes_and_goes(tmp_path: Path) -> None:
    folder = tmp_path / "alpha"
    with fake_supervisor(folder, "--max-steps", "100000") as process:
        assert run_cli("drain", "--state-dir", folder).code == 0
        assert run_cli("status", "--state-dir", folder).code == 6
        process.kill()
        process.wait()
    with fake_supervisor(folder, "--max-steps", "100000") as process:
        assert run_cli("status", "--state-dir", folder).code == 0
        process.kill()
        process.wait()
    killed = run_cli("status", "--state-dir", folder)
    assert killed.code == 3
    assert "the supervisor is gone; its last word was training" in killed.stdout


def test_a_supervisor_that_hangs_holds_no_one_up(tmp_path: Path) -> None:
    with fake_supervisor(tmp_path / "alpha", "--max-steps", "100000") as process:
        process.send_signal(signal.SIGSTOP)
        done = run_cli("status", "--state-dir", tmp_path / "alpha", "--json")
        document = json.loads(done.stdout)
        assert (document["daemon_running"], document["daemon"]["answers"]) == (True, False)
        assert "does not answer within 1.5 s" in document["reason"]
        assert "does not answer" in run_cli("status", "--state-dir", tmp_path / "alpha").stdout
        told = run_cli("checkpoint", "--timeout", "0.1", "--state-dir", tmp_path / "alpha", deadline_s=30)
        assert told.code == 69
        assert "does not answer" in told.stderr


def test_a_job_is_found_by_its_file(work: Path) -> None:
    (work / "jobs").mkdir()
    (work / "jobs" / "train.toml").write_text('name = "alpha"\nnothing_else = "is right"\n')
    for job in ("alpha", "jobs/train.toml"):
        assert json.loads(run_cli("status", job, "--json", cwd=work).stdout)["job"] == "alpha"
    missing = run_cli("status", "gamma", cwd=work)
    assert missing.code == 66
    assert "there is no job gamma" in missing.stderr
    assert run_cli("status", "alpha", "--state-dir", "checkpoints/alpha", cwd=work).code == 64


@pytest.mark.parametrize("command", ["stop", "checkpoint", "drain", "resume", "restart"])
def test_without_a_supervisor_nothing_can_be_told(stopped: Path, command: str) -> None:
    done = run_cli(command, "alpha", cwd=stopped)
    assert done.code == 69
    assert "no supervisor of alpha runs on this host; the job is halted: step 11 fails" in done.stderr
    assert "systemctl start elastictrain@alpha" in done.stderr
    ambiguous = run_cli(command, cwd=stopped)
    assert ambiguous.code == 64
    assert "alpha, beta" in ambiguous.stderr


def test_commands(work: Path) -> None:
    taken = json.loads(run_cli("checkpoint", "--json", cwd=work).stdout)
    assert taken["job"] == "alpha"
    assert taken["global_step"] > 0
    assert run_cli("restart", "--reason", "new driver", cwd=work).stdout == "alpha: restarts its worker group\n"
    assert run_cli("drain", cwd=work).code == 0
    again = run_cli("drain", cwd=work)
    assert (again.code, "nothing to drain" in again.stderr) == (70, True)
    assert run_cli("resume", cwd=work).code == 0
    assert run_cli("stop", cwd=work).stdout == "alpha: stopped\n"
    document = json.loads(run_cli("status", "alpha", "--json", cwd=work).stdout)
    assert (document["state"], document["restarts"][0]["cause"]) == ("stopped", "restart: new driver")


def test_events(stopped: Path) -> None:
    done = run_cli("events", "alpha", "--json", cwd=stopped)
    names = [json.loads(line)["event"] for line in done.stdout.splitlines()]
    assert names[0] == "supervisor_started"
    assert names[-1] == "halted"
    assert "halted               reason=step 11 fails" in run_cli("events", "alpha", "-n", "1", cwd=stopped).stdout
    some = run_cli("events", "alpha", "--kind", "progress", "--json", cwd=stopped)
    assert [json.loads(line)["step"] for line in some.stdout.splitlines()] == [10]


def test_events_follow_over_two_supervisors(tmp_path: Path) -> None:
    folder = tmp_path / "alpha"
    with (
        fake_supervisor(folder, "--max-steps", "20"),
        start_cli("events", "-f", "--json", "--kind", "supervisor_started,completed", "--state-dir", folder) as client,
    ):
        seen: list[dict[str, object]] = []
        assert client.stdout is not None
        for line in client.stdout:
            seen.append(json.loads(line))
            if seen[-1]["event"] == "completed":
                break
        with fake_supervisor(folder, "--max-steps", "1000"):
            line = client.stdout.readline()
            assert json.loads(line)["event"] == "supervisor_started"
    assert [event["event"] for event in seen] == ["supervisor_started", "completed"]


def test_logs(tmp_path: Path) -> None:
    folder = tmp_path / "alpha"
    for run, rank, text in ((1, 0, "old\n"), (2, 0, "zero a\nzero b\n"), (2, 1, "one a\nhalf a li")):
        (folder / "runs" / f"{run:04d}").mkdir(parents=True, exist_ok=True)
        (folder / "runs" / f"{run:04d}" / f"rank-{rank}.log").write_text(text)
    done = run_cli("logs", "--state-dir", folder)
    assert done.stdout.splitlines() == ["rank 0: zero a", "rank 0: zero b", "rank 1: one a"]
    assert run_cli("logs", "--state-dir", folder, "--rank", "0", "-n", "1").stdout == "zero b\n"
    assert run_cli("logs", "--state-dir", folder, "--incarnation", "1").stdout == "rank 0: old\n"
    missing = run_cli("logs", "--state-dir", folder, "--rank", "7")
    assert missing.code == 66
    assert "no log of rank 7" in missing.stderr
    with start_cli("logs", "--state-dir", folder, "--rank", "1", "-f") as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "one a\n"
        with (folder / "runs" / "0002" / "rank-1.log").open("a") as file:
            file.write("ne\n")
        assert client.stdout.readline() == "half a line\n"
        (folder / "runs" / "0003").mkdir()
        (folder / "runs" / "0003" / "rank-1.log").write_text("of the next incarnation\n")
        assert client.stdout.readline() == "of the next incarnation\n"


def test_incidents(tmp_path: Path) -> None:
    folder = tmp_path / "alpha"
    assert "No incidents" in run_cli("incidents", "--state-dir", _made(folder)).stdout
    own = _made(folder / "incidents" / "0002")
    (own / "incident.json").write_text(json.dumps({"kind": "hang", "ranks": [1], "phase": "forward"}))
    (own / "stacks-1.txt").write_text('File "task.py", line 7 in loss\n')
    (_made(folder / "incidents" / "0010") / "incident.json").write_text("{ torn")
    rows = json.loads(run_cli("incidents", "--state-dir", folder, "--json").stdout)
    assert [(row["incident"], row.get("kind")) for row in rows] == [("2", "hang"), ("10", None)]
    assert "damaged" in rows[1]
    shown = run_cli("incidents", "--state-dir", folder, "show", "2")
    assert "forward" in shown.stdout
    assert 'File "task.py", line 7 in loss' in shown.stdout
    evidence = json.loads(run_cli("incidents", "--state-dir", folder, "show", "2", "--json").stdout)["evidence"]
    assert list(evidence) == ["stacks-1.txt"]
    missing = run_cli("incidents", "--state-dir", folder, "show", "9")
    assert (missing.code, "There are: 2, 10" in missing.stderr) == (66, True)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def test_watch_shows_again_and_again(work: Path) -> None:
    with start_cli("status", "alpha", "--watch", "--json", cwd=work) as client:
        assert client.stdout is not None
        first, second = (json.loads(client.stdout.readline()) for _ in range(2))
        client.send_signal(signal.SIGINT)
        assert client.wait(20) == 0
    assert second["global_step"] > first["global_step"]


# ---- at once


@pytest.mark.parametrize(
    ("arguments", "request_"),
    [
        ([], StatusRequest()),
        (["a", "--json"], StatusRequest("a", as_json=True)),
        (["--state-dir", "d", "-w"], StatusRequest(state_dir=Path("d"), watch=True)),
        (["--help"], None),
        (["a", "b"], None),
        (["--state-dir"], None),
        (["--interval", "2"], None),
        ([""], None),
        (["-jw"], None),
    ],
)
def test_the_short_way(arguments: list[str], request_: StatusRequest | None) -> None:
    assert parse_plain(arguments) == request_


def test_the_long_way_shows_the_same(stopped: Path) -> None:
    short, long = (run_cli("status", "alpha", "--json", *more, cwd=stopped) for more in ([], ["--interval", "1"]))
    assert short.code == long.code == 79
    assert _timeless(short) == _timeless(long)


def _timeless(done: Finished) -> dict[str, object]:
    return {
        key: value for key, value in json.loads(done.stdout).items() if not key.endswith("age_s") and key != "snapshots"
    }


def test_nothing_heavy_is_loaded(stopped: Path) -> None:
    """What takes long to import is what `status` takes: a bound on names, since a bound on time would be no test."""
    for arguments, heavy in (
        (
            ["status", "alpha"],
            ("torch", "numpy", "pydantic", "typer", "structlog", "aiohttp", "asyncio", "fsspec", "http.client"),
        ),
        (["events", "alpha"], ("torch", "numpy", "structlog", "aiohttp", "fsspec")),
        (["status", "--help"], ("torch", "numpy", "structlog", "aiohttp", "fsspec")),
    ):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "elastictrain.cli.main", *arguments],
            cwd=stopped,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        loaded = {
            line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")
        }
        assert "elastictrain.cli" in loaded, done.stderr
        assert not loaded & set(heavy), arguments
