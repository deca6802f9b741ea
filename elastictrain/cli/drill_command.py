"""`elastictrain drill`: faults on a job of the user's own, in a scratch folder, and what became of it."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastictrain.cli.options import SetOption
from elastictrain.errors import ElasticTrainError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from elastictrain.drill.exercise import Row
    from elastictrain.drill.settings import DrillJob


class DrillFailedError(ElasticTrainError):
    """A drill does not hold: the job would not have survived that fault as promised."""

    exit_code = 1


def drill(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME...|all] JOB | list | soak JOB",
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
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Prove on your own job that it survives: run it with faults in it, and compare bit for bit.

    The job runs in a scratch folder, with a store of its own: your data, snapshots and checkpoints stay untouched.
    First undisturbed, then once per fault. Exit code 0 only if every drill holds.

    Example: elastictrain drill kill-rank stop-rank job.toml
    """
    if words == ["list"]:
        _list(as_json)
        return
    from elastictrain.core.faults import select
    from elastictrain.drill.settings import load_drill_job, refusal

    if len(words) < 2:
        raise UsageError(
            f"drill {words[0]}: give the faults and then the job", "For example: elastictrain drill kill-rank job.toml"
        )
    faults = select(words[:-1])
    job = load_drill_job(words[-1], overrides or [], steps=steps, at_step=at_step)
    for fault in faults:
        if "all" not in words and (why := refusal(fault, job)):
            raise UsageError(f"{fault.name}: {why}")
    _drill(job, faults, report, scratch, keep=keep, as_json=as_json, refuse="all" not in words)


def _drill(
    job: DrillJob,
    faults: list[Any],
    report: Path | None,
    scratch: Path | None,
    *,
    keep: bool,
    as_json: bool,
    refuse: bool,
) -> None:
    from rich.console import Console

    from elastictrain.drill.exercise import Exercise
    from elastictrain.drill.report import as_document, print_table, save

    errors = Console(stderr=True, highlight=False)
    with scratch_folder(scratch) as folder, ending_all():
        exercise = Exercise(job, folder, tell=lambda text: errors.print(text, style="dim", markup=False), keep=keep)
        rows: list[Row] = [exercise.run(fault) for fault in faults]
        about = {
            "job": job.config.name,
            "steps": job.steps,
            "fault_after_step": job.fault_step,
            "snapshot_every_steps": job.snapshot_every_steps,
            "world_size": job.world_size,
        }
        saved = save(rows, about, report if report is not None else folder)
    if as_json:
        typer.echo(json.dumps(as_document(rows, about), indent=2))
    else:
        print_table(rows, _console())
        typer.echo(f"Saved: {saved[0]} and {saved[1].name}")
    failed = [row.fault for row in rows if row.verdict == "fails" or (refuse and row.verdict == "refused")]
    if failed:
        raise DrillFailedError(f"{len(failed)} of {len(rows)} drill(s) do not hold: {', '.join(failed)}")


@contextmanager
def scratch_folder(path: Path | None) -> Iterator[Path]:
    """The folder that the runs write into; without a report or a failed run in it, it goes again."""
    if path is not None:
        if path.exists() and any(path.iterdir()):
            raise UsageError(f"--scratch {path}: this folder is not empty", "Name a new one.")
        path.mkdir(parents=True, exist_ok=True)
        yield path.absolute()
        return
    made = Path(tempfile.mkdtemp(prefix="elastictrain-drill-"))
    try:
        yield made
    except BaseException:
        # The reference's own failure points to its output; anything else leaves nothing that is worth keeping.
        if not any(made.glob("reference*")):
            shutil.rmtree(made, ignore_errors=True)
        raise
    if not any(made.iterdir()):
        made.rmdir()


@contextmanager
def ending_all() -> Iterator[None]:
    """Whatever ends the drill, SIGTERM and Ctrl-C included, ends all that it has started."""
    from elastictrain.drill.trial import end_descendants
    from elastictrain.procs import adopt_orphans

    def interrupt(signum: int, _frame: Any) -> None:
        raise SystemExit(128 + signum)

    adopt_orphans()
    before = {signum: signal.signal(signum, interrupt) for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    try:
        yield
    finally:
        # A second Ctrl-C must not leave processes behind.
        for signum in before:
            signal.signal(signum, signal.SIG_IGN)
        end_descendants()
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _list(as_json: bool) -> None:
    from elastictrain.core.faults import TABLE

    if as_json:
        fields = [
            {"fault": f.name, "phase": f.phase.name.lower(), "expect": f.expect.value, "explanation": f.explanation}
            for f in TABLE
        ]
        typer.echo(json.dumps(fields, indent=2))
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("fault", "what happens", "the job then", "live"):
        table.add_column(name, no_wrap=name == "fault", overflow="fold")
    for f in TABLE:
        table.add_row(f.name, f.explanation, f.expect.value, "yes" if f.is_live else "")
    _console().print(table)


def _console() -> Console:
    """As wide as the terminal; where there is none, as wide as the table."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 200, highlight=False)
