"""What may change between two starts, what must not, and where a start takes its beginning from."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from elastictrain.checkpoint.faults import ENV_FAULT
from elastictrain.checkpoint.format import TRAINER_FILE, read_layout
from elastictrain.checkpoint.memory_snapshot import OpenSnapshot
from elastictrain.checkpoint.memory_tier import MemoryTier
from elastictrain.checkpoint.slot_writer import SlotWriter
from elastictrain.checkpoint.store import Store, open_store
from elastictrain.cli.lineage import find_source
from elastictrain.cli.state_dir import StartOptions, StateDir
from elastictrain.config import load_job
from elastictrain.core.membership import Member, Plan
from elastictrain.core.order import sample_list
from elastictrain.errors import (
    MissingInputError,
    SnapshotDamagedError,
    SnapshotError,
    SnapshotVersionError,
    StateDirError,
)
from elastictrain.protocol import IDENTITY_FILE, RUNS_DIR, JobIdentity, SnapshotSource
from tests.process.helpers import Trained, train
from tests.process.resume_helpers import as_of_version, go, kept, memory_of, nothing_left, samples, steps_in, store_of
from tests.process.snapshot_payload import tier_of, write

SGD = {"optimizer": "sgd", "model": "linear"}


def read_since(run: Trained, world_size: int, before: list[int]) -> list[int]:
    """The samples of a start's steps, over all ranks in window order, where each rank had one microbatch a step."""
    by_rank = [run.recorded("microbatch", rank)[before[rank] :] for rank in range(world_size)]
    return [index for lines in zip(*by_rank, strict=True) for line in lines for index in line["indices"]]


def counts(run: Trained, world_size: int) -> list[int]:
    return [len(run.recorded("microbatch", rank)) if rank < len(run.seen) else 0 for rank in range(world_size)]


def test_two_ranks_then_four(tmp_path: Path) -> None:
    """N = 96, global batch 24: after step 2 on two ranks, four ranks go on with order[48:72]."""
    options: dict[str, Any] = {"params": {**SGD, "length": 96}}
    first = go(tmp_path, 2, train_section={"global_batch_size": 24, "micro_batch_size": 12, "max_steps": 2}, **options)
    order = [index for _, index, _ in sample_list(0, 0, 96, 96, shuffle=True)]
    assert read_since(first, 2, [0, 0]) == order[:48]
    second = go(tmp_path, 4, train_section={"global_batch_size": 24, "micro_batch_size": 6, "max_steps": 3}, **options)
    assert read_since(second, 4, [2, 2, 0, 0]) == order[48:72]
    assert second.counters["sample_position"] == 72


def test_two_ranks_have_seen_four_each_then_four_ranks_see_the_other_eight(tmp_path: Path) -> None:
    options: dict[str, Any] = {"params": {**SGD, "length": 16}}
    first = go(tmp_path, 2, train_section={"global_batch_size": 8, "micro_batch_size": 4, "max_steps": 1}, **options)
    before = counts(first, 4)
    second = go(tmp_path, 4, train_section={"global_batch_size": 8, "micro_batch_size": 2, "max_steps": 2}, **options)
    seen_first = [index for rank in range(2) for index in samples(first, rank)]
    assert len(seen_first) == 8
    assert sorted(read_since(second, 4, before)) == sorted(set(range(16)) - set(seen_first))


def test_settings_that_may_change_between_starts(tmp_path: Path) -> None:
    """Micro batch, accumulation, loader workers, ranks, limits: never which samples come next. The numbers differ by
    rounding at most."""
    section = {"global_batch_size": 4, "micro_batch_size": 4}
    whole = go(tmp_path / "whole", params=SGD, train_section=section)
    cut = tmp_path / "cut"
    order = samples(whole)
    seen: list[int] = []
    run: Trained | None = None
    for world_size, micro, workers, stop in [(1, 2, 0, 2), (2, 2, 1, 4), (1, 1, 2, 7), (1, 4, 0, 9)]:
        before = counts(run, 2) if run is not None else [0, 0]
        run = go(
            cut,
            world_size,
            params=SGD,
            train_section={"global_batch_size": 4, "micro_batch_size": micro},
            data={"num_workers": workers},
            overrides=[f"train.max_steps={stop}"],
        )
        seen += read_since(run, world_size, before)
    assert seen == order
    assert run is not None
    assert run.losses == pytest.approx(whole.losses, rel=1e-5)


