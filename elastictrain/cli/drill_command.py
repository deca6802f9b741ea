"""`elastictrain drill`: faults on a job of the user's own, in a scratch folder, and what became of it."""

from __future__ import annotations

import json
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastictrain.cli.drill_list import show_list, wide_console
from elastictrain.cli.job_dirs import JobDir, find_job_dir
from elastictrain.cli.options import SetOption, StateDirOption
from elastictrain.errors import DrillFailedError, StateDirError, UsageError

if TYPE_CHECKING:
    from elastictrain.core.faults import Fault
    from elastictrain.core.node_faults import NodeFault
    from elastictrain.drill.judge import Row
    from elastictrain.drill.settings import DrillJob


def drill(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME...|all] JOB | soak [NAME...|all] JOB | list",
            help="Faults by name, and the job: a job.toml, its folder, or an example by name. `list` explains them.",
        ),
    ],
    overrides: SetOption = None,
    steps: Annotated[
        int | None,
        typer.Option("--steps", metavar="N", help="Length of each run. Default: train.max_steps, at most 40."),
    ] = None,
    at_step: Annotated[
        int | None,
        typer.Option("--at-step", metavar="N", help="After how many steps the fault happens. Default: the middle."),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            "--nodes",
            metavar="N",
            min=2,
            help="Faults of several nodes: how many there are. Default: 2, or as many as the fault needs. With `all`: "
            "these faults too, which it leaves out otherwise.",
        ),
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="DIR", help="Where the report goes. Default: the scratch folder.")
    ] = None,
    scratch: Annotated[
        Path | None,
        typer.Option("--scratch", metavar="DIR", help="Where the runs write. Default: a new temporary folder."),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the folders of all runs, not of failed ones alone.")
    ] = False,
    for_: Annotated[
        str, typer.Option("--for", metavar="TIME", help="soak: how long the run would take undisturbed: 90s, 10m, 2h.")
    ] = "10m",
    mtbf: Annotated[
        str, typer.Option("--mtbf", metavar="TIME", help="soak: mean time of training between two faults.")
    ] = "30s",
    seed: Annotated[int, typer.Option("--seed", metavar="S", help="soak: of the faults and their steps.")] = 0,
    live: Annotated[
        str | None,
        typer.Option("--live", metavar="JOB", help="Do one fault to this running job: its name, or its job.toml."),
    ] = None,
    state_dir: StateDirOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="--live: do not ask first.")] = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="S", min=0.1, help="--live: how long to wait for the job to go on.")
    ] = 1200.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Prove on your own job that it survives: run it with faults in it, and compare bit for bit.

    The job runs in a scratch folder, with a store of its own: your data, snapshots and checkpoints stay untouched.
    First undisturbed, then once per fault. Exit code 0 only if every drill holds.

    Example: elastictrain drill kill-rank stop-rank job.toml
    """
    if words == ["list"]:
        show_list(as_json=as_json)
        return
    from elastictrain.core.fault_table import ALL, select
    from elastictrain.core.node_faults import NODE_FAULTS, NODE_TABLE

    if of_nodes := [word for word in words if word in NODE_FAULTS and (live is not None or words[0] == "soak")]:
        raise UsageError(
            f"{of_nodes[0]} is done to nodes of the drill's own, in a run of its own",
            f"For example: elastictrain drill {of_nodes[0]} job.toml",
        )
    if live is not None or state_dir is not None:
        where = find_job_dir(live, state_dir)
        faults = select(words)
        if len(faults) != 1:
            raise UsageError("--live takes one fault at a time", "For example: elastictrain drill kill-rank --live JOB")
        _live(faults[0], where, yes=yes, timeout_s=timeout_s, as_json=as_json)
        return
    is_soak = words[0] == "soak"
    if len(words) < 2:
        what = "give the job" if is_soak else "give the faults and then the job"
        raise UsageError(f"drill {words[0]}: {what}", "For example: elastictrain drill kill-rank job.toml")
    from elastictrain.drill.settings import load_drill_job

    names = words[1:-1] if is_soak else words[:-1]
    node_names = list(dict.fromkeys(name for name in names if name in NODE_FAULTS))
    names = [name for name in names if name not in NODE_FAULTS]
    if nodes is not None and ALL in names:
        node_faults = list(NODE_TABLE)
    elif nodes is not None and not node_names:
        raise UsageError(
            f"--nodes {nodes}: none of these faults is one of several nodes", f"These are: {', '.join(NODE_FAULTS)}."
        )
    else:
        node_faults = [NODE_FAULTS[name] for name in node_names]
    by_name = select(name for name in names if name != ALL)
    job = load_drill_job(words[-1], overrides or [], steps=steps, at_step=at_step)
    places = Places(scratch, report, keep)
    if is_soak:
        _soak(job, by_name, places, with_all=ALL in names, for_=for_, mtbf=mtbf, seed=seed, as_json=as_json)
    else:
        asked = {fault.name for fault in by_name} | set(node_names)
        _drill(job, select(names), node_faults, places, num_nodes=nodes, asked=asked, as_json=as_json)


@dataclass(frozen=True, slots=True)
class Places:
    """Where a drill writes.

    Args:
        scratch: folder of the runs; None for a temporary one.
        report: folder of the report; None for that of the runs.
        keep: leave the folders of all runs.
    """

    scratch: Path | None
    report: Path | None
    keep: bool


def _drill(
    job: DrillJob,
    faults: list[Fault],
    node_faults: list[NodeFault],
    places: Places,
    *,
    num_nodes: int | None,
    asked: set[str],
    as_json: bool,
) -> None:
    from elastictrain.drill.exercise import Exercise
    from elastictrain.drill.nodes.exercise import NodesExercise, nodes_refusal
    from elastictrain.drill.settings import refusal

    for fault in faults:
        if fault.name in asked and (why := refusal(fault, job)):
            raise UsageError(f"{fault.name}: {why}")
    for each in node_faults:
        if each.name in asked and (why := nodes_refusal(each, job, num_nodes or each.num_nodes)):
            raise UsageError(f"{each.name}: {why}")
    with writing(places) as folder, ending_all():
        on_one = Exercise(job, folder, tell=_tell, keep=places.keep)
        on_nodes = NodesExercise(job, folder, num_nodes=num_nodes, tell=_tell, keep=places.keep)
        drills: list[tuple[str, Callable[[], Row]]] = [
            *((fault.name, partial(on_one.run, fault)) for fault in faults),
            *((each.name, partial(on_nodes.run, each)) for each in node_faults),
        ]
        rows, saved = each_saved(drills, about(job), asked, places, folder)
    _conclude(rows, about(job), saved, asked=asked, as_json=as_json)


def each_saved(
    drills: list[tuple[str, Callable[[], Row]]], facts: dict[str, Any], asked: set[str], places: Places, folder: Path
) -> tuple[list[Row], tuple[Path, Path] | None]:
    """Drills one after the other; all together take long, so the report is written anew after each."""
    names = [name for name, _ in drills]
    rows: list[Row] = []
    saved: tuple[Path, Path] | None = None
    try:
        for _, run in drills:
            row = run()
            rows.append(row)
            saved = _save(rows, facts, asked, places, folder, not_run=names[len(rows) :])
            _tell(f"{row.fault}: {row.verdict} ({len(rows)} of {len(drills)})")
    except BaseException:
        if saved is not None:
            _tell(f"{len(rows)} of {len(drills)} drills were done. Saved: {saved[0]} and {saved[1].name}")
        raise
    return rows, saved


def _soak(
    job: DrillJob,
    by_name: list[Fault],
    places: Places,
    *,
    with_all: bool,
    for_: str,
    mtbf: str,
    seed: int,
    as_json: bool,
) -> None:
    from elastictrain.core.soak import parse_duration_s, soakable
    from elastictrain.drill.soak import Soak

    for_s, mtbf_s = parse_duration_s(for_), parse_duration_s(mtbf)
    for name, text, value_s in (("--for", for_, for_s), ("--mtbf", mtbf, mtbf_s)):
        if value_s is None:
            raise UsageError(f"{name} {text}: not a duration", "For example: 90s, 10m, 2h.")
    assert for_s is not None
    assert mtbf_s is not None
    if unfit := [fault.name for fault in by_name if not fault.in_soak]:
        names = ", ".join(fault.name for fault in soakable())
        raise UsageError(f"a soak cannot have {', '.join(unfit)}", f"It can have: {names}.")
    with writing(places) as folder, ending_all():
        soaked = Soak(
            job,
            folder,
            for_s=for_s,
            mtbf_s=mtbf_s,
            seed=seed,
            faults=soakable() if with_all or not by_name else by_name,
            tell=_tell,
            keep=places.keep,
        ).run()
        facts = {**about(job), "seed": seed, "for_s": for_s, "mtbf_s": mtbf_s, **soaked.about}
        saved = _save([soaked.row], facts, set(), places, folder)
    _conclude([soaked.row], facts, saved, asked=set(), as_json=as_json)


def _live(fault: Fault, where: JobDir, *, yes: bool, timeout_s: float, as_json: bool) -> None:
    from elastictrain.cli.daemon import require_daemon
    from elastictrain.drill.live import check_live, find_target, strike

    check_live(fault)
    status = require_daemon(where).get("/status")
    target = find_target(fault, status)
    if not yes:
        question = f"Send {target.signum.name} to {target.words} of {where.name}, process {target.pid}?"
        if not typer.confirm(question, err=True):
            raise typer.Exit(1)
        # It may have been a while.
        status = require_daemon(where).get("/status")
        target = find_target(fault, status)
    row = strike(fault, target, status, timeout_s=timeout_s, tell=_tell)
    _conclude([row], {"job": where.name, "live": True}, None, asked={fault.name}, as_json=as_json)


def about(job: DrillJob) -> dict[str, Any]:
    """What was drilled, for the report."""
    return {
        "job": job.config.name,
        "steps": job.steps,
        "snapshot_every_steps": job.snapshot_every_steps,
        "world_size": job.world_size,
    }


def _tell(text: str) -> None:
    typer.echo(text, err=True)


def _save(
    rows: list[Row],
    facts: dict[str, Any],
    asked: set[str],
    places: Places,
    folder: Path,
    *,
    not_run: Sequence[str] = (),
) -> tuple[Path, Path]:
    from elastictrain.drill.report import save

    return save(rows, facts, asked, places.report if places.report is not None else folder, not_run=not_run)


def _conclude(
    rows: list[Row], facts: dict[str, Any], saved: tuple[Path, Path] | None, *, asked: set[str], as_json: bool
) -> None:
    """Prints the report; fails unless all hold, and none that was asked for was refused."""
    from elastictrain.drill.report import as_document, not_held, print_table

    if as_json:
        typer.echo(json.dumps(as_document(rows, facts, asked), indent=2))
    else:
        print_table(rows, wide_console())
        if saved is not None:
            typer.echo(f"Saved: {saved[0]} and {saved[1].name}")
    if failed := not_held(rows, asked):
        raise DrillFailedError(f"{len(failed)} of {len(rows)} drill(s) do not hold: {', '.join(failed)}")


@contextmanager
def writing(places: Places) -> Iterator[Path]:
    """The folder that the runs write into; of one of our own, only a report is left where they did not come to an end.

    Raises:
        UsageError: the folder that was named has something in it.
        StateDirError: it, or that of the report, cannot be written.
    """
    from elastictrain.errors import DrillError

    try:
        if places.report is not None:
            places.report.mkdir(parents=True, exist_ok=True)  # now, rather than when all is done
        if places.scratch is None:
            folder = Path(tempfile.mkdtemp(prefix="elastictrain-drill-"))
        else:
            folder = places.scratch.absolute()
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise UsageError(f"--scratch {folder}: this folder is not empty", "Name a new one.")
    except OSError as error:
        raise StateDirError(f"{error.filename} cannot be written: {error.strerror}", "Name another folder.") from error
    try:
        yield folder
    except DrillError:
        raise  # its message points to what is in there
    except BaseException as error:
        if places.scratch is None:
            for path in folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
            if not any(folder.iterdir()):
                folder.rmdir()
        if isinstance(error, OSError):
            raise StateDirError(
                f"the drill cannot go on in {folder}: {error}", "Use --scratch DIR, with room for its snapshots."
            ) from error
        raise
    if not any(folder.iterdir()):
        folder.rmdir()


@contextmanager
def ending_all() -> Iterator[None]:
    """Whatever ends the drill, SIGTERM and Ctrl-C included, ends all that it has started."""
    from elastictrain.drill.trial import end_descendants
    from elastictrain.procs import adopt_orphans

    def listen_no_more() -> None:
        for signum in before:
            signal.signal(signum, signal.SIG_IGN)

    def interrupt(signum: int, _frame: Any) -> None:
        listen_no_more()  # a second one must not cut off the cleaning up after the first
        raise SystemExit(128 + signum)

    adopt_orphans()
    before = {signum: signal.signal(signum, interrupt) for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    try:
        yield
    finally:
        listen_no_more()
        end_descendants()
        for signum, handler in before.items():
            signal.signal(signum, handler)
