"""The table of faults, the verdict, the schedule of a soak, what a drill changes in a job."""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.armed import ArmedFault, DrillDir
from elastictrain.cli.drill_command import Places, each_saved, writing
from elastictrain.config import load_job
from elastictrain.core.drill_verdict import Seen, SeenLive, live_objections, objections
from elastictrain.core.fault_table import BY_NAME, TABLE, select
from elastictrain.core.faults import Action, Expect, Outside, Who, allowed_steps_lost
from elastictrain.core.phases import Phase
from elastictrain.core.soak import parse_duration_s, schedule, soakable
from elastictrain.drill.compare import FinalState, first_difference
from elastictrain.drill.judge import Row
from elastictrain.drill.live import check_live
from elastictrain.drill.outside import damage_file
from elastictrain.drill.report import as_document, not_held
from elastictrain.drill.settings import MIN_STEPS, load_drill_job, refusal
from elastictrain.errors import UsageError

NAMES = [
    "kill-rank",
    "kill-rank-zero",
    "stop-rank",
    "hang-in-loss",
    "hang-holding-gil",
    "segfault",
    "raise-in-loss",
    "raise-in-dataset",
    "oom-kill",
    "exit-in-the-middle-of-a-snapshot",
    "kill-agent",
    "kill-supervisor",
    "kill-loader-worker",
    "slow-rank",
    "corrupt-latest",
    "truncate-latest",
    "storage-outage",
    "disk-full",
    "preempt",
    "clock-back",
    "clock-forward",
    "nan-loss",
    "poison-sample",
]


# ---- the table


def test_the_table_has_every_fault_once():
    assert [fault.name for fault in TABLE] == NAMES
    assert list(BY_NAME) == NAMES


@pytest.mark.parametrize("fault", TABLE, ids=lambda fault: fault.name)
def test_a_fault_is_explained_and_consistent(fault):
    assert fault.explanation.endswith((".", ")"))
    # What is done from outside needs a rank that holds, and nothing else does: whoever starts a supervisor again comes
    # after its death.
    assert (fault.outside not in (Outside.NOTHING, Outside.START_AGAIN)) == (fault.action is Action.HOLD)
    assert (fault.outside is Outside.START_AGAIN) == (fault.action is Action.KILL_SUPERVISOR)
    if fault.in_soak:
        assert fault.expect is Expect.RESUME


def test_selects_by_name_in_the_order_given():
    assert [fault.name for fault in select(["preempt", "kill-rank", "preempt"])] == ["preempt", "kill-rank"]
    assert [fault.name for fault in select(["all"])] == NAMES
    assert [fault.name for fault in select(["clock-jump", "clock-back"])] == ["clock-back", "clock-forward"]
    assert select([*NAMES, "all"]) == select(["all"]), "each once"
    with pytest.raises(UsageError, match="did you mean kill-rank"):
        select(["kil-rank"])


@pytest.mark.parametrize("fault", TABLE, ids=lambda fault: fault.name)
@given(world_size=st.integers(1, 8), every=st.integers(1, 50))
def test_nothing_may_be_lost_while_a_replica_lives(fault, world_size, every):
    allowed = allowed_steps_lost(fault, world_size=world_size, snapshot_every_steps=every)
    if fault.expect is Expect.FALL_BACK or (world_size == 1 and fault.is_gone):
        assert allowed == every
    else:
        assert allowed == 0


def test_points_name_real_ranks():
    assert Who.ZERO.rank(4) == 0
    assert Who.LAST.rank(4) == 3
    assert str(BY_NAME["kill-rank"].point(7, 2)) == "rank 1, after step 7, forward"


# ---- the verdict


GOOD = {
    Expect.RESUME: Seen(True, 0, complete=True, difference="", num_restarts=1),
    Expect.UNDISTURBED: Seen(True, 0, complete=True, difference=""),
    Expect.FALL_BACK: Seen(
        True, 0, complete=True, difference="", num_restarts=1, passed_over=True, steps_lost=2, allowed_steps_lost=2
    ),
    Expect.SKIP: Seen(True, 0, complete=True, difference="", num_skipped=1),
    Expect.HALT: Seen(
        True,
        79,
        difference="",
        halt_reason="step 5 fails: samples 3, 4",
        halted_where=("step 5",),
        kept_step=4,
        due_steps=(4, 4),
    ),
}


