"""What is left of a drilled run, and what a halted job has kept: real runs, judged and looked at."""

from __future__ import annotations

import json
import os

import pytest

from elastictrain.checkpoint.catalog import newest_first
from elastictrain.checkpoint.store import open_store
from elastictrain.core.events import Kind
from elastictrain.drill.compare import read_state
from elastictrain.drill.outside import FILLER
from elastictrain.protocol import JOURNAL_FILE
from elastictrain.supervisor.journal_reader import JournalReader
from tests.drill.drills import (
    assert_exact,
    assert_nothing_left,
    drill,
    tiny_job,
)
from tests.process.helpers import run_cli, write_task


@pytest.mark.soak
def test_a_poisoned_job_keeps_the_step_before(tmp_path):
    drilled = drill(tmp_path, "poison-sample")
    row = drilled.rows["poison-sample"]
    assert_exact(row)
    assert row["injected_at"] == "rank 1, after step 9, data"
    assert row["why"].endswith("kept: step 9, as an undisturbed run has it")


@pytest.mark.soak
def test_a_lone_poisoned_rank_keeps_its_newest_regular_snapshot(tmp_path):
    drilled = drill(tmp_path, "poison-sample", world_size=1)
    row = drilled.rows["poison-sample"]
    assert (row["verdict"], row["bitwise_equal"]) == ("holds", True), row
    assert row["why"].endswith("kept: step 8, as an undisturbed run has it")


@pytest.mark.long
def test_what_a_halted_job_keeps_is_judged_bit_by_bit(tmp_path):
    """A task with a tensor that no loss shows, and that is another one in the run with the fault."""
    write_task(
        tmp_path,
        """
        import os
        import torch
        from pathlib import Path
        from tests.process.faulty import Task

        class MyTask(Task):
            def model(self):
                model = super().model()
                drilled = "poison-sample" in Path(os.environ["ELASTICTRAIN_RUN_DIR"]).parts
                model.register_buffer("mark", torch.tensor(float(drilled)))
                return model
        """,
    )
    job = tiny_job(tmp_path)
    job.write_text(job.read_text().replace("tests.process.faulty:Task", "task:MyTask"))
    finished = run_cli(
        "drill", "poison-sample", job, "--scratch", tmp_path / "scratch", "--json", cwd=tmp_path, deadline_s=300
    )
    assert finished.code == 1
    row = json.loads(finished.stdout)["rows"][0]
    assert (row["bitwise_equal"], row["verdict"]) == (False, "fails")
    assert row["difference"] == "tensor mark in model.safetensors"
    assert_nothing_left(tmp_path)


@pytest.mark.soak
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small file system")
def test_the_folder_of_a_failed_disk_full_is_kept_with_all_that_was_in_its_small_store(tmp_path):
    """A task with another loss in the run with the fault: that drill cannot hold."""
    write_task(
        tmp_path,
        """
        import os
        from pathlib import Path
        from tests.process.faulty import Task

        class MyTask(Task):
            def loss(self, model, batch):
                drilled = "disk-full" in Path(os.environ["ELASTICTRAIN_RUN_DIR"]).parts
                return super().loss(model, batch) * (1 + 1e-3 * drilled)
        """,
    )
    job = tiny_job(tmp_path)
    job.write_text(job.read_text().replace("tests.process.faulty:Task", "task:MyTask"))
    scratch = tmp_path / "scratch"
    finished = run_cli("drill", "disk-full", job, "--scratch", scratch, "--json", cwd=tmp_path, deadline_s=300)
    row = json.loads(finished.stdout)["rows"][0]
    assert (row["verdict"], row["folder"], finished.code) == ("fails", str(scratch / "disk-full"), 1), row
    events = JournalReader(scratch / "disk-full" / "state" / JOURNAL_FILE).read(kinds=[Kind.COMPLETED])
    assert [event.fields["global_step"] for event in events] == [16]
    assert list((scratch / "disk-full" / "state" / "runs").rglob("*.log")), "what the ranks printed"
    store = scratch / "disk-full" / "store"
    assert read_state(newest_first(None, open_store(str(store)))[0]).step == 16
    assert not (store / FILLER).exists()
    assert_nothing_left(tmp_path)
