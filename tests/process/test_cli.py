"""`elastictrain` as a user starts it: real commands, real torchrun, real exit codes."""

from __future__ import annotations

import json
import os
import signal
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from elastictrain.errors import ConfigError
from tests.process.helpers import (
    Finished,
    all_gone,
    descendants,
    read_metrics,
    run_cli,
    start_cli,
    train,
    wait_until,
    write_job,
    write_task,
)

# ---- without torch


@pytest.mark.parametrize(
    "command", [[], ["run"], ["init"], ["config"], ["config", "check"], ["config", "show"], ["config", "schema"]]
)
def test_help_everywhere(command: list[str]) -> None:
    shown = run_cli(*command, "--help")
    assert shown.code == 0
    assert "Usage" in shown.stdout
    assert run_cli(*command, "-h").stdout == shown.stdout


def test_version() -> None:
    from elastictrain import __version__

    assert run_cli("--version").stdout == f"elastictrain {__version__}\n"


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["run", "no-such-job"], 66, "there is no file no-such-job"),
        (["run", "digit"], 66, "Did you mean digits?"),
        (["config", "check", "digits", "--set", "train.max_step=3"], 78, "did you mean max_steps?"),
        (["run", "digits", "--set", "elastic.nproc_per_node=0"], 78, "elastic.nproc_per_node"),
        (["run", "digits", "--state-dir", "/proc/nowhere"], 73, "cannot be made"),
        (["train"], 64, "No such command"),
        (["run", "--nope"], 64, "No such option"),
        (["run", "--output", "nope", "x"], 64, "is not one of"),
        (["run"], 64, "Missing argument"),
    ],
)
def test_a_command_that_is_wrong(args: list[str], code: int, says: str) -> None:
    refused = run_cli(*args)
    assert refused.code == code
    assert says in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_config_that_is_wrong_is_explained_with_its_line(tmp_path: Path) -> None:
    path = write_job(tmp_path, "task:MyTask", train={"max_step": 3})
    line = path.read_text().splitlines().index("max_step = 3") + 1
    refused = run_cli("run", path)
    assert refused.code == 78
    assert f"{path}:{line}: unknown key train.max_step; did you mean max_steps?" in refused.stderr
    assert not (tmp_path / "checkpoints").exists(), "nothing is written before the job is valid"


NEVER_RUN = """
import sys
print("a module may print")
class MyTask:
    def __init__(self, width: int = 1):
        raise RuntimeError("nothing of it is run")
    def model(self): ...
    def train_data(self): ...
    def loss(self, model, batch): ...
"""


def test_a_check_imports_the_task_and_runs_nothing_of_it(tmp_path: Path) -> None:
    write_job(tmp_path, "mytask:MyTask", params={"width": 3})
    (tmp_path / "mytask.py").write_text(NEVER_RUN)
    checked = run_cli("config", "check", tmp_path)
    assert (checked.code, checked.stdout, checked.stderr) == (0, f"{tmp_path / 'job.toml'}: ok\n", "")


@pytest.mark.parametrize(
    ("task", "says"),
    [
        (None, ["there is no module 'mytask'"]),
        ("import nosuchpackage", ["importing it failed", "Install 'nosuchpackage'"]),
        ("def f(:\n    pass", ["raised SyntaxError", "mytask.py", "line 1", "^"]),
        ("x = 1 / 0", ["importing mytask raised ZeroDivisionError", "mytask.py", "line 1"]),
        ("import sys; print('why', file=sys.stderr); sys.exit(3)", ["ended the process with exit code 3", "why"]),
        ("import os; os.abort()", ["ended the process with exit code -6"]),
        (NEVER_RUN.replace("MyTask", "Other"), ["has no class 'MyTask'", "It has: Other"]),
        (
            NEVER_RUN.replace("def loss(self, model, batch)", "def loss(self, batch)"),
            ["MyTask.loss(self, batch)", "cannot"],
        ),
        (NEVER_RUN.replace("def model(self)", "def network(self)"), ["MyTask has no method model(self)"]),
        (NEVER_RUN.replace("width", "height"), ["[params] do not fit MyTask(height: int = 1)", "'width'"]),
    ],
)
def test_a_task_that_cannot_be_imported_is_found_by_check(tmp_path: Path, task: str | None, says: list[str]) -> None:
    path = write_job(tmp_path, "mytask:MyTask", params={"width": 3})
    if task is not None:
        (tmp_path / "mytask.py").write_text(task)
    refused = run_cli("config", "check", tmp_path)
    assert refused.code == 78
    assert refused.stdout == ""
    for text in [str(path), *says]:
        assert text in refused.stderr
    assert "Traceback" not in refused.stderr
    assert "elastictrain/training" not in refused.stderr, "our own frames tell the user nothing"


