"""What old incarnations and incidents leave goes, the newest stay; and a log of a rank has an end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.cli.events_commands import _last_lines, _Tail
from elastictrain.supervisor.pruning import prune
from elastictrain.supervisor.rank_log import RankLog, earlier


def names(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir())


def test_the_newest_stay_and_those_with_an_incident(tmp_path: Path) -> None:
    for number in range(1, 13):
        (tmp_path / "runs" / f"{number:04d}" / "logs").mkdir(parents=True)
        (tmp_path / "runs" / f"{number:04d}" / "rank-0.log").write_text("x")
    for number, incarnation in ((1, 2), (2, 4), (3, 5)):
        folder = tmp_path / "incidents" / f"{number:04d}"
        folder.mkdir(parents=True)
        (folder / "incident.json").write_text(json.dumps({"incarnation": incarnation}))
    (tmp_path / "incidents" / "0004").mkdir()  # one whose evidence could not be written
    prune(tmp_path, keep_incarnations=3, keep_incidents=3)
    assert names(tmp_path / "incidents") == [2, 3, 4]
    assert names(tmp_path / "runs") == [4, 5, 10, 11, 12]


def test_a_new_state_directory_has_nothing_to_prune(tmp_path: Path) -> None:
    prune(tmp_path, keep_incarnations=2, keep_incidents=1)
    assert list(tmp_path.iterdir()) == []


@given(chunks=st.lists(st.binary(max_size=40).map(lambda data: data.replace(b"\r", b" ")), max_size=60))
def test_a_log_is_bounded_and_keeps_the_newest(tmp_path_factory: pytest.TempPathFactory, chunks: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("log") / "rank-0.log"
    log = RankLog(path, max_bytes=100)
    for chunk in chunks:
        log.write(chunk)
        assert not path.exists() or path.stat().st_size <= 2 * 100 + 40 + 60
    log.close()
    written = b"".join(chunks)
    kept = b"".join(p.read_bytes() for p in (earlier(path), path) if p.exists())
    kept = kept.replace(b"[elastictrain: what was before is in rank-0.log.1]\n", b"")
    assert written.endswith(kept)
    assert len(kept) >= min(len(written), 40)


def test_a_reader_follows_over_the_change_of_files(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    log, tail = RankLog(path, max_bytes=200), _Tail(path)
    written, read = [], []
    for number in range(100):
        line = f"line {number}"
        written.append(line)
        log.write(f"{line}\n".encode())
        if number % 3 == 0:
            read += tail.take()
    log.close()
    read += tail.take()
    assert [line for line in read if not line.startswith("[elastictrain")] == written
    lines = [line for line in _last_lines(path, _Tail(path).take(), 12) if not line.startswith("[elastictrain")]
    assert lines == written[-len(lines) :]
    assert len(lines) >= 11


def test_a_full_disk_costs_the_log_and_is_said(tmp_path: Path) -> None:
    full, path = Path("/dev/full"), tmp_path / "rank-0.log"
    path.symlink_to(full)
    log = RankLog(path)
    log.write(b"lost\n")
    log.close()
    path.unlink()
    log.write(b"kept\n")
    log.close()
    assert path.read_text() == "[elastictrain: 5 bytes are lost: No space left on device]\nkept\n"
