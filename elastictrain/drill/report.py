"""The table of a drill: for a terminal, as JSON, as Markdown."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from elastictrain.drill.judge import Row
from elastictrain.errors import StateDirError

REPORT_JSON = "drill.json"
REPORT_MARKDOWN = "drill.md"
_COLUMNS = ("fault", "injected at", "detected", "recovered", "steps lost", "samples ±", "bitwise equal", "verdict")
_STYLES = {"holds": "bold green", "fails": "bold red", "refused": "yellow"}


def print_table(rows: Sequence[Row], console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in _COLUMNS:
        table.add_column(name, no_wrap=name == "fault", overflow="fold")
    for row in rows:
        cells = _cells(row)
        table.add_row(*(Text(cell) for cell in cells[:-1]), Text(cells[-1], style=_STYLES[row.verdict]))
    console.print(table)
    for row in rows:
        if row.why:
            console.print(Text.assemble((row.fault, "bold"), f": {row.why}"), soft_wrap=True)
        if row.folder:
            console.print(Text(f"    what is left of it: {row.folder}"), soft_wrap=True)


def _cells(row: Row) -> list[str]:
    samples = "–" if row.samples_repeated is None else f"+{row.samples_repeated} −{row.samples_skipped}"
    equal = "–" if row.bitwise_equal is None else "yes" if row.bitwise_equal else f"no: {row.difference}"
    lost = "–" if row.steps_lost is None else str(row.steps_lost)
    return [
        row.fault,
        row.injected_at or "–",
        _seconds(row.detected_s),
        _seconds(row.recovered_s),
        lost,
        samples,
        equal,
        row.verdict,
    ]


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} s"


def not_held(rows: Sequence[Row], asked: Collection[str]) -> list[str]:
    """The faults by which a drill as a whole does not hold.

    Args:
        rows: of all that was drilled.
        asked: faults that were asked for by name: these may not be refused. Of the others, which came with `all`, one
            that is refused is neither held nor failed.
    """
    return [row.fault for row in rows if row.verdict == "fails" or (row.verdict == "refused" and row.fault in asked)]


def as_document(
    rows: Sequence[Row], about: Mapping[str, Any], asked: Collection[str], *, not_run: Sequence[str] = ()
) -> dict[str, Any]:
    """What is saved as JSON: what was drilled, and a row per fault. Where `holds` is false, the exit code is not 0.

    Args:
        rows: of all that was drilled.
        about: what was drilled.
        asked: as in `not_held`.
        not_run: faults that were to follow: there is more to come, or the drill was interrupted.
    """
    named = {verdict: [row.fault for row in rows if row.verdict == verdict] for verdict in ("fails", "refused")}
    return {
        **about,
        "holds": not not_run and not not_held(rows, asked),
        **named,
        "not_run": list(not_run),
        "rows": [row.as_plain() for row in rows],
    }


def save(
    rows: Sequence[Row],
    about: Mapping[str, Any],
    asked: Collection[str],
    folder: Path,
    *,
    not_run: Sequence[str] = (),
) -> tuple[Path, Path]:
    """Writes both files, or writes them anew; returns their paths.

    Raises:
        StateDirError: the folder cannot be written.
    """
    files = {
        REPORT_JSON: json.dumps(as_document(rows, about, asked, not_run=not_run), indent=2) + "\n",
        REPORT_MARKDOWN: _markdown(rows, about, not_run),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            new = folder / f"{name}.new"  # whole or not at all, whenever somebody looks or the drill is killed
            new.write_text(text)
            new.replace(folder / name)
    except OSError as error:
        raise StateDirError(
            f"the report cannot be written to {folder}: {error.strerror}", "Use --report DIR."
        ) from error
    return folder / REPORT_JSON, folder / REPORT_MARKDOWN


def _markdown(rows: Sequence[Row], about: Mapping[str, Any], not_run: Sequence[str]) -> str:
    lines = [f"# Drill of {about['job']}", ""]
    lines += [f"- {key.replace('_', ' ')}: {value}" for key, value in about.items() if key != "job"]
    if not_run:
        lines.append(f"- not run: {', '.join(not_run)}")
    lines += ["", f"| {' | '.join(_COLUMNS)} | why |", "|" + "---|" * (len(_COLUMNS) + 1)]
    for row in rows:
        cells = [*_cells(row), row.why]
        lines.append(f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in cells)} |")
    return "\n".join(lines) + "\n"
