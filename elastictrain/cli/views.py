"""What a running job looks like: a live table on a terminal, plain lines elsewhere, or the JSON as it comes."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from elastictrain.core.events import STAMPS
from elastictrain.logs import finite
from elastictrain.supervisor.output import Event, Line, Printed


class Output(StrEnum):
    """How `run` talks."""

    AUTO = "auto"
    """pretty on a terminal, json elsewhere"""
    PRETTY = "pretty"
    """for people: live where the terminal can, else a line per report"""
    JSON = "json"
    """one JSON object per event"""


class View(Protocol):
    """Shows the lines of a run as they come, and its summary."""

    def __enter__(self) -> View: ...

    def __exit__(self, *exc: object) -> None: ...

    def show(self, line: Line) -> None: ...

    def summary(self, outcome: dict[str, Any], state_dir: str) -> None: ...


class JsonView:
    """Passes events through; prints of the user become events.

    Args:
        log_printed: takes a print, and the number of its incarnation.
        log_summary: takes the summary.
        incarnation: the first.
        stdout: where to.
    """

    def __init__(
        self,
        log_printed: Callable[[str, int], None],
        log_summary: Callable[[dict[str, Any]], None],
        incarnation: int,
        stdout: TextIO,
    ) -> None:
        self._stdout = stdout
        self._incarnation = incarnation
        self._log_printed = log_printed
        self._log_summary = log_summary

    def __enter__(self) -> JsonView:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def show(self, line: Line) -> None:
        if isinstance(line, Event):
            import json

            self._incarnation = line.fields.get("incarnation", self._incarnation)
            self._stdout.write(json.dumps(finite(line.fields)) + "\n")
            self._stdout.flush()
        else:
            self._log_printed(line.text, self._incarnation)

    def summary(self, outcome: dict[str, Any], state_dir: str) -> None:
        self._log_summary(finite({**outcome["summary"], "state_dir": state_dir}))


class PrettyView:
    """A live view on a terminal; a line per report where there is none.

    Args:
        console: where to.
        job_name: for the title.
    """

    def __init__(self, console: Console, job_name: str) -> None:
        self._console = console
        self._job_name = job_name
        self._is_live = console.is_terminal
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeRemainingColumn(),
            console=console,
        )
        self._bar = self._progress.add_task(job_name, total=None)
        self._live = Live(self._progress, console=console, refresh_per_second=8, transient=True, redirect_stdout=False)
        self._last_eval: dict[str, Any] = {}

    def __enter__(self) -> PrettyView:
        if self._is_live:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._is_live:
            self._live.stop()

    def show(self, line: Line) -> None:
        if isinstance(line, Printed):
            self._print(Text(line.text, style="dim"))
            return
        try:
            self._show_event(line)
        except (KeyError, TypeError, ValueError):  # a program of the user's may print what looks like an event of ours
            self._print(Text(_generic_line(line.fields), style="dim"))

    def _show_event(self, event: Event) -> None:
        fields = event.fields
        match event.name:
            case "training_started":
                if fields["rank"] == 0:
                    self._print(_started_line(fields))
                    self._progress.update(self._bar, total=fields["max_steps"])
            case "progress":
                self._progress.update(self._bar, completed=fields["step"], total=fields["max_steps"])
                if self._is_live:
                    self._live.update(Panel(Group(self._table(fields), self._progress), title=self._job_name))
                else:
                    self._print(_report_line(fields))
            case "evaluated":
                self._last_eval = _eval_values(fields)
                values = "  ".join(f"{name} {value:.4f}" for name, value in self._last_eval.items())
                self._print(Text(f"step {fields['step']:>6}  evaluated: {values}", style="cyan"))
            case "advice":
                self._print(Text(f"advice: {fields['what']}. {fields['hint']}", style="yellow"))
            case "incident_opened":
                ranks = ", ".join(map(str, fields["ranks"]))
                self._print(Text(f"rank {ranks} hangs: {fields['why']}; evidence: {fields['folder']}", style="red"))
            case "incarnation_ended":
                self._print(Text(f"step {fields['global_step']:>6}  {fields['cause']}", style="red"))
            case "restart_planned":
                when = f"in {fields['delay_s']:.1f} s" if fields["delay_s"] else "now"
                self._print(Text(f"starting again {when}, from the newest snapshot", style="yellow"))
            case "training_ended" | "rank_failed" | "rank_killed" | "halted":
                pass  # the summary, the error, or another line says it
            case _:
                style = {"warning": "yellow", "error": "red"}.get(fields.get("level", ""), "")
                self._print(Text(_generic_line(fields), style=style))

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=not self._is_live)

    def _table(self, f: dict[str, Any]) -> Table:
        table = Table.grid(padding=(0, 3), expand=True)
        for _ in range(4):
            table.add_column()
        tokens = f"{f['tokens_per_s']:,.0f} tokens/s" if f["tokens_per_s"] is not None else ""
        time = f["time_shares"]
        table.add_row(
            f"loss [bold]{f['loss']:.4f}",
            f"{f['samples_per_s']:,.1f} samples/s",
            tokens,
            f"{f['steps_per_s']:,.2f} steps/s",
        )
        table.add_row(f"lr {f['lr']:.3g}", f"grad norm {_number(f['grad_norm'])}", _skipped(f), _memory(f))
        table.add_row(
            f"data {time['data']:.0%}",
            f"compute {time['compute']:.0%}",
            f"reduce {time['reduce']:.0%}",
            f"other {time['other']:.0%}",
        )
        if self._last_eval:
            table.add_row(*[f"{name} {value:.4f}" for name, value in list(self._last_eval.items())[:4]])
        return table

    def summary(self, outcome: dict[str, Any], state_dir: str) -> None:
        s = outcome["summary"]
        table = Table(title=f"{self._job_name}: {outcome['reason']}", show_header=False, title_justify="left")
        table.add_column(style="bold")
        table.add_column()
        counters = s["counters"]
        table.add_row("steps", f"{s['step']} of {s['max_steps']} ({s['epochs']:.2f} epochs)")
        table.add_row("updates", f"{counters['applied']} applied, {counters['skipped']} skipped")
        if s["last_loss"] is not None:
            table.add_row("loss, last step", f"{s['last_loss']:.4f}")
        for name, value in s["evaluation"].items():
            table.add_row(name, f"{value:.4f}")
        stepping_s = max(s["stepping_s"], 1e-9)
        table.add_row("samples/s", f"{s['num_samples'] / stepping_s:,.1f}")
        if s["num_tokens"] is not None:
            table.add_row("tokens/s", f"{s['num_tokens'] / stepping_s:,.0f}")
        total_s = max(s["data_s"] + s["compute_s"] + s["reduce_s"] + s["other_s"], 1e-9)
        shares = ", ".join(f"{k} {s[f'{k}_s'] / total_s:.1%}" for k in ("data", "compute", "reduce", "other"))
        table.add_row("time", f"{s['wall_s']:.1f} s; stepping: {shares}")
        table.add_row("peak memory", f"{s['peak_memory_bytes'] / 2**20:,.0f} MiB per rank")
        table.add_row("ranks", f"{s['world_size']} × {s['device']}, {s['precision']}")
        table.add_row("written to", state_dir)
        self._console.print(table)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _skipped(f: dict[str, Any]) -> str:
    scale = f"  scale {f['loss_scale']:g}" if "loss_scale" in f else ""
    return f"skipped {f['skipped']}{scale}"


def _memory(f: dict[str, Any]) -> str:
    return f"{f['peak_memory_bytes'] / 2**20:,.0f} MiB"


def _started_line(f: dict[str, Any]) -> Text:
    return Text(
        f"{f['parameters']:,} parameters, {f['samples']:,} samples, {f['world_size']} rank(s) on {f['device']}, "
        f"{f['precision']}, global batch {f['global_batch_size']} in microbatches of {f['micro_batch_size']}"
    )


def _report_line(f: dict[str, Any]) -> Text:
    tokens = f"  {f['tokens_per_s']:>8,.0f} tokens/s" if f["tokens_per_s"] is not None else ""
    time = f["time_shares"]
    shares = " ".join(f"{k} {time[k]:.0%}" for k in ("data", "compute", "reduce", "other"))
    return Text(
        f"step {f['step']:>6}/{f['max_steps']}  loss {f['loss']:.4f}  {f['samples_per_s']:>7,.1f} samples/s{tokens}  "
        f"lr {f['lr']:.3g}  grad norm {_number(f['grad_norm'])}  {_skipped(f)}  {shares}  {_memory(f)}"
    )


def _eval_values(f: dict[str, Any]) -> dict[str, float]:
    return {key: value for key, value in f.items() if key not in STAMPS}


def _generic_line(f: dict[str, Any]) -> str:
    rest = "  ".join(f"{key}={value}" for key, value in f.items() if key not in STAMPS)
    who = f"rank {f['rank']}" if "rank" in f else "supervisor"
    return f"{who}: {f['event'].replace('_', ' ')}  {rest}"
