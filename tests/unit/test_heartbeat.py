"""Heartbeats, stacks and what the operating system says: read back what was written, whatever happens meanwhile."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastictrain.core.phases import Phase
from elastictrain.heartbeat import (
    HeartbeatReader,
    HeartbeatWriter,
    heartbeat_path,
    heartbeat_paths,
    read_heartbeat,
)
from elastictrain.procs import catches, children_of, command_of, environment_of, read_stat, send_signal
from elastictrain.supervisor.evidence import Frame, is_in_collective, parse_stacks


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[HeartbeatWriter]:
    made = HeartbeatWriter(tmp_path, rank=3, local_rank=1, incarnation=7)
    yield made
    made.close()


def test_what_is_written_is_read(tmp_path: Path, writer: HeartbeatWriter) -> None:
    assert heartbeat_paths(tmp_path) == {3: writer.path}
    first = read_heartbeat(writer.path)
    assert first is not None
    assert (first.rank, first.local_rank, first.incarnation, first.pid) == (3, 1, 7, os.getpid())
    assert (first.phase, first.first_step, first.steps_done) == (Phase.INIT, -1, 0)
    assert first.main_thread == threading.main_thread().ident
    assert first.memory_bytes > 1 << 20
    writer.begin_with(40)
    writer.enter(Phase.READY, 42, 0, 41, 1)
    writer.enter(Phase.REDUCE, 42, 5)
    writer.tell_loss(0.5)
    beat = read_heartbeat(writer.path)
    assert beat is not None
    assert (beat.phase, beat.step, beat.microbatch, beat.applied, beat.skipped) == (Phase.REDUCE, 42, 5, 41, 1)
    assert (beat.first_step, beat.steps_done, beat.loss) == (40, 2, 0.5)
    assert first.moved_ns < beat.moved_ns == beat.phase_since_ns <= time.monotonic_ns()


def test_a_beat_moves_within_its_phase(writer: HeartbeatWriter) -> None:
    writer.enter(Phase.EVAL, 4, 0)
    before = read_heartbeat(writer.path)
    writer.beat(17)
    after = read_heartbeat(writer.path)
    assert before is not None
    assert after is not None
    assert (after.phase, after.microbatch, after.phase_since_ns) == (Phase.EVAL, 17, before.phase_since_ns)
    assert after.moved_ns > before.moved_ns


def test_the_longest_step_leaves_out_the_first_and_what_is_between_steps(
    writer: HeartbeatWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = time.monotonic_ns()

    def at(seconds: float) -> None:
        monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns + int(seconds * 1e9))

    def longest() -> float:
        beat = read_heartbeat(writer.path)
        assert beat is not None
        return beat.longest_step_ns / 1e9

    writer.begin_with(10)
    for second, phase, step in (
        (50.0, Phase.READY, 10),
        (90.0, Phase.READY, 11),  # the first step: it compiled
        (90.1, Phase.EVAL, 11),
        (150.0, Phase.READY, 11),
    ):
        at(second)
        writer.enter(phase, step, 0)
        assert longest() == 0
    at(152.0)
    writer.enter(Phase.READY, 12, 0)
    assert longest() == pytest.approx(2.0)
    for step in range(13, 200):
        at(152.0 + 0.1 * step)
        writer.enter(Phase.READY, step, 0)
    assert longest() < 0.2, "one slow step is not remembered for ever"


def test_it_ticks(writer: HeartbeatWriter) -> None:
    reader = HeartbeatReader(writer.path)
    deadline_s = time.monotonic() + 20
    while (beat := reader.read()) is None or beat.tick < 2:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    reader.close()


def test_a_record_that_is_not_ours_is_none(tmp_path: Path) -> None:
    path = heartbeat_path(tmp_path, 0)
    assert read_heartbeat(path) is None
    for content in (b"", b"short", bytes(256), b"etHB" + b"\xff" * 252):
        path.write_bytes(content)
        assert read_heartbeat(path) is None


def test_a_torn_record_is_what_it_was_before(writer: HeartbeatWriter) -> None:
    reader = HeartbeatReader(writer.path)
    writer.enter(Phase.DATA, 5, 0)
    good = reader.read()
    with writer.path.open("r+b") as file:
        file.seek(64)
        file.write((10**6).to_bytes(8, "little"))  # stopped after the first word of the next write
    assert reader.read() == good
    reader.close()


def test_a_reader_never_sees_half_a_move(tmp_path: Path) -> None:
    """A process moves as fast as it can; whatever is read belongs together."""
    code = (
        "import sys; from pathlib import Path; from elastictrain.heartbeat import HeartbeatWriter\n"
        "from elastictrain.core.phases import Phase\n"
        "w = HeartbeatWriter(Path(sys.argv[1]), 0, 0, 1)\n"
        "i = 0\n"
        "while True:\n"
        "    i += 1; w.enter(Phase.DATA, i, i)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    try:
        reader = HeartbeatReader(heartbeat_path(tmp_path, 0))
        deadline_s = time.monotonic() + 30
        values = set()
        while len(values) < 500:
            assert time.monotonic() < deadline_s
            beat = reader.read()
            if beat is not None:
                assert beat.step == beat.microbatch
                assert beat.phase is (Phase.DATA if beat.step else Phase.INIT)
                values.add(beat.step)
        reader.close()
    finally:
        process.kill()
        process.wait()


# ---- stacks


def test_stacks_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "stacks.txt"
    with path.open("w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    main = parse_stacks(path.read_text())[threading.main_thread().ident or 0]
    assert main[0].function == "test_stacks_are_told_apart"
    assert main[0].file == __file__


@pytest.mark.parametrize(
    ("files", "phase", "expected"),
    [
        ((), Phase.FORWARD, None),
        (("/x/torch/distributed/distributed_c10d.py", "/x/torch/distributed/c10d_logger.py"), Phase.FORWARD, True),
        (("/x/torch/nn/parallel/distributed.py",), Phase.FORWARD, True),
        (("/me/model.py", "/x/torch/nn/module.py", "/x/torch/nn/parallel/distributed.py"), Phase.FORWARD, False),
        (("/me/a.py", "/me/b.py", "/me/c.py", "/x/torch/distributed/run.py"), Phase.DATA, False),
        (("/x/torch/autograd/graph.py",), Phase.REDUCE, None),
    ],
)  # fmt: skip
def test_who_is_in_a_collective(files: tuple[str, ...], phase: Phase, expected: bool | None) -> None:
    assert is_in_collective([Frame(file, 1, "f") for file in files], phase) is expected


# ---- processes


def test_processes() -> None:
    me = os.getpid()
    process = subprocess.Popen(
        [sys.executable, "-c", "print('there', flush=True); import time; time.sleep(1000)"],
        env={**os.environ, "MARK": "x y"},
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        stat = read_stat(process.pid)
        assert stat is not None
        assert stat.parent_pid == me
        assert process.pid in children_of(me)
        assert environment_of(process.pid)["MARK"] == "x y"
        assert command_of(process.pid)[0] == sys.executable
        assert not catches(process.pid, signal.SIGUSR1)
        assert not send_signal(process.pid, signal.SIGKILL, started_ticks=stat.started_ticks + 1), "another process"
        assert send_signal(process.pid, signal.SIGKILL, started_ticks=stat.started_ticks)
        assert process.wait() == -signal.SIGKILL
        assert read_stat(process.pid) is None
        assert not send_signal(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.stdout.close()