def test_what_show_shows_is_a_job_again(tmp_path: Path) -> None:
    for flags in ([], ["--changed"]):
        shown = run_cli("config", "show", "stdlib-lm", "--set", "train.max_steps=7", *flags)
        assert tomllib.loads(shown.stdout)["train"]["max_steps"] == 7
        (tmp_path / "job.toml").write_text(shown.stdout)
        assert run_cli("config", "check", tmp_path).code == 0
        again = run_cli("config", "show", tmp_path, *flags)
        assert again.stdout == shown.stdout, "the second reading is another job"
    as_json = run_cli("config", "show", tmp_path, "--json")
    assert json.loads(as_json.stdout)["train"]["max_steps"] == 7


def test_the_schema_is_json() -> None:
    schema = json.loads(run_cli("config", "schema").stdout)
    assert "train" in schema["properties"]


def test_init_writes_nothing_over_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("mine")
    refused = run_cli("init", tmp_path)
    assert refused.code == 73
    assert "already has task.py" in refused.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["task.py"]
    assert (tmp_path / "task.py").read_text() == "mine"


# ---- whole runs


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, Path]:
    """The digits example on two ranks, as JSON lines, with TensorBoard."""
    state = tmp_path_factory.mktemp("digits") / "state"
    done = run_cli(
        "run",
        "digits",
        "--state-dir",
        state,
        "--output",
        "json",
        "--set",
        "train.max_epochs=4",
        "--set",
        "data.num_workers=1",
    )
    assert done.code == 0, done.stdout + done.stderr
    return done, state


def test_every_line_is_an_event(digits: tuple[Finished, Path]) -> None:
    done, _ = digits
    names = [event["event"] for event in done.events]
    assert names.count("training_started") == 2, "one per rank"
    assert {e["rank"] for e in done.events_named("training_started")} == {0, 1}
    assert names.count("evaluated") == 4
    assert names[-1] == "summary"
    assert all("incarnation" in event for event in done.events)
    assert all({"rank", "step"} <= event.keys() for event in done.events_named("progress"))
    assert done.stderr == "", "a warning of a library reached the user"


def test_it_learns(digits: tuple[Finished, Path]) -> None:
    done, state = digits
    assert done.events[-1]["evaluation"]["eval/accuracy"] > 0.8
    losses = [line["loss"] for line in read_metrics(state)]
    assert losses[-1] < losses[0] / 2


def test_one_line_of_metrics_per_step(digits: tuple[Finished, Path]) -> None:
    _, state = digits
    steps = read_metrics(state)
    assert [line["step"] for line in steps] == list(range(1, 93)), "4 epochs of 23 windows, the last of each short"
    assert sum(line["samples"] for line in steps) == 4 * 1437
    assert [line["step"] for line in read_metrics(state, "eval")] == [23, 46, 69, 92]
    shares = read_metrics(state, "report")[-1]["time_shares"]
    assert sum(shares.values()) == pytest.approx(1)


def test_tensorboard_files_are_written(digits: tuple[Finished, Path]) -> None:
    _, state = digits
    assert list((state / "tensorboard").glob("events.out.tfevents.*"))


def test_a_new_job_runs_as_it_is_and_for_people(tmp_path: Path) -> None:
    made = run_cli("init", tmp_path / "fresh")
    assert made.code == 0
    assert "elastictrain run" in made.stdout
    done = run_cli("run", tmp_path / "fresh", "--output", "pretty", "--set", "elastic.threads_per_rank=1", cwd=tmp_path)
    assert done.code == 0, done.stderr
    assert "step    200/200" in done.stdout
    assert "eval/accuracy" in done.stdout
    assert "{" not in done.stdout, "raw JSON is not for people"
    assert (tmp_path / "checkpoints" / "fresh" / "metrics.jsonl").exists(), "the default state directory"