def test_accumulation_steps_make_the_global_batch_once(tmp_path: Path) -> None:
    accumulate = {"accumulation_steps": 2, "micro_batch_size": 2, "max_epochs": 3}

    def start(world_size: int, limit: int) -> Trained:
        (tmp_path / "shm").mkdir(exist_ok=True)
        return train(
            tmp_path,
            "tests.process.resume_tasks:Resumable",
            world_size=world_size,
            params={**SGD, "length": 16},
            train={**accumulate, "max_steps": limit},
            checkpoint={"memory_path": str(tmp_path / "shm"), "every_steps": 1},
        )

    assert start(1, 2).counters["sample_position"] == 8
    assert start(2, 4).counters["sample_position"] == 16, "windows of 4 still, not of 8"


# ---- what must not change


@pytest.mark.parametrize(
    ("name", "overrides", "says"),
    [
        ("seed", ["seed=7"], ["seed: the snapshot has 0, this run has 7"]),
        ("dataset_length", ["params.length=12"], ["dataset_length: the snapshot has 11, this run has 12"]),
        ("shuffle", ["data.shuffle=false"], ["shuffle: the snapshot has True, this run has False"]),
        ("fingerprint", ["params.fingerprint=new"], ["fingerprint: the snapshot has old, this run has new"]),
        ("model", ["params.hidden=9"], ["0.weight", "(8, 3)", "(9, 3)"]),
        ("optimizer", ["params.optimizer=momentum"], ["the snapshot has AdamW", "this run has SGD"]),
    ],
)
def test_a_change_that_would_be_another_training(
    tmp_path: Path, name: str, overrides: list[str], says: list[str]
) -> None:
    params = {"model": "wide", "fingerprint": "old"}
    go(tmp_path, params=params, overrides=["train.max_steps=2"])
    before = kept(tmp_path)
    refused = go(tmp_path, params=params, overrides=overrides, expect_success=False)
    assert refused.codes == [78]
    for text in says:
        assert text in refused.errors[0].what
    assert "--allow" in refused.errors[0].hint
    assert kept(tmp_path) == before, "a refusal changes nothing"
    allowed = StartOptions(allowed_differences=(name,))
    run = go(tmp_path, params=params, overrides=[*overrides, "train.max_steps=4"], options=allowed)
    assert run.counters["global_step"] == 4
    assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4], "it went on from step 2"


def test_the_seed_is_refused_on_all_ranks(tmp_path: Path) -> None:
    go(tmp_path, 2, overrides=["train.max_steps=2"])
    refused = go(tmp_path, 2, overrides=["seed=1"], expect_success=False)
    assert refused.codes == [78, 78]
    assert not any(report.secondary for report in refused.errors)


def test_averages_that_are_switched_on_later_begin_with_the_weights(tmp_path: Path) -> None:
    go(tmp_path, overrides=["train.max_steps=2"])
    run = go(tmp_path, overrides=["model.ema_decay=0.5"])
    assert run.counters["global_step"] == 9
    assert "ema.safetensors" in kept(tmp_path)


# ---- hyper-parameters


CONFIGURED = "tests.process.resume_tasks:Configured"
ALLOWED = StartOptions(allowed_differences=("hyperparameters",))


def told(run: Trained) -> dict[str, tuple[str, str, str]]:
    """(the snapshot's, the job's, which holds) by key."""
    events = run.events("hyperparameter_differs")
    assert all(event["level"] == "warning" for event in events)
    return {event["key"]: (event["snapshot"], event["job"], event["holds"]) for event in events}


def rates(run: Trained) -> list[float]:
    return [line["lr"] for line in run.metrics()]


def test_the_snapshots_hyperparameters_hold_and_a_change_is_told_at_every_start(tmp_path: Path) -> None:
    whole = go(tmp_path / "whole", task=CONFIGURED, overrides=["optimizer.lr=0.01"])
    cut = tmp_path / "cut"
    go(cut, task=CONFIGURED, overrides=["optimizer.lr=0.01", "train.max_steps=3"])
    changed = ["optimizer.lr=0.02", "optimizer.weight_decay=0.5", "optimizer.betas=[0.8, 0.999]"]
    for stop in (6, 9):
        run = go(cut, task=CONFIGURED, overrides=[*changed, f"train.max_steps={stop}"])
        assert told(run) == {
            "optimizer.lr": ("0.01", "0.02", "snapshot"),
            "optimizer.weight_decay": ("0.01", "0.5", "snapshot"),
            "optimizer.betas": ("[0.9, 0.999]", "[0.8, 0.999]", "snapshot"),
        }
        assert "--allow hyperparameters" in run.events("hyperparameter_differs")[0]["hint"]
    assert run.losses == whole.losses
    assert kept(cut) == kept(tmp_path / "whole")
    back = go(cut, task=CONFIGURED, overrides=["optimizer.lr=0.01", "train.max_steps=10"])
    assert told(back) == {}


