"""`elastic.reduction = "tree"`: the same bits at every world size, on real ranks with gloo; and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load

from elastictrain.cli.state_dir import StartOptions
from elastictrain.core.phases import Phase
from elastictrain.heartbeat import heartbeat_paths, read_heartbeat
from tests.process.helpers import Trained, run_cli, wait_until, write_job
from tests.process.resume_helpers import go, kept, store_of, trace

TASK = "tests.process.tree_tasks:Everything"
TREE = {"elastic": {"reduction": "tree"}}


def tree(folder: Path, world_size: int, *, reduction: str = "tree", **more: Any) -> Trained:
    """One start: two samples a microbatch, a snapshot at the end of every step, an evaluation at the end."""
    more.setdefault("task", TASK)
    return go(folder, world_size, elastic={"reduction": reduction, **more.pop("elastic", {})}, **more)


def outcome(run: Trained, folder: Path) -> dict[str, Any]:
    """All that a run leaves, fit to be compared bit for bit: snapshot, loss and norm of each step, evaluation."""
    return {"state": kept(folder), "steps": trace(run), "eval": [line["values"] for line in run.metrics("eval")]}


# ---- the promise

CASES: dict[str, dict[str, Any]] = {
    "seven microbatches, clipped, averaged": {
        "train_section": {"max_steps": 4, "global_batch_size": 14, "clip_norm": 0.05},
        "model": {"ema_decay": 0.9},
    },
    "six microbatches in bf16, short windows at the end of epochs": {
        # 20 samples: windows of 12 and 8; six and four microbatches
        "train_section": {"max_epochs": 2, "global_batch_size": 12, "precision": "bf16"},
        "data": {"epoch_tail": "partial"},
    },
    "four microbatches, windows with fewer than there are ranks": {
        # 11 samples: windows of 8 and 3; four and two microbatches, the last of one sample
        "train_section": {"max_epochs": 2, "global_batch_size": 8},
        "params": {"length": 11},
        "data": {"epoch_tail": "partial"},
    },
    "seven microbatches in fp16 with a skipped step": {
        "train_section": {"max_steps": 5, "global_batch_size": 14, "precision": "fp16", "clip_norm": 0.5},
        "params": {"infinite": [3]},
        "scaler": {"init_scale": 1024.0, "growth_interval": 2},
    },
    "weights that are no whole numbers": {
        "train_section": {"max_steps": 4, "global_batch_size": 14},
        "params": {"weighted": True},
    },
    "parameters of four dtypes, one of them complex, in channels_last": {
        "train_section": {"max_steps": 4, "global_batch_size": 14, "clip_norm": 0.5},
        "params": {"model": "dtypes"},
        "model": {"channels_last": True},
    },
    "parameters that not every microbatch uses": {
        "train_section": {"max_steps": 4, "global_batch_size": 12},
        "params": {"model": "branches"},
        "ddp": {"find_unused_parameters": True},
    },
}


@pytest.mark.parametrize("case", CASES)
def test_every_world_size_gives_the_same_bits(tmp_path: Path, case: str) -> None:
    alone = tree(tmp_path / "1", 1, **CASES[case])
    expected = outcome(alone, tmp_path / "1")
    for world_size in (2, 3, 4):
        folder = tmp_path / str(world_size)
        run = tree(folder, world_size, **CASES[case])
        assert outcome(run, folder) == expected, f"{world_size} ranks went another way than one"
    if "skipped" in case:
        assert alone.counters["skipped"] >= 1
        assert alone.counters["applied"] >= 1


def test_the_default_reduction_gives_others(tmp_path: Path) -> None:
    """Without the tree the same job ends elsewhere: else the tests above would show nothing."""
    case = CASES["seven microbatches, clipped, averaged"]
    digests = set()
    for world_size in (1, 2, 3):
        tree(tmp_path / str(world_size), world_size, reduction="default", **case)
        digests.add(kept(tmp_path / str(world_size))["model.safetensors"])
    assert len(digests) == 3


def test_a_run_over_four_three_one_and_two_ranks_ends_as_on_one(tmp_path: Path) -> None:
    section = {"global_batch_size": 14, "clip_norm": 0.05}
    more: dict[str, Any] = {"model": {"ema_decay": 0.9}, "eval": {"every_steps": 3}}
    whole = tree(tmp_path / "whole", 1, train_section={**section, "max_steps": 8}, **more)
    for world_size, last_step in ((4, 2), (3, 5), (1, 6), (2, 8)):
        run = tree(tmp_path / "parts", world_size, train_section={**section, "max_steps": last_step}, **more)
        assert run.counters["global_step"] == last_step
    assert trace(run) == trace(whole)
    assert kept(tmp_path / "parts") == kept(tmp_path / "whole")
    evaluated = {line["step"]: line["values"] for line in run.metrics("eval")}
    for line in whole.metrics("eval"):
        assert evaluated[line["step"]] == line["values"]


def test_a_parameter_that_no_microbatch_of_a_window_uses_keeps_its_value(tmp_path: Path) -> None:
    """On every rank alike: with a gradient of zero, weight decay and old moments would move it."""
    params = {"model": "branches", "length": 1}  # the one sample is even
    more: dict[str, Any] = {"ddp": {"find_unused_parameters": True}, "params": params}
    section = {"max_steps": 2, "global_batch_size": 4}
    outcomes = []
    for world_size in (1, 2):
        folder = tmp_path / str(world_size)
        run = tree(folder, world_size, train_section=section, **more)
        outcomes.append(outcome(run, folder))
        store = store_of(folder)
        moments = load(store.read_file(store.snapshots()[0].name, "optimizer.safetensors"))
        assert {name.split(".")[0] for name in moments} == {"even", "common"}
    assert outcomes[0] == outcomes[1]


# ---- a peer that dies


def test_who_waits_in_the_all_to_all_is_seen_to_and_fails_with_the_peer(tmp_path: Path) -> None:
    """The supervisor tells the culprit by the phases: it is the rank that is not in the reduction."""
    run_dir = tmp_path / "state" / "runs" / "0001"

    def others_wait() -> bool:
        beats = {number: read_heartbeat(path) for number, path in heartbeat_paths(run_dir).items()}
        now = {number: (beat.phase, beat.step) for number, beat in beats.items() if beat is not None}
        return now == {0: (Phase.REDUCE, 2), 1: (Phase.FORWARD, 2), 2: (Phase.REDUCE, 2)}

    def kill_when_others_wait(ranks: list[Any]) -> None:
        wait_until(others_wait)
        ranks[1].kill()

    run = tree(
        tmp_path,
        3,
        task="tests.process.tree_tasks:RankStops",
        train_section={"max_steps": 6, "global_batch_size": 12},
        expect_success=False,
        while_running=kill_when_others_wait,
    )
    assert run.codes == [70, -9, 70]
    assert [(report.rank, report.step, report.secondary) for report in run.errors] == [(0, 2, True), (2, 2, True)]
    assert "another rank ended" in run.errors[0].what


# ---- what is refused


@pytest.mark.parametrize(
    ("what", "words", "hint"),
    [
        ("batchnorm", 'layer "1" is a BatchNorm1d with running statistics', "eval()"),
        ("syncbatchnorm", 'layer "1" is a SyncBatchNorm', "group or layer"),
        ("sparse", 'layer "2" is a Embedding with sparse gradients', "sparse=False"),
        ("spectral norm", "microbatch 0 of the window changed 0.parametrizations.weight.0._u", "leave the model's"),
        ("max_norm", "microbatch 0 of the window changed embed.weight", "leave the model's"),
        ("unused", "got no gradient in microbatch 0 of the window", "find_unused_parameters = true"),
        ("nondeterministic", "the task uses put_", "Replace it"),
    ],
)
def test_what_would_break_the_promise_is_refused_by_name(tmp_path: Path, what: str, words: str, hint: str) -> None:
    task = "tests.process.tree_tasks:Unfit"
    run = tree(tmp_path, 1, task=task, params={"what": what}, expect_success=False)
    assert run.codes == [78]
    assert words in run.errors[0].what
    assert hint in run.errors[0].hint
    assert run.errors[0].step == 0
    assert run.metrics() == []


def test_an_evaluation_needs_deterministic_operations_too(tmp_path: Path) -> None:
    task = "tests.process.tree_tasks:Unfit"
    run = tree(tmp_path, 1, task=task, params={"what": "nondeterministic evaluation"}, expect_success=False)
    assert run.codes == [78]
    assert "the task uses put_" in run.errors[0].what
    assert run.errors[0].step == len(run.metrics()) > 0


@pytest.mark.parametrize("what", ["frozen batchnorm", "batchnorm without statistics"])
def test_batchnorm_that_keeps_no_statistics_may_stay(tmp_path: Path, what: str) -> None:
    digests = set()
    for world_size in (1, 2):
        folder = tmp_path / str(world_size)
        tree(folder, world_size, task="tests.process.tree_tasks:Unfit", params={"what": what})
        digests.add(kept(folder)["model.safetensors"])
    assert len(digests) == 1


@pytest.mark.parametrize("name", ["ddp.static_graph", "model.sync_batchnorm", "model.compile"])
def test_options_that_would_break_it_are_refused_with_the_job_file(tmp_path: Path, name: str) -> None:
    section, key = name.split(".")
    path = write_job(tmp_path, TASK, **TREE, **{section: {key: True}})
    done = run_cli("config", "check", path)
    assert done.code == 78
    assert f'{name} = true does not go with elastic.reduction = "tree"' in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "override", "kept_value", "value"),
    [
        ("threads_per_rank", "elastic.threads_per_rank=2", "1", "2"),
        ("micro_batch_size", "train.micro_batch_size=1", "2", "1"),
        ("reduction", "elastic.reduction=default", "tree", "default"),
    ],
)
def test_what_is_part_of_the_numbers_must_not_change(
    tmp_path: Path, name: str, override: str, kept_value: str, value: str
) -> None:
    tree(tmp_path, 1, train_section={"max_steps": 1})
    refused = go(tmp_path, task="", overrides=[override, "train.max_steps=2"], expect_success=False)
    assert refused.codes == [78]
    assert f"{name}: the snapshot has {kept_value}, this run has {value}" in refused.errors[0].what
    assert "--allow" in refused.errors[0].hint
    allowed = StartOptions(allowed_differences=(name,))
    run = go(tmp_path, task="", overrides=[override, "train.max_steps=2"], options=allowed)
    assert run.counters["global_step"] == 2


def test_threads_are_pinned_to_one_whatever_the_cores(tmp_path: Path) -> None:
    """A share of the cores would change with the number of ranks. helpers.write_job sets it; here the job does not."""
    from elastictrain.config.schema import JobConfig
    from elastictrain.training.worker import _num_threads

    train = {"max_steps": 1, "micro_batch_size": 1}
    job: dict[str, Any] = {"name": "job", "task": "a:B", "train": train, "elastic": {"reduction": "tree"}}
    assert _num_threads(JobConfig.model_validate(job)) == 1
    job["elastic"]["threads_per_rank"] = 3
    assert _num_threads(JobConfig.model_validate(job)) == 3