TASK = """
    import os, sys, time
    import torch
    from torch import nn

    class Data:
        def __len__(self):
            return 8
        def __getitem__(self, i):
            {item}
            return torch.tensor([float(i)])

    class MyTask:
        def model(self):
            {model}
            return nn.Linear(1, 1)
        def train_data(self):
            {data}
            return Data()
        def loss(self, model, batch):
            {loss}
            return model(batch).mean()
        {more}
"""


def task(*, item: str = "", model: str = "", data: str = "", loss: str = "", more: str = "") -> str:
    empty = "pass"
    return TASK.format(item=item or empty, model=model or empty, data=data or empty, loss=loss or empty, more=more)


@pytest.mark.parametrize(
    ("source", "code", "says"),
    [
        ("import nothing_of_that_name", 78, ["importing it failed", "Install 'nothing_of_that_name'"]),
        ("raise ValueError('at import')", 78, ["ValueError: at import", "task.py"]),
        ("class Other: pass", 78, ["has no class 'MyTask'", "It has: Other"]),
        ("class MyTask: pass", 78, ["has no method model(self)"]),
        (task(loss="return 3.0"), 78, ["MyTask.loss() returned float, not a tensor"]),
        (task(loss="return model(batch).repeat(2, 1)"), 78, ["a tensor of shape (2, 1), not a scalar"]),
        (task(item="if i == 5: raise KeyError('lost')"), 65, ["sample 5 (epoch 0, step", "KeyError: 'lost'"]),
        (task(data="return (x for x in ())"), 65, ["which has no dataset[i]"]),
        (task(data="return type('Endless', (), {'__getitem__': lambda self, i: i})()"), 65, ["length is unknown"]),
        (task(data="return []"), 65, ["MyTask.train_data() is empty"]),
        (task(model="return nn.Linear(1, 1).requires_grad_(False)"), 78, ["no trainable parameters", "All of its 2"]),
        (
            task(more="def optimizer(self, model): return torch.optim.SGD([model.weight], lr=1)"),
            78,
            ["leaves out 1 trainable parameter(s): bias"],
        ),
        (task(loss="raise ZeroDivisionError('in the loss')"), 70, ["ZeroDivisionError: in the loss", "task.py"]),
    ],
    ids=[
        "missing package", "raises at import", "no such class", "no methods", "loss is a float", "loss is no scalar",
        "dataset raises", "iterable", "no length", "empty", "nothing to train", "optimizer misses", "loss raises",
    ],
)  # fmt: skip
def test_a_mistake_in_the_task_is_explained(tmp_path: Path, source: str, code: int, says: list[str]) -> None:
    write_task(tmp_path, source)
    failed = train(tmp_path, expect_success=False)
    assert failed.codes == [code], failed.output
    message = str(failed.errors[0].as_error())
    for part in says:
        assert part in message
    assert "elastictrain/training" not in message, "our frames are no help to the user"


def test_a_failing_task_from_the_command_line(tmp_path: Path) -> None:
    """Sample five fails in a loader process of one of two ranks; the peer's broken collective is not the cause."""
    write_task(tmp_path, task(item="if i == 5: raise KeyError('lost')"))
    failed = run_cli(
        "run", tmp_path, "--output", "json", "--state-dir", tmp_path / "state",
        "--set", "elastic.nproc_per_node=2", "--set", "data.num_workers=2", "--set", "train.max_steps=9",
    )  # fmt: skip
    assert failed.code == 65, failed.stderr
    assert "the dataset failed at sample 5 (epoch 0, step" in failed.stderr
    assert "KeyError: 'lost'" in failed.stderr
    assert "gloo" not in failed.stderr
    assert all(event["event"] for event in failed.events)


def test_a_world_larger_than_the_global_batch(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"2 microbatch\(es\), too few for 3 ranks"):
        train(tmp_path, "Regression", world_size=3)