def test_the_jobs_hyperparameters_hold_where_that_is_allowed(tmp_path: Path) -> None:
    go(tmp_path, task=CONFIGURED, overrides=["optimizer.lr=0.01", "train.max_steps=3"])
    changed = ["optimizer.lr=0.02", "optimizer.weight_decay=0.5"]
    run = go(tmp_path, task=CONFIGURED, overrides=[*changed, "train.max_steps=6"], options=ALLOWED)
    assert told(run) == {
        "optimizer.lr": ("0.01", "0.02", "job"),
        "optimizer.weight_decay": ("0.01", "0.5", "job"),
    }
    assert rates(run) == [0.01] * 3 + [0.02] * 3
    (group,) = kept(tmp_path)["state"]["optimizer"]["param_groups"]
    assert (group["lr"], group["weight_decay"]) == (0.02, 0.5)
    again = go(tmp_path, task=CONFIGURED, overrides=changed)
    assert told(again) == {}, "the snapshot is of a run that was built like this one by now"
    assert rates(again)[6:] == [0.02] * 3


@pytest.mark.parametrize("scheduler", ["step", "multistep", "cosine", "lambda", "sequential"])
def test_an_allowed_learning_rate_goes_on_where_the_schedule_stands(tmp_path: Path, scheduler: str) -> None:
    task: dict[str, Any] = {"task": CONFIGURED, "params": {"scheduler": scheduler}}
    whole = go(tmp_path / "whole", overrides=["optimizer.lr=0.02"], **task)
    go(tmp_path, overrides=["optimizer.lr=0.01", "train.max_steps=4"], **task)
    run = go(tmp_path, overrides=["optimizer.lr=0.02"], options=ALLOWED, **task)
    assert told(run) == {"optimizer.lr": ("0.01", "0.02", "job")}
    assert rates(run)[4:] == pytest.approx(rates(whole)[4:], rel=1e-6)
    assert rates(run)[:4] == pytest.approx([rate / 2 for rate in rates(whole)[:4]], rel=1e-6)


def test_a_changed_loss_scaling_is_told(tmp_path: Path) -> None:
    section = {"precision": "fp16"}
    first = ["scaler.growth_interval=100", "scaler.init_scale=1024"]
    go(tmp_path, train_section={**section, "max_steps": 3}, overrides=first)
    changed = ["scaler.growth_interval=1", "scaler.init_scale=128"]
    run = go(tmp_path, train_section={**section, "max_steps": 5}, overrides=changed)
    keys = ("scaler.init_scale", "scaler.growth_interval")
    assert told(run) == {keys[0]: ("1024.0", "128.0", "snapshot"), keys[1]: ("100", "1", "snapshot")}
    assert {line["loss_scale"] for line in run.metrics()} == {1024.0}
    run = go(tmp_path, train_section={**section, "max_steps": 7}, overrides=changed, options=ALLOWED)
    assert told(run) == {keys[0]: ("1024.0", "128.0", "job"), keys[1]: ("100", "1", "job")}
    assert [line["loss_scale"] for line in run.metrics()][5:] == [128.0, 256.0]


# ---- where it begins


def test_fresh_begins_anew_and_leaves_the_old_alone(tmp_path: Path) -> None:
    whole = go(tmp_path, checkpoint={"keep_last": 1})
    old = store_of(tmp_path).snapshots()[0].name
    killed = go(tmp_path, overrides=["params.kill_after=3"], options=StartOptions(fresh=True), expect_success=False)
    assert killed.codes == [-9]
    run = go(tmp_path, checkpoint={"keep_last": 1})
    assert run.events("restored")[0]["global_step"] <= 3, "the newer snapshots are of another run"
    names = [s.name for s in store_of(tmp_path).snapshots()]
    assert old in names
    assert len({s.run_id for s in store_of(tmp_path).snapshots()}) == 2
    assert run.metrics("summary")[-1]["last_loss"] == whole.metrics("summary")[-1]["last_loss"]