@pytest.mark.parametrize("fault", TABLE, ids=lambda fault: fault.name)
def test_what_is_promised_holds(fault):
    assert objections(fault, GOOD[fault.expect]) == []


WORSE = {
    "the fault did not happen": {"fired": False},
    "differs first at step 3": {"difference": "step 3 (loss)"},
    "nothing could be compared": {"difference": None},
    "4 samples consumed twice": {"samples_repeated": 4},
    "5 samples left out": {"samples_skipped": 5},
    "9 steps done again": {"steps_lost": 9},
    "left behind: process 7": {"leftovers": "process 7"},
}


@pytest.mark.parametrize("fault", TABLE, ids=lambda fault: fault.name)
@pytest.mark.parametrize("words", WORSE)
def test_whatever_is_wrong_is_said(fault, words):
    assert any(said.startswith(words) for said in objections(fault, replace(GOOD[fault.expect], **WORSE[words])))


@pytest.mark.parametrize(
    ("expect", "worse", "words"),
    [
        (Expect.RESUME, {"num_restarts": 0}, "no new worker group"),
        (Expect.RESUME, {"exit_code": None}, "had not ended in time"),
        (Expect.RESUME, {"exit_code": 70, "error": "boom"}, "exit code 70: boom"),
        (Expect.RESUME, {"complete": False}, "before all steps"),
        (Expect.UNDISTURBED, {"num_restarts": 1}, "none expected"),
        (Expect.UNDISTURBED, {"num_incidents": 1}, "none expected"),
        (Expect.FALL_BACK, {"passed_over": False}, "not named"),
        (Expect.SKIP, {"num_skipped": 0}, "one expected"),
        (Expect.HALT, {"exit_code": 0}, "79 expected"),
        (Expect.HALT, {"exit_code": None}, "still being restarted"),
        (Expect.HALT, {"halt_reason": "step 6 fails"}, 'does not say "step 5"'),
        (Expect.HALT, {"kept_step": None}, "no sound snapshot was kept"),
        (Expect.HALT, {"kept_step": 3}, "is of step 3, not of step 4, before the step that fails"),
        (Expect.HALT, {"kept_step": 5}, "is of step 5, not of step 4"),
        (Expect.HALT, {"kept_step": 1, "due_steps": (2, 4)}, "is of step 1, not of a step from 2 to 4"),
    ],
)
def test_what_is_missing_is_said(expect, worse, words):
    fault = next(fault for fault in TABLE if fault.expect is expect)
    assert any(words in said for said in objections(fault, replace(GOOD[expect], **worse)))


# ---- the verdict on a running job


@pytest.mark.parametrize(
    ("name", "seen", "lost", "said"),
    [
        ("kill-rank", SeenLive(30, 30, 25, world_size=2), 0, ""),
        ("kill-rank", SeenLive(30, 29, 25, world_size=2), 1, "1 step done again, none allowed"),
        ("kill-rank", SeenLive(30, 25, 25, world_size=1), 5, ""),
        ("kill-rank", SeenLive(30, 26, 25, world_size=1), 4, ""),
        ("kill-rank", SeenLive(30, 24, 25, world_size=1), 6, "6 steps done again, 5 allowed"),
        ("kill-rank", SeenLive(30, 24, 30, world_size=1), 6, "6 steps done again, none allowed"),
        ("kill-rank", SeenLive(30, 0, 0, world_size=1), 30, ""),
        ("stop-rank", SeenLive(30, 0, 25, world_size=1), 30, "step 25, and step 0 was restored"),
        # Its rank lives, and keeps its state.
        ("kill-agent", SeenLive(30, 25, 25, world_size=1), 5, "5 steps done again, none allowed"),
        ("kill-agent", SeenLive(30, 30, 25, world_size=1), 0, ""),
        ("kill-rank", SeenLive(None, None, 25, world_size=1), None, ""),
        ("kill-rank", SeenLive(30, 31, 25, world_size=2), 0, ""),
    ],
)
def test_a_running_job_loses_what_its_snapshots_allow(name, seen, lost, said):
    assert seen.steps_lost == lost
    found = live_objections(BY_NAME[name], seen)
    assert [words for words in found if said not in words] == []
    assert bool(found) == bool(said)


