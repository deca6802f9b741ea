"""A node whose job file or code is not that of the others: it is refused by name, and they train on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.drill.paced import GLOBAL_BATCH, STEPS_FILE
from tests.process.helpers import run_cli, start_cli, wait_until, write_job
from tests.process.store_server import store_server
from tests.process.test_supervisor import events

STEPS = 100_000
ENOUGH = 10
CODE = "from tests.drill.paced import Task\n"


@pytest.mark.long
@pytest.mark.parametrize(
    ("steps", "code", "what"),
    [
        (STEPS + 1, CODE, "job file"),
        pytest.param(STEPS, CODE + "# mended\n", "task.py", marks=pytest.mark.soak),
    ],
    ids=["another job file", "another task"],
)
def test_a_node_that_differs_is_refused_by_name(tmp_path: Path, steps: int, code: str, what: str) -> None:
    """Two supervisors of one host; the store is ours, spoken to as any etcd is."""
    steps_file = tmp_path / STEPS_FILE

    def num_steps() -> int:
        return len(steps_file.read_text().splitlines()) if steps_file.exists() else 0

    with store_server(tmp_path / "store.log") as store:
        rendezvous = f"etcd://{store.url.removeprefix('http://')}"

        def write(name: str, max_steps: int, source: str) -> list[str | Path]:
            folder = tmp_path / name
            job = write_job(
                folder,
                "task:Task",
                params={"folder": str(tmp_path), "pause_s": 0.05},
                train={
                    "max_steps": max_steps,
                    "global_batch_size": GLOBAL_BATCH,
                    "micro_batch_size": GLOBAL_BATCH // 2,
                },
                data={"shuffle": False},
                elastic={"nodes": "1:2", "last_call_s": 0.1, "rendezvous": rendezvous},
                checkpoint={"every_steps": STEPS, "url": str(tmp_path / "snapshots")},
            )
            (folder / "task.py").write_text(source)
            return ["run", job, "--state-dir", folder / "state", "--output", "json"]

        with start_cli(*write("first", STEPS, CODE)) as first:
            wait_until(lambda: num_steps() >= ENOUGH)
            refused = run_cli(*write("second", steps, code))
            assert refused.code == 78, refused.stdout + refused.stderr
            digest = "[0-9a-f]{12}"
            says = rf"this node cannot take part with \S+: {re.escape(what)} is {digest} here and {digest} there"
            assert re.search(says, refused.stderr), refused.stderr
            assert "All nodes of a job need the same job.toml, code and versions." in refused.stderr
            assert "Traceback" not in refused.stderr
            seen = num_steps()
            wait_until(lambda: num_steps() >= seen + ENOUGH)
            first.terminate()
            _, errors = first.communicate()
            assert first.returncode == 0, errors
            assert len(events(tmp_path / "first" / "state", "incarnation_started")) == 1, (
                "nobody has ended its worker group"
            )