def test_a_machine_that_has_never_seen_the_job_adopts_it_from_its_store(tmp_path: Path) -> None:
    whole = go(tmp_path / "whole")
    there = {"checkpoint": {"url": str(tmp_path / "store")}}
    go(tmp_path / "one", overrides=["params.stop_after=4"], **there)
    run = go(tmp_path / "two", **there)
    assert run.events("restored")[0]["global_step"] == 4
    assert run.losses == whole.losses[4:]
    assert JobIdentity.read(tmp_path / "two" / "state").run_id == JobIdentity.read(tmp_path / "one" / "state").run_id  # type: ignore[union-attr]


def test_a_store_of_which_nothing_can_be_read_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    there = {"checkpoint": {"url": str(tmp_path / "store")}}
    go(tmp_path / "one", overrides=["train.max_steps=2"], **there)
    for manifest in (tmp_path / "store").glob("step-*/manifest.json"):
        manifest.write_bytes(manifest.read_bytes()[:100])
    with pytest.raises(SnapshotError, match="none of their manifests"):
        go(tmp_path / "two", **there)
    run = go(tmp_path / "two", options=StartOptions(fresh=True), overrides=["train.max_steps=1"], **there)
    assert run.counters["global_step"] == 1


def test_incomplete_state_directories(tmp_path: Path) -> None:
    """Without job.json the job is found again by its snapshots; empty run folders are nothing; a torn job.json is an
    error and not a new job."""
    losses = go(tmp_path, overrides=["train.max_steps=3"]).losses
    state = tmp_path / "state"
    identity = (state / IDENTITY_FILE).read_text()
    (state / IDENTITY_FILE).unlink()
    (state / "runs" / "0002").mkdir()
    (state / "runs" / "not-a-number").mkdir()
    run = go(tmp_path, overrides=["train.max_steps=4"])
    assert run.events("restored")[0]["global_step"] == 3
    assert run.metrics()[-1]["incarnation"] == 3
    assert run.losses[:3] == losses
    for torn in (identity[:20], "{}", "[]"):
        (state / IDENTITY_FILE).write_text(torn)
        with pytest.raises(StateDirError, match=r"job\.json cannot be read"):
            go(tmp_path)
    (state / IDENTITY_FILE).write_text(identity)
    shutil.rmtree(state / "runs")
    run = go(tmp_path, overrides=["train.max_steps=5"])
    assert run.events("restored")[0]["global_step"] == 4


def test_another_run_continued(tmp_path: Path) -> None:
    """The child begins with the parent's snapshot; the parent keeps it for as long as the child has none of its own."""
    parent, child = tmp_path / "parent", tmp_path / "child"
    whole = go(tmp_path / "whole")
    for limit in (3, 4):
        go(parent, overrides=[f"train.max_steps={limit}"], checkpoint={"keep_last": 3})
    source = find_source(f"{parent / 'state'}@3", {})
    killed = go(
        child,
        overrides=["params.kill_after=1", "checkpoint.every_steps=100"],
        options=StartOptions(source=source),
        expect_success=False,
    )
    assert killed.codes == [-9], killed.output
    assert store_of(parent).pins().keys() == {(source.run_id, 3)}
    go(parent, overrides=["train.max_steps=8"], checkpoint={"keep_last": 1})
    assert steps_in(store_of(parent)) == [8, 3], "retention would have taken step 3"
    run = go(child)  # no --from any more: it is known
    assert run.events("restored")[0]["global_step"] == 3
    assert run.losses == whole.losses[3:]
    assert kept(child) == kept(tmp_path / "whole")
    assert store_of(parent).pins() == {}, "the child stands on its own feet"
    go(parent, checkpoint={"keep_last": 1})
    assert steps_in(store_of(parent)) == [9]
    assert nothing_left(child)
    again = go(child)
    assert again.counters["global_step"] == 9, "the source is gone, and not needed"


def move_to_memory(store: Store, tier: MemoryTier, step: int) -> None:
    """As if it had never become durable: the rank and its persister were killed together."""
    name = next(s.name for s in store.snapshots() if s.global_step == step)
    manifest, trainer = store.read_manifest(name), json.loads(store.read_file(name, TRAINER_FILE))
    contents = {file: store.read_file(name, file) for file in manifest.files if file != TRAINER_FILE}
    writer = tier.begin({file: read_layout(content) for file, content in contents.items()})
    assert isinstance(writer, SlotWriter)
    for file, content in contents.items():
        writer.buffers[file][:] = content
    moved = writer.commit(
        job=manifest.job,
        run_id=manifest.run_id,
        global_step=manifest.global_step,
        versions=manifest.versions,
        trainer=trainer,
    )
    assert moved.manifest.files == manifest.files
    store.delete(name)