# ---- a soak


@given(st.integers(0, 2**32), st.integers(8, 5000), st.floats(1.0, 500.0))
def test_a_schedule_follows_from_its_seed(seed, num_steps, mean):
    first = schedule(seed, num_steps=num_steps, mean_steps_between=mean, faults=soakable())
    assert first == schedule(seed, num_steps=num_steps, mean_steps_between=mean, faults=soakable())
    steps = [strike.step for strike in first]
    assert steps == sorted(set(steps))
    assert all(2 < step <= num_steps - 2 for step in steps)
    assert len({strike.id(number) for number, strike in enumerate(first)}) == len(first)


@given(st.integers(0, 2**32), st.integers(20, 3000), st.floats(1.0, 60.0))
def test_no_kind_comes_again_before_all_have_come(seed, num_steps, mean):
    kinds = soakable()
    drawn = [s.fault for s in schedule(seed, num_steps=num_steps, mean_steps_between=mean, faults=kinds)]
    for begin in range(0, len(drawn), len(kinds)):
        a_round = drawn[begin : begin + len(kinds)]
        assert len(set(a_round)) == len(a_round)
    orders = {tuple(drawn[begin : begin + len(kinds)]) for begin in range(0, len(drawn) - len(kinds) + 1, len(kinds))}
    assert len(orders) >= min(2, len(drawn) // len(kinds)), "every round is shuffled anew"


def test_gaps_have_the_mean_they_were_given():
    strikes = schedule(1, num_steps=1_000_000, mean_steps_between=100.0, faults=soakable())
    assert 9_500 < len(strikes) < 10_500
    assert {strike.fault for strike in strikes} == set(soakable())


@pytest.mark.parametrize(("text", "value_s"), [("90", 90), ("30s", 30), ("10m", 600), ("0.5h", 1800)])
def test_reads_durations(text, value_s):
    assert parse_duration_s(text) == value_s


@pytest.mark.parametrize("text", ["", "m", "-3s", "0", "ten", "nan", "inf", "3d"])
def test_refuses_what_is_no_duration(text):
    assert parse_duration_s(text) is None


# ---- settings


def job_file(folder, **sections):
    path = folder / "job.toml"
    job = {"name": "mine", "task": "task:T", "train": {"max_steps": 100, "micro_batch_size": 1}, **sections}
    path.write_text(tomli_w.dumps(job))
    return str(path)


def resolved(job, folder, fault=None):
    arguments = job.arguments(folder / "state", folder / "store", fault)
    sets = [arguments[at + 1] for at, argument in enumerate(arguments) if argument == "--set"]
    return load_job(arguments[1], sets).config


def test_a_drill_touches_neither_store_nor_ports_of_the_job(tmp_path):
    target = job_file(
        tmp_path,
        train={"max_epochs": 3, "micro_batch_size": 1},
        checkpoint={"url": "s3://mine/here", "storage_options": {"key": "k"}, "every_s": 60.0, "keep_last": 1},
        supervisor={"metrics_port": 9400, "min_step_timeout_s": 7.0},
        elastic={"nodes": "2:4", "rendezvous": "c10d://node0:29400"},
    )
    job = load_drill_job(target, ["seed=3"], steps=None, at_step=None)
    config = resolved(job, tmp_path)
    assert config.checkpoint.url == str(tmp_path / "store")
    assert config.checkpoint.storage_options == {}
    assert (config.checkpoint.every_steps, config.checkpoint.keep_last, config.checkpoint.is_auto) == (5, 3, False)
    assert config.supervisor.metrics_port == 0
    assert (config.elastic.rendezvous, config.elastic.nodes) == ("local", "1")
    assert config.supervisor.min_step_timeout_s == 7.0
    assert (config.train.max_steps, config.metrics.every_steps, config.seed, config.name) == (40, 1, 3, "mine")


@given(st.integers(MIN_STEPS, 400))
def test_a_fault_has_a_snapshot_before_it_and_steps_after_it(tmp_path_factory, steps):
    job = load_drill_job(job_file(tmp_path_factory.mktemp("job")), [], steps=steps, at_step=None)
    assert job.snapshot_every_steps < job.fault_step <= steps - 2
    # What is lost without a snapshot at failure shows: the fault does not come right after a regular one.
    assert job.snapshot_every_steps == 1 or job.fault_step % job.snapshot_every_steps != 0


@pytest.mark.parametrize(("steps", "at_step"), [(MIN_STEPS - 1, None), (40, 39), (40, 5), (40, 0)])
def test_refuses_a_drill_that_is_too_short_for_its_fault(tmp_path, steps, at_step):
    with pytest.raises(UsageError, match="step"):
        load_drill_job(job_file(tmp_path), [], steps=steps, at_step=at_step)


def test_only_the_drill_of_a_loader_process_gives_the_job_one(tmp_path):
    job = load_drill_job(job_file(tmp_path), [], steps=None, at_step=None)
    assert resolved(job, tmp_path, BY_NAME["kill-loader-worker"]).data.num_workers == 1
    assert resolved(job, tmp_path, BY_NAME["kill-rank"]).data.num_workers == 0


def test_a_job_that_does_not_check_gradients_cannot_have_a_nan(tmp_path):
    job = load_drill_job(job_file(tmp_path), ["train.check_gradients=false"], steps=None, at_step=None)
    assert "check_gradients" in refusal(BY_NAME["nan-loss"], job)
    assert not refusal(BY_NAME["kill-rank"], job)


@pytest.mark.parametrize("fault", [fault for fault in TABLE if not fault.is_live], ids=lambda fault: fault.name)
def test_what_cannot_be_done_from_outside_is_refused_by_name(fault):
    with pytest.raises(UsageError, match=fault.name):
        check_live(fault)


# ---- files that drill and ranks share


def test_armed_faults_come_back_as_they_were(tmp_path):
    folder = DrillDir(tmp_path)
    assert folder.armed() is None
    armed = [ArmedFault(f.name, f.action, 1, 9, f.phase) for f in TABLE]
    folder.arm(armed)
    assert folder.armed() == armed


def test_a_fault_is_claimed_once(tmp_path):
    folder = DrillDir(tmp_path)
    folder.arm([])
    assert folder.fired_at_s("a") is None
    assert folder.claim("a")
    assert not DrillDir(tmp_path).claim("a")
    assert folder.fired_at_s("a") is not None


def test_a_torn_last_line_of_a_trace_is_left_out(tmp_path):
    folder = DrillDir(tmp_path)
    folder.arm([ArmedFault("a", Action.KILL, 0, 1, Phase.DATA)])
    folder.trace_path(3, 1).write_text('{"kind": "committed", "step": 1, "at_s": 2.0}\n{"kind": "comm')
    assert [(n, rank, len(lines)) for n, rank, lines in folder.traces()] == [(3, 1, 1)]


# ---- the report


def a_row(fault, verdict):
    return Row(fault=fault, verdict=verdict, why="")


ROWS = [a_row("kill-rank", "holds"), a_row("oom-kill", "refused"), a_row("preempt", "fails")]


@pytest.mark.parametrize(
    ("rows", "asked", "failed"),
    [
        (ROWS[:1], {"kill-rank"}, []),
        (ROWS[:2], {"all"}, []),
        (ROWS[:2], {"all", "oom-kill"}, ["oom-kill"]),
        (ROWS[1:2], {"oom-kill"}, ["oom-kill"]),
        (ROWS, {"all"}, ["preempt"]),
        (ROWS, {"oom-kill", "preempt", "kill-rank"}, ["oom-kill", "preempt"]),
    ],
)
def test_what_was_asked_for_by_name_does_not_hold_when_it_is_refused(rows, asked, failed):
    assert not_held(rows, asked) == failed
    document = as_document(rows, {}, asked)
    assert document["holds"] is (failed == [])
    assert document["refused"] == [row.fault for row in rows if row.verdict == "refused"]
    assert document["fails"] == [row.fault for row in rows if row.verdict == "fails"]


def interrupted_drill(report: Path | None, then) -> None:
    """One that has done the first of three faults, when `then` is called in the second and Ctrl-C comes."""

    def second():
        then()
        raise KeyboardInterrupt

    drills = [
        ("kill-rank", lambda: a_row("kill-rank", "holds")),
        ("preempt", second),
        ("oom-kill", lambda: pytest.fail("it was interrupted")),
    ]
    places = Places(None, report, keep=False)
    with writing(places) as folder:
        (folder / "preempt").mkdir()
        each_saved(drills, {"job": "mine"}, {"all"}, places, folder)


def test_what_is_done_is_saved_when_the_rest_is_interrupted(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    report = tmp_path / "report" / "drill.json"

    def look():
        document = json.loads(report.read_text())
        assert (document["holds"], document["not_run"]) == (False, ["preempt", "oom-kill"])

    with pytest.raises(KeyboardInterrupt):
        interrupted_drill(report.parent, look)
    assert not list(tmp_path.glob("elastictrain-drill-*"))
    assert f"1 of 3 drills were done. Saved: {report}" in capsys.readouterr().err
    assert [row["fault"] for row in json.loads(report.read_text())["rows"]] == ["kill-rank"]
    assert "- not run: preempt, oom-kill" in report.with_suffix(".md").read_text()


def test_a_report_outlives_the_folder_of_runs_that_it_lies_in(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        interrupted_drill(None, lambda: None)
    (folder,) = tmp_path.glob("elastictrain-drill-*")
    assert sorted(path.name for path in folder.iterdir()) == ["drill.json", "drill.md"]


# ---- comparison


LINES = [{"step": n, "loss": 0.1 * n, "grad_norm": 1.0, "lr": 0.1, "applied": True, "samples": 4} for n in (1, 2, 3)]
TRAINER = {"counters": "{}", "epoch": "0", "data_order": "{}", "aliases": "{}", "state": "{}"}
FINAL = FinalState(
    3,
    {"model.safetensors": "aa", "optimizer.safetensors": "bb"},
    {("model.safetensors", "w"): "1", ("model.safetensors", "b"): "2", ("optimizer.safetensors", "w/exp_avg"): "3"},
    TRAINER,
    {},
    10,
)


def test_equal_runs_have_no_difference_also_where_steps_were_done_twice_or_have_no_line():
    assert first_difference(LINES, [LINES[0], LINES[1], LINES[1]], FINAL, FINAL) == ""


@given(st.sampled_from(["loss", "grad_norm", "lr"]), st.integers(0, 2))
def test_the_last_bit_of_a_number_is_a_difference(key, at):
    changed = [dict(line) for line in LINES]
    changed[at][key] = math.nextafter(changed[at][key], math.inf)
    assert first_difference(LINES, changed, FINAL, FINAL) == f"step {at + 1} ({key})"


def test_a_loss_of_one_ranks_part_alone_is_not_compared_but_the_gradient_is():
    alone = {**LINES[1], "loss": 7.0, "partial": True}
    assert first_difference(LINES, [LINES[0], alone, LINES[2]], FINAL, FINAL) == ""
    assert first_difference(LINES, [{**alone, "grad_norm": 2.0}], FINAL, FINAL) == "step 2 (grad_norm)"


def test_names_the_first_differing_tensor():
    other = replace(FINAL, tensors={**FINAL.tensors, ("optimizer.safetensors", "w/exp_avg"): "4"})
    assert first_difference(LINES, LINES, FINAL, other) == "tensor w/exp_avg in optimizer.safetensors"
    both = replace(other, tensors={**other.tensors, ("model.safetensors", "w"): "9"})
    assert first_difference(LINES, LINES, FINAL, both) == "tensor w in model.safetensors"
    assert "counters" in first_difference(LINES, LINES, FINAL, replace(FINAL, trainer={**TRAINER, "counters": "{1}"}))
    assert "kept step 2" in first_difference(LINES, LINES, FINAL, replace(FINAL, step=2))


@given(st.binary(min_size=2, max_size=500), st.booleans())
def test_damage_changes_a_file(tmp_path_factory, content, truncate):
    path = tmp_path_factory.mktemp("damage") / "file"
    path.write_bytes(content)
    damage_file(path, truncate=truncate)
    assert path.read_bytes() != content
    assert len(path.read_bytes()) == (len(content) // 2 if truncate else len(content))
