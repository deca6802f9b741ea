"""Loader processes are forked from a rank in which other threads are at work."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from elastictrain.checkpoint.persist_loop import PersisterSettings
from elastictrain.checkpoint.persister_client import Persister
from tests.process.helpers import wait_until
from tests.process.snapshot_payload import tier_of, write


def test_a_process_forked_while_the_persister_is_started_does_not_hold_it_up(tmp_path: Path) -> None:
    """It would inherit the pipe on whose end of file the starting thread waits, and a run would wait for ever for its
    last snapshot to become durable."""
    (tmp_path / "shm").mkdir()
    tier = tier_of(tmp_path)
    snapshot = write(tier, 1)
    for _ in range(12):
        persister = Persister(PersisterSettings(url=str(tmp_path / "snapshots")))
        persister.submit(snapshot)
        children = []
        try:
            while persister.pid is None and len(children) < 40:
                child = os.fork()
                if child == 0:
                    signal.pause()
                    os._exit(0)
                children.append(child)
            wait_until(lambda: persister.pid is not None, 20)  # noqa: B023 - called at once
        except TimeoutError:
            pytest.fail("the thread that starts the persister hangs")
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            wait_until(lambda: persister.pid is not None)  # noqa: B023
            persister.close(finish=False)
    tier.close()
