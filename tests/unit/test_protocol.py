"""What processes share: durable writes, reports, the stop board, lines on standard error."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain import protocol
from elastictrain.cli.views import JsonView
from elastictrain.errors import BY_NAME, ElasticTrainError, HaltError, WorkerFailedError
from elastictrain.logs import MAX_LINE_BYTES, make_logger
from elastictrain.protocol import (
    ErrorReport,
    Group,
    RunSpec,
    SnapshotSource,
    StopBoard,
    read_error_reports,
    write_atomically,
    write_json,
)
from elastictrain.supervisor.output import Event, Printed, parse_line

# ---- durable writes

EFFECTS = [
    ("tempfile", "mkstemp"),
    ("os", "fdopen"),
    ("os", "fsync"),
    ("Path", "replace"),
]


class Interrupted(BaseException):
    """Not an Exception: as a KeyboardInterrupt would, it passes every `except Exception`."""


@pytest.mark.parametrize(("owner", "effect"), EFFECTS)
@pytest.mark.parametrize("old", [b"old", None], ids=["over an old file", "a new file"])
def test_a_write_that_is_interrupted_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: str, effect: str, old: bytes | None
) -> None:
    path = tmp_path / "file"
    if old is not None:
        path.write_bytes(old)

    def interrupt(*_args: Any, **_kwargs: Any) -> None:
        raise Interrupted

    target = {"tempfile": protocol.tempfile, "os": protocol.os, "Path": Path}[owner]
    with monkeypatch.context() as patch:
        patch.setattr(target, effect, interrupt)
        with pytest.raises(Interrupted):
            write_atomically(path, b"new content")
    assert (path.read_bytes() if path.exists() else None) == old
    assert [p.name for p in tmp_path.iterdir()] == (["file"] if old is not None else []), "a temporary file was left"
    write_atomically(path, b"new content")
    assert path.read_bytes() == b"new content"


@pytest.mark.parametrize("size", range(12))
def test_a_disk_that_is_full_after_any_prefix_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    open_file = os.fdopen

    class Full(io.RawIOBase):
        def __init__(self, fd: int) -> None:
            self._file = open_file(fd, "wb", buffering=0)

        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            self._file.write(data[:size])
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            self._file.close()
            super().close()

    with monkeypatch.context() as patch:
        patch.setattr(protocol.os, "fdopen", lambda fd, _mode: Full(fd))
        with pytest.raises(OSError, match="No space"):
            write_atomically(path, b"new content")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_content_is_on_disk_before_its_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(
        protocol.os,
        "fsync",
        lambda fd: (order.append("dir" if Path(f"/proc/self/fd/{fd}").is_dir() else "file"), fsync(fd)),
    )
    monkeypatch.setattr(Path, "replace", lambda self, to: (order.append("rename"), replace(self, to))[1])
    write_json(tmp_path / "x.json", {"b": 1, "a": [2]})
    assert order == ["file", "rename", "dir"]
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": [2], "b": 1}


# ---- records

TEXT = st.text(max_size=30)


@given(
    rank=st.integers(0, 1000),
    kind=st.sampled_from([*BY_NAME, "ValueError"]),
    what=TEXT,
    hint=TEXT,
    step=st.integers(0, 10**12),
    secondary=st.booleans(),
)
def test_an_error_report_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, rank: int, kind: str, what: str, hint: str, step: int, secondary: bool
) -> None:
    folder = tmp_path_factory.mktemp("run")
    code = BY_NAME.get(kind, WorkerFailedError).exit_code
    report = ErrorReport(rank, kind, what, hint, code, step, secondary, "traceback")
    report.write(folder)
    assert read_error_reports(folder) == [report]
    error = report.as_error()
    assert error.exit_code == code
    assert f"rank {rank}, step {step}" in error.what
    assert error.hint == hint
    assert type(error) is BY_NAME.get(kind, WorkerFailedError)


def test_causes_come_before_consequences(tmp_path: Path) -> None:
    ErrorReport(0, "WorkerFailedError", "peer lost", "", 70, 3, secondary=True).write(tmp_path)
    ErrorReport(2, "DataError", "late", "", 65, 3).write(tmp_path)
    ErrorReport(1, "HaltError", "first", "", 79, 3).write(tmp_path)
    (tmp_path / "error-7.json").write_text('{"rank": 7')
    (tmp_path / "error-8.json").write_text('{"other": 7}')
    reports = read_error_reports(tmp_path)
    assert [r.rank for r in reports] == [1, 2, 0]
    assert isinstance(reports[0].as_error(), HaltError)


def test_a_run_spec_comes_back_as_it_was(tmp_path: Path) -> None:
    spec = RunSpec(
        incarnation=3,
        group=Group("job-3-abcdef", 1, 2, 2, 4, "10.0.0.2", "10.0.0.1", 29000, ("a", "b"), ("10.0.0.1", "10.0.0.2")),
        state_dir="/state",
        job_dir=None,
        config={"train": {"max_steps": 5}},
        kept_global_batch_size=24,
        run_id="0123abcd",
        source=SnapshotSource(
            "s3://other/snapshots", "4567cdef", 12, {"key": "k", "client_kwargs": {"region_name": "x"}}
        ),
        allowed_differences=["seed"],
        mean_time_between_failures_s=3600.0,
    )
    spec.write(tmp_path)
    assert RunSpec.read(tmp_path) == spec


def test_every_error_has_a_code_a_class_and_a_docstring() -> None:
    def all_below(cls: type[ElasticTrainError]) -> set[type[ElasticTrainError]]:
        return {cls}.union(*(all_below(sub) for sub in cls.__subclasses__()))

    assert set(BY_NAME.values()) == all_below(ElasticTrainError), "a class cannot cross a process boundary"
    assert all(cls.exit_code and cls.__doc__ for cls in BY_NAME.values())
    assert str(ElasticTrainError("what", "hint")) == "what\nhint"
    assert str(ElasticTrainError("what")) == "what"


# ---- the stop board


def _ask(path: str) -> None:
    board = StopBoard(Path(path))
    board.ask()
    board.close()


def test_two_processes_see_one_board(tmp_path: Path) -> None:
    path = tmp_path / "board"
    StopBoard.create(path)
    board = StopBoard(path)
    assert not board.asked
    assert board.last_step is None
    process = multiprocessing.get_context("spawn").Process(target=_ask, args=(str(path),))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert board.asked
    assert board.last_step is None, "only rank zero says after which step"
    board.stop_after(0)
    other = StopBoard(path)
    assert other.last_step == 0, "step 0 is a step, not the absence of one"
    other.close()
    board.close()


def test_a_board_of_one_process_needs_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(protocol.ENV_RUN_DIR, raising=False)
    board = StopBoard.from_environment()
    board.ask()
    board.stop_after(41)
    assert board.asked
    assert board.last_step == 41
    assert not StopBoard.from_environment().asked


def test_a_state_that_was_to_be_passed_on_may_have_to_be_kept_after_all() -> None:
    board = StopBoard(None)
    board.pass_on()
    assert board.is_passing_on
    board.pass_on_no_more()
    assert not board.is_passing_on


# ---- lines


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"event": "progress", "step": 1}\n', Event("progress", {"event": "progress", "step": 1})),
        ("hello\n", Printed("hello")),
        ('{"no": "event"}\n', Printed('{"no": "event"}')),
        ('{"event": 3}\n', Printed('{"event": 3}')),
        ("{broken\n", Printed("{broken")),
        ("[1]\n", Printed("[1]")),
        ("\n", Printed("")),
    ],
)
def test_events_and_prints_are_told_apart(line: str, expected: Event | Printed) -> None:
    assert parse_line(line) == expected


def test_a_logged_event_is_a_line_with_keys() -> None:
    stream = io.StringIO()
    log = make_logger(stream, stamp=lambda: {"step": 7}, rank=3)
    log.warning("something_happened", what="x")
    log.info("with_its_own_step", step=1)
    first, second = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert first["event"] == "something_happened"
    assert first["level"] == "warning"
    assert (first["rank"], first["step"], first["what"]) == (3, 7, "x")
    assert second["step"] == 1


@pytest.mark.parametrize("text", ["a" * 20_000, "\u20ac" * 20_000, '"\n' * 20_000], ids=["ascii", "euro", "escapes"])
def test_a_long_event_stays_one_write_of_a_pipe(text: str) -> None:
    stream = io.StringIO()
    make_logger(stream, rank=0).error("failed", what="short", hint=text, more=text)
    line = stream.getvalue()
    assert len(line.encode()) <= 4096, "longer lines of several ranks can mix on a pipe"
    assert json.loads(line)["what"] == "short"
    assert MAX_LINE_BYTES < 4096


def test_events_for_machines_are_json_whatever_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """Python's parser takes NaN and Infinity; jq and most others do not."""
    summaries: list[dict[str, Any]] = []
    view = JsonView(lambda _text, _incarnation: None, summaries.append, 1, sys.stdout)
    view.show(Event("progress", {"event": "progress", "loss": float("nan"), "grad_norm": float("inf")}))
    view.summary({"summary": {"last_loss": float("-inf"), "evaluation": {"eval/loss": float("nan")}}}, "/state")
    assert json.loads(capsys.readouterr().out) == {"event": "progress", "loss": "NaN", "grad_norm": "Infinity"}
    assert summaries == [{"last_loss": "-Infinity", "evaluation": {"eval/loss": "NaN"}, "state_dir": "/state"}]
