"""`elastictrain checkpoints` on what a real run left, and the memory that a restore takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.process.helpers import Finished, Trained, run_cli
from tests.process.resume_helpers import go, kept, memory_of, steps_in, store_of
from tests.process.resume_tasks import Tied, resumable_model


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trained, Path]:
    """Tied weights, averages, buffers in none; three durable snapshots."""
    folder = tmp_path_factory.mktemp("finished")
    options: dict[str, Any] = {"params": {"model": "tied"}, "model": {"ema_decay": 0.5}}
    for limit in (2, 5):
        go(folder, **options, overrides=[f"train.max_steps={limit}"], checkpoint={"keep_last": 9})
    return go(folder, **options, checkpoint={"keep_last": 9}), folder


def checkpoints(*args: str | Path, code: int = 0) -> Any:
    done: Finished = run_cli("checkpoints", *args, "--json")
    assert done.code == code, done.stderr
    return json.loads(done.stdout)


def test_list_and_show(finished: tuple[Trained, Path]) -> None:
    run, folder = finished
    rows = checkpoints("list", "--state-dir", folder / "state")
    assert [row["global_step"] for row in rows] == steps_in(store_of(folder))
    assert {row["tier"] for row in rows} == {"durable"}
    shown = checkpoints("show", "--state-dir", folder / "state")
    expected = {name: run.counters[name] for name in ("global_step", "applied", "skipped", "sample_position")}
    assert {name: shown[name] for name in expected} == expected
    assert shown["model_digest"] == kept(folder)["model.safetensors"]
    assert shown["world_size"] == 1
    assert shown["data_order"] == {"seed": 0, "length": 11, "shuffle": True, "fingerprint": None}
    assert shown["versions"]["torch"] == torch.__version__
    assert checkpoints("show", "--state-dir", folder / "state", "--step", "2")["global_step"] == 2


def test_export_loads_into_the_tasks_model(finished: tuple[Trained, Path], tmp_path: Path) -> None:
    """strict=True: every name is there, also the second one of a tied weight."""
    _, folder = finished
    models = {}
    for name, flags in (("plain", []), ("averages", ["--ema"])):
        told = checkpoints("export", tmp_path / name, "--state-dir", folder / "state", *flags)
        assert told["path"] == str(tmp_path / name / "model.safetensors")
        tensors = load_file(told["path"])
        model = Tied()
        model.load_state_dict(tensors, strict=True)
        assert torch.equal(tensors["first.weight"], tensors["second.weight"])
        assert model.second.weight is model.first.weight
        models[name] = tensors
    assert not torch.equal(models["plain"]["first.weight"], models["averages"]["first.weight"])


def test_export_of_buffers_and_of_no_averages(tmp_path: Path) -> None:
    go(tmp_path, params={"model": "mixed"}, overrides=["train.max_steps=2"])
    told = checkpoints("export", tmp_path / "out.safetensors", "--state-dir", tmp_path / "state")
    model: nn.Module = resumable_model("mixed", 8)
    model.load_state_dict(load_file(told["path"]), strict=True)
    assert int(model.get_buffer("1.num_batches_tracked")) == 4, "two microbatches in each of two steps"
    refused = run_cli("checkpoints", "export", tmp_path / "x", "--state-dir", tmp_path / "state", "--ema")
    assert refused.code == 66
    assert "holds no averaged weights" in refused.stderr


def test_verify_and_prune(tmp_path: Path) -> None:
    for limit in (2, 4, 6):
        go(tmp_path, overrides=[f"train.max_steps={limit}"], checkpoint={"keep_last": 9})
    state = tmp_path / "state"
    assert all(row["sound"] for row in checkpoints("verify", "--state-dir", state))
    steps = steps_in(store_of(tmp_path))
    damaged = next((state / "snapshots").glob(f"step-{steps[0]:012d}-*")) / "optimizer.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    rows = checkpoints("verify", "--state-dir", state, code=65)
    assert [row["global_step"] for row in rows if not row["sound"]] == steps[:1]
    assert rows[0]["damages"][0]["file"] == "optimizer.safetensors"
    would = checkpoints("prune", "--state-dir", state, "--keep-last", "1", "--dry-run")
    assert steps_in(store_of(tmp_path)) == steps
    did = checkpoints("prune", "--state-dir", state, "--keep-last", "1")
    assert did["deleted"] == would["deleted"]
    assert steps_in(store_of(tmp_path)) == steps[:2], "the newest sound one stays, and nothing newer goes"
    run = go(tmp_path)
    assert run.events("restored")[0]["global_step"] == steps[1]


def test_what_a_killed_run_left_in_memory_is_listed(tmp_path: Path) -> None:
    go(tmp_path, environment={"ELASTICTRAIN_FAULT": "memory.begin:5:kill"}, expect_success=False)
    rows = checkpoints("list", "--state-dir", tmp_path / "state")
    in_memory = [row["global_step"] for row in rows if row["tier"] == "memory"]
    assert in_memory == [s.global_step for s in memory_of(tmp_path).snapshots()]
    assert in_memory[:2] == [4, 3], "and one more, where the persister was still reading that"
    assert checkpoints("show", "--state-dir", tmp_path / "state")["tier"] == "memory"


@pytest.mark.long
@pytest.mark.parametrize("tier", ["memory", "durable"])
def test_a_restore_takes_the_memory_of_one_copy(tmp_path: Path, tier: str) -> None:
    """200 MB of weights and 400 MB of moments: no second copy of all that at any time. Pages of the mapped file do not
    count: the system can take them back."""
    hidden = 10_000_000  # 50 million values
    options: dict[str, Any] = {"params": {"model": "wide", "hidden": hidden, "length": 4}}
    section = {"max_steps": 2, "global_batch_size": 1, "micro_batch_size": 1}
    extra: dict[str, Any] = {"deadline_s": 250.0}
    if tier == "memory":
        extra |= {"environment": {"ELASTICTRAIN_FAULT": "memory.begin:2:kill"}, "expect_success": False}
    go(tmp_path, **options, train_section=section, **extra)
    peaks: list[int] = []

    def watch(ranks: list[Any]) -> None:
        status, output = Path(f"/proc/{ranks[0].pid}/status"), tmp_path / "state" / "runs" / "0002" / "output-0.txt"
        while True:
            try:
                fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
                peaks.append(int(fields["RssAnon"].split()[0]) << 10)
            except (OSError, KeyError):
                return
            if output.exists() and '"training_started"' in output.read_text():
                return

    limit = 1 if tier == "memory" else 2
    section = {**section, "max_steps": limit}
    go(tmp_path, **options, train_section=section, while_running=watch, deadline_s=250.0)
    copy_bytes = 5 * hidden * 4 * 3
    assert copy_bytes * 0.9 < max(peaks) < copy_bytes * 1.5 + (300 << 20)