def test_accumulation_steps_keep_the_global_batch(tmp_path: Path) -> None:
    """Two ranks fix it at 2 × 3 × 2 = 12; one rank later goes on with 12, not 6. Prints pass through, as events."""
    write_task(tmp_path, task(loss="print('hello from', os.environ['RANK'], flush=True)"))
    write_job(tmp_path, "task:MyTask", train={"accumulation_steps": 3, "micro_batch_size": 2})
    state = tmp_path / "state"
    first = run_cli("run", tmp_path, "--state-dir", state, "--output", "json", "--set", "elastic.nproc_per_node=2")
    assert first.code == 0, first.stderr
    printed = {event["text"] for event in first.events_named("printed")}
    assert printed == {"hello from 0", "hello from 1"}
    second = run_cli("run", tmp_path, "--state-dir", state, "--output", "json")
    assert second.code == 0, second.stderr
    sizes = [event["global_batch_size"] for event in first.events_named("training_started")]
    assert sizes == [12, 12]
    assert second.events_named("training_started")[0]["global_batch_size"] == 12, "6 would be another training"
    assert second.events_named("training_started")[0]["incarnation"] == 2


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A job that trains until it is stopped; it makes a file at each step."""
    loss = "open(os.path.join(os.environ['MARKS'], 'rank-' + os.environ['RANK']), 'a').write('x')"
    write_task(tmp_path, task(loss=loss))
    write_job(
        tmp_path, "task:MyTask", train={"max_steps": 10**9}, elastic={"nproc_per_node": 2}, data={"num_workers": 1}
    )
    before = os.environ.get("MARKS")
    os.environ["MARKS"] = str(tmp_path)
    yield tmp_path, tmp_path / "state"
    if before is None:
        del os.environ["MARKS"]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_run_in_order(endless: tuple[Path, Path], signum: signal.Signals) -> None:
    """All ranks stop after the same step; meanwhile, nobody else gets the state directory."""
    job, state = endless
    with start_cli("run", job, "--state-dir", state, "--output", "json") as process:
        reader = Reader(process.stdout)
        wait_until(lambda: all((job / f"rank-{rank}").exists() for rank in range(2)))
        if signum is signal.SIGTERM:
            second = run_cli("run", job, "--state-dir", state)
            assert second.code == 75, "two runs would write one state"
            assert f"in use by process {process.pid}" in second.stderr
        family = descendants(process.pid)
        assert len(family) >= 3, "the agent and two ranks"
        process.send_signal(signum)
        assert process.wait(60) == 0, process.stderr.read() if process.stderr else ""
        wait_until(lambda: all_gone(family))
        summary = reader.last_event()
    assert summary["event"] == "summary"
    assert summary["complete"] is False
    assert "preempted" in summary["reason"]
    marks = [len((job / f"rank-{rank}").read_text()) for rank in range(2)]
    assert marks[0] == marks[1] == summary["counters"]["global_step"], "one microbatch each per step"
    assert [line["step"] for line in read_metrics(state)] == list(range(1, marks[0] + 1)), "no step's line is lost"


def test_a_killed_parent_leaves_nobody_behind(endless: tuple[Path, Path]) -> None:
    job, state = endless
    with start_cli("run", job, "--state-dir", state, "--output", "json") as process:
        Reader(process.stdout)
        wait_until((job / "rank-1").exists)
        family = descendants(process.pid)
        process.kill()
        wait_until(lambda: all_gone(family))


def test_a_killed_rank_is_replaced(endless: tuple[Path, Path]) -> None:
    """By a whole new group; the old one is gone, its loader processes included."""
    job, state = endless
    with start_cli("run", job, "--state-dir", state, "--output", "json") as process:
        reader = Reader(process.stdout)
        wait_until(lambda: all((job / f"rank-{rank}").exists() for rank in range(2)))
        ranks = [p for p in descendants(process.pid) if p.environ().get("RANK") == "1" and is_rank(p)]
        family = [p for p in descendants(process.pid) if "elastictrain.training.launcher" not in p.cmdline()]
        ranks[0].kill()
        wait_until(lambda: all_gone(family))
        wait_until(lambda: sum(line.count('"training_started"') for line in list(reader.lines)) == 4)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert reader.last_event()["incarnation"] == 2


def is_rank(process: psutil.Process) -> bool:
    parent = process.parent()
    return parent is not None and "elastictrain.training.agent" in " ".join(parent.cmdline())


class Reader:
    """Reads a process's output as it comes, so that it never blocks on a full pipe."""

    def __init__(self, stream: object) -> None:
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._thread.start()

    def _read(self, stream: Iterator[str]) -> None:
        self.lines.extend(stream)

    def last_event(self) -> dict[str, object]:
        self._thread.join()
        event: dict[str, object] = json.loads(self.lines[-1])
        return event