def test_a_state_directory_as_source_has_a_memory_tier_and_a_store_elsewhere(tmp_path: Path) -> None:
    """What a killed parent left in memory alone is newer than its store, and is taken; damaged, it is passed over."""
    parent, store = tmp_path / "parent", open_store(tmp_path / "elsewhere")
    elsewhere = {"checkpoint": {"url": str(tmp_path / "elsewhere"), "keep_last": 9}}
    whole = go(tmp_path / "whole")
    for limit in (3, 4, 5):  # the last step of a start is durable in any case
        go(parent, overrides=[f"train.max_steps={limit}"], **elsewhere)
    move_to_memory(store, memory_of(parent), 4)
    move_to_memory(store, memory_of(parent), 5)
    before = steps_in(store)
    assert before[0] == 3

    source = find_source(str(parent / "state"), {})
    assert source.global_step == 5
    assert source.url == str(tmp_path / "elsewhere")
    assert steps_in(store) == [5, *before], "it is durable from now on"
    assert find_source(f"{parent / 'state'}@3", {}).global_step == 3
    run = go(tmp_path / "child", options=StartOptions(source=source))
    assert run.events("restored")[0]["global_step"] == 5
    assert run.losses == whole.losses[5:]

    store.delete(store.snapshots()[0].name)
    for snapshot in memory_of(parent).snapshots():
        (snapshot.path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(SnapshotDamagedError, match=r"model\.safetensors"):
        find_source(f"{parent / 'state'}@5", {})
    warnings: list[str] = []
    assert find_source(str(parent / "state"), {}, warnings.append).global_step == 3
    assert len(warnings) == 2
    assert all("model.safetensors" in warning for warning in warnings)


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job, to be copied: steps 1 to 3 are durable."""
    folder = tmp_path_factory.mktemp("parent")
    for limit in (1, 2, 3):
        go(folder, overrides=[f"train.max_steps={limit}"], checkpoint={"keep_last": 9})
    assert steps_in(store_of(folder)) == [3, 2, 1]
    return folder


@pytest.fixture
def parent(three_steps: Path, tmp_path: Path) -> Path:
    return shutil.copytree(three_steps, tmp_path / "parent")


@pytest.mark.parametrize("kind", ["folder", "object store", "state directory"])
def test_damaged_snapshots_of_a_source_are_passed_over_unless_one_is_named(
    parent: Path, tmp_path: Path, kind: str
) -> None:
    store, warnings = store_of(parent), list[str]()
    text = {
        "folder": str(store.path),
        "object store": f"faulty:/{store.path}",
        "state directory": str(parent / "state"),
    }[kind]
    options = {"target": "file"} if kind == "object store" else {}
    newest, middle, oldest = (store.path / snapshot.name for snapshot in store.snapshots())
    model = bytearray((newest / "model.safetensors").read_bytes())
    model[-1] ^= 1
    (newest / "model.safetensors").write_bytes(model)
    (middle / "manifest.json").write_bytes(b"{")
    source = find_source(text, options, warnings.append)
    assert source.global_step == 1
    assert [name in warning for name, warning in zip((newest.name, middle.name), warnings, strict=True)] == [True] * 2
    assert "model.safetensors" in warnings[0]
    assert "manifest.json" in warnings[1]
    if kind == "folder":
        run = go(tmp_path / "child", options=StartOptions(source=source))
        assert run.events("restored")[0]["global_step"] == 1
    named = find_source(f"{text}@3", options)
    assert named.global_step == 3
    own = {"storage_options": options}
    run = go(tmp_path / "named", options=StartOptions(source=named), checkpoint=own, expect_success=False)
    assert run.codes == [SnapshotDamagedError.exit_code]
    assert any("model.safetensors" in event["reason"] for event in run.events("snapshot_passed_over"))
    assert find_source(text, options, warnings.append, named).global_step == 3, "the run has begun with it"
    (oldest / "trainer.json").unlink()
    with pytest.raises(SnapshotDamagedError, match=r"none of the snapshots in .* can be read"):
        find_source(text, options)
    for folder in (newest, oldest):
        (folder / "manifest.json").write_bytes(b"{")
    with pytest.raises(SnapshotDamagedError, match=r"none of the snapshots in .* can be read"):
        find_source(text, options)


def test_a_source_of_a_newer_format_is_refused_by_name(parent: Path) -> None:
    """It is not damaged, and an older one is not what was asked for."""
    manifest = store_of(parent).path / store_of(parent).snapshots()[0].name / "manifest.json"
    as_of_version(manifest, 99)
    with pytest.raises(SnapshotVersionError, match=r"--from .*step-000000000003-.*99"):
        find_source(str(store_of(parent).path), {})


def test_a_damaged_snapshot_of_a_source_whose_memory_has_it_is_stored_again(tmp_path: Path) -> None:
    store, parent, warnings = store_of(tmp_path), tmp_path, list[str]()
    for limit in (2, 3):
        go(parent, overrides=[f"train.max_steps={limit}"])
    move_to_memory(store, memory_of(parent), 3)
    assert find_source(str(parent / "state"), {}).global_step == 3, "it is durable again"
    path = store.path / store.snapshots()[0].name / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert find_source(str(parent / "state"), {}, warnings.append).global_step == 3
    assert "optimizer.safetensors" in "".join(warnings)
    assert store.verify(store.snapshots()[0].name) == []


def test_a_state_directory_as_source_says_how_its_store_is_opened(tmp_path: Path) -> None:
    """Also to later starts, and also where the child's own store is opened in another way. Its credentials are in no
    file but those of mode 0600 that need them, and in no output."""
    parent, secret = tmp_path / "parent", "hunter2-very-secret"
    options = {"target": "file", "secret": secret}
    url = f"faulty:/{tmp_path}/elsewhere"
    own = {"url": f"faulty:/{tmp_path}/own", "storage_options": {"target": "file", "secret": "another-secret"}}
    whole = go(tmp_path / "whole")
    go(parent, overrides=["train.max_steps=3"], checkpoint={"url": url, "storage_options": options})
    source = find_source(str(parent / "state"), own["storage_options"])
    assert secret not in repr(source)
    outputs = []
    starts: list[tuple[Path, dict[str, Any]]] = [(tmp_path / "local", {}), (tmp_path / "remote", own)]
    for child, checkpoint in starts:
        killed = go(
            child,
            overrides=["params.kill_after=1", "checkpoint.every_steps=100"],
            options=StartOptions(source=source),
            checkpoint=checkpoint,
            expect_success=False,
        )
        assert killed.codes == [-9], killed.output
        assert killed.events("restored")[0]["global_step"] == 3
        assert open_store(url, options).pins().keys() == {(source.run_id, 3)}
        run = go(child, checkpoint=checkpoint)
        assert run.events("restored")[0]["global_step"] == 3
        assert run.losses == whole.losses[3:]
        assert run.events("source_not_released") == []
        assert open_store(url, options).pins() == {}
        outputs += [*killed.output, *run.output]
        found = {p for p in child.rglob("*") if p.is_file() and secret.encode() in p.read_bytes()}
        state = child / "state"
        assert found == {state / IDENTITY_FILE, *(state / RUNS_DIR).glob("*/spec.json")}
        assert {path.stat().st_mode & 0o777 for path in found} == {0o600}
    assert secret not in "\n".join(outputs)
    snapshots = (p for store in ("elsewhere", "own") for p in (tmp_path / store).rglob("*") if p.is_file())
    assert not any(secret.encode() in path.read_bytes() for path in snapshots)


def test_a_source_named_again_brings_the_credentials_of_its_store_anew(tmp_path: Path) -> None:
    parent, child, url = tmp_path / "parent", tmp_path / "child", f"faulty:/{tmp_path}/elsewhere"
    for secret in ("the-old-secret", "the-new-secret"):
        options = {"target": "file", "secret": secret}
        go(parent, overrides=["train.max_steps=3"], checkpoint={"url": url, "storage_options": options})
        source = find_source(str(parent / "state"), {})
        go(child, overrides=["train.max_steps=4"], options=StartOptions(source=source))
        kept_identity = JobIdentity.read(child / "state")
        assert kept_identity is not None
        assert kept_identity.source == source
        assert source.storage_options == options


def test_nodes_are_told_no_credentials_of_a_source_and_each_adds_its_own(tmp_path: Path) -> None:
    config = load_job("stdlib-lm").config
    (tmp_path / "shm").mkdir()
    with closing(tier_of(tmp_path)) as tier:
        snapshot = write(tier, 2)
        with OpenSnapshot(snapshot.path, snapshot.name) as opened:
            open_store(tmp_path / "elsewhere").put(opened)
    source = SnapshotSource(str(tmp_path / "elsewhere"), snapshot.run_id, 2, {"secret": "hunter2-very-secret"})
    state = StateDir(tmp_path / "state")
    lineage = state.lineage(config, StartOptions(source=source))
    assert "hunter2" not in repr(lineage)
    plan = Plan(1, "job-1-abcdef", (Member("node", "host", "127.0.0.1", 1, 0),), lineage)
    assert state._adopt(config, plan).source == source
    assert StateDir(tmp_path / "state")._adopt(config, plan).source == source, "kept over a restart"
    other = StateDir(tmp_path / "other")._adopt(config, plan).source
    assert other == SnapshotSource(source.url, source.run_id, 2), "on a node that was not given it: as its job has it"


def test_a_source_that_is_not_there(tmp_path: Path) -> None:
    go(tmp_path, overrides=["train.max_steps=2"])
    with pytest.raises(MissingInputError, match="there is no snapshot of step 7"):
        find_source(f"{tmp_path / 'state'}@7", {})
    with pytest.raises(MissingInputError, match="there are no snapshots"):
        find_source(str(tmp_path / "elsewhere"), {})
    source = find_source(str(tmp_path / "state" / "snapshots"), {})
    assert source.global_step == 2
    child = StartOptions(source=source)
    go(tmp_path / "child", options=child, environment={ENV_FAULT: "memory.begin:1:kill"}, expect_success=False)
    shutil.rmtree(tmp_path / "state" / "snapshots")
    with pytest.raises(MissingInputError, match=r"step 2 in .* is deleted"):
        go(tmp_path / "late", options=child)
    assert JobIdentity.read(tmp_path / "late" / "state") is None, "nothing has begun"
    run = go(tmp_path / "child", expect_success=False)
    assert run.codes == [65]
    assert "the snapshot of step 2 to begin with is not in" in run.errors[0].what


def test_what_is_said_of_a_source_has_no_credentials_of_its_url(tmp_path: Path) -> None:
    """Neither where it has no such snapshot, nor where it has lost it by the start."""
    url = "memory://me:hunter2-secret@host/store"
    with pytest.raises(MissingInputError, match=r"--from memory://\*\*\*@host/store@7: there are no snapshots") as none:
        find_source(f"{url}@7", {})
    (tmp_path / "shm").mkdir()
    with closing(tier_of(tmp_path)) as tier:
        snapshot = write(tier, 2)
        with OpenSnapshot(snapshot.path, snapshot.name) as opened:
            open_store(url).put(opened)
    with pytest.raises(MissingInputError, match="there is no snapshot of step 7") as other:
        find_source(f"{url}@7", {})
    source = find_source(url, {})
    run = go(tmp_path / "child", options=StartOptions(source=source), expect_success=False)
    assert "is not in memory://***@host/store any more" in run.errors[0].what, "it was in this process's memory"
    assert "hunter2-secret" not in f"{none.value} {other.value} {run.output} {run.errors}"


def test_a_parents_store_that_is_gone_at_the_end_fails_nobody(tmp_path: Path) -> None:
    """The pin that cannot be taken back is not worth a finished run."""
    parent, child = tmp_path / "parent", tmp_path / "child"
    go(parent, overrides=["train.max_steps=2"])
    source = find_source(str(parent / "state"), {})
    go(child, options=StartOptions(source=source), overrides=["params.kill_after=3"], expect_success=False)
    shutil.rmtree(parent / "state" / "snapshots")
    (parent / "state" / "snapshots").write_text("no folder any more")
    run = go(child)
    assert run.outcome is not None
    assert run.outcome["complete"]


def test_a_memory_tier_of_another_job_is_not_ours(tmp_path: Path) -> None:
    go(tmp_path / "one", overrides=["params.kill_after=3"], expect_success=False)
    assert memory_of(tmp_path / "one").snapshots()
    run = go(tmp_path / "two", overrides=["train.max_steps=1", f'checkpoint.memory_path="{tmp_path / "one" / "shm"}"'])
    assert run.events("restored") == []
    assert memory_of(tmp_path / "one").snapshots(), "and it is left alone"
