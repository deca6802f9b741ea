"""The status document on one screen."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_STYLES = {
    "training": "bold green",
    "completed": "bold green",
    "starting": "bold cyan",
    "stopping": "bold cyan",
    "draining": "bold cyan",
    "stopped": "bold",
    "drained": "bold",
    "recovering": "bold yellow",
    "halted": "bold red",
    "not_running": "bold red",
}
_MAX_RESTARTS = 5
_BAR_WIDTH = 30


def render(s: dict[str, Any]) -> RenderableType:
    """One job."""
    parts: list[RenderableType] = [_headline(s), _facts(s)]
    if s["nodes"]:
        parts.append(_nodes(s["nodes"]))
    if s["ranks"]:
        parts.append(_ranks(s["ranks"]))
    if s["restarts"]:
        parts.append(_restarts(s))
    return Group(*parts)


def render_list(documents: list[dict[str, Any]]) -> RenderableType:
    """All jobs, a line each."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("job", "state", "step", "rate", "ETA", "restarts", "goodput", "why"):
        table.add_column(name, overflow="fold" if name == "why" else "ellipsis")
    names = [s["job"] for s in documents]
    for s in documents:
        # A job that was tried by hand and then made a service has two state directories.
        where = f" ({s['state_dir']})" if names.count(s["job"]) > 1 else ""
        table.add_row(
            Text(s["job"] + where),
            _state(s),
            _step(s),
            _rate(s["steps_per_s"], "steps/s"),
            _duration(s["eta_s"]),
            str(s["num_restarts"]),
            _percent(s["goodput"]),
            Text(s["reason"]),
        )
    return table


def _headline(s: dict[str, Any]) -> Text:
    return Text.assemble((s["job"], "bold"), "  ", _state(s), "  ", s["reason"])


def _state(s: dict[str, Any]) -> Text:
    return Text(s["state"].replace("_", " "), style=_STYLES.get(s["state"], "bold"))


def _facts(s: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("step", Text("  ".join(filter(None, [_step(s), _bar(s)]))))
    rates = [
        _rate(s["steps_per_s"], "steps/s"),
        _rate(s["samples_per_s"], "samples/s"),
        _rate(s["tokens_per_s"], "tokens/s"),
    ]
    if loss := _number(s["loss"]):
        rates.insert(0, f"loss {loss}")
    if s["eta_s"] is not None:
        rates.append(f"ETA {_duration(s['eta_s'])}")
    table.add_row("progress", Text("  ".join(filter(None, rates)) or "–"))
    if s["evaluation"] is not None:
        values = "  ".join(f"{name} {_number(value)}" for name, value in s["evaluation"]["values"].items())
        table.add_row("evaluated", Text(f"{values}  at step {s['evaluation']['step']}"))
    group = f"incarnation {_or_dash(s['incarnation'])}, {_or_dash(s['world_size'])} rank(s)"
    if s["attempt"] is not None:
        group += f", attempt {s['attempt']}"
    table.add_row("group", Text(group))
    table.add_row("supervisor", _supervisor(s))
    table.add_row("snapshots", Text("  ".join(f"{tier}: {_snapshot(s, tier)}" for tier in ("memory", "durable"))))
    if (failing := s["snapshots"].get("store_error")) is not None:
        table.add_row("store", Text(f"fails for {_duration(failing['lasts_s'])}: {failing['error']}", style="yellow"))
    lost = f"{_duration(s['lost_s'])} in {s['num_restarts']} restart(s), {s['num_incidents']} incident(s)"
    table.add_row("lost", Text(f"{lost}; goodput {_percent(s['goodput'])} of {_duration(s['wall_s'])}"))
    journal = s["journal"]
    if journal["state"] != "ok" or journal["reason"]:
        style = "yellow" if journal["state"] != "ok" else ""
        dropped = f" ({journal['dropped']} events lost)" if journal["dropped"] else ""
        table.add_row("journal", Text(f"{journal['state']}: {journal['reason']}{dropped}", style=style))
    return table


def _supervisor(s: dict[str, Any]) -> Text:
    daemon = s["daemon"]
    if not s["daemon_running"]:
        was = f"; it was process {daemon['pid']}" if daemon["pid"] is not None else ""
        return Text(f"not running{was}. This is what its journal says.", style="yellow")
    who = f"process {_or_dash(daemon['pid'])}, version {daemon['version'] or '–'}"
    if not daemon["answers"]:
        return Text(f"{who}: does not answer. This is what its journal says.", style="yellow")
    heard = s["last_event_age_s"]
    return Text(who + (f", last event {_duration(heard)} ago" if heard is not None else ""))


def _nodes(nodes: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("node", "address", "is", "ranks", "heard", "why"):
        table.add_column(name, overflow="fold" if name == "why" else "ellipsis")
    for n in nodes:
        first, num = n["first_rank"], n["num_ranks"]
        ranks = "–" if first is None else f"{first}" if num == 1 else f"{first}–{first + num - 1}"
        style = {"silent": "red", "running": "green", "done": "green"}.get(n["standing"], "")
        table.add_row(
            Text(n["host"]),
            Text(n["address"]),
            Text(n["standing"], style=style),
            ranks,
            "here" if n["is_me"] else _duration(n["heard_s"]),
            Text(n["reason"]),
        )
    return table


def _ranks(ranks: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("rank", "pid", "host", "phase", "for", "step", "heard", "CPU", "memory", "device"):
        table.add_column(name, justify="right" if name in ("rank", "pid", "for", "step", "heard", "CPU") else "left")
    for r in ranks:
        cpu = f"{r['cpu_percent']:.0f} %" if r["cpu_percent"] is not None else "–"
        table.add_row(
            str(r["rank"]),
            _or_dash(r["pid"]),
            Text(r["host"]),
            Text(r["phase"]),
            _duration(r["phase_s"]),
            _or_dash(r["step"]),
            _duration(r["heartbeat_age_s"]),
            cpu,
            _memory(r),
            Text(r["device"]),
        )
    return table


def _memory(r: dict[str, Any]) -> str:
    host = _size(r["memory_bytes"])
    return f"{host} + {_size(r['device_bytes'])}" if r.get("device_bytes") else host


def _lost(r: dict[str, Any]) -> str:
    if r.get("steps_lost") is None:
        return _duration(r["lost_s"])
    num = r["steps_lost"]
    steps = f"{num} step{'' if num == 1 else 's'}"
    if r.get("kept_step") is None and num:
        steps += " (the last regular snapshot counts)"
    return f"{steps}, {_duration(r['lost_s'])}"


def _restarts(s: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("restart", "ended", "step", "lost", "cause"):
        table.add_column(name, overflow="fold" if name == "cause" else "ellipsis")
    shown = s["restarts"][-_MAX_RESTARTS:]
    for r in shown:
        resumed = f" → {r['resumed_step']}" if r["resumed_step"] is not None else ""
        table.add_row(
            f"after {_or_dash(r['incarnation'])}",
            r["time"].replace("T", " ")[:19],
            f"{_or_dash(r['global_step'])}{resumed}",
            _lost(r),
            Text(r["cause"]),
        )
    return table


def _step(s: dict[str, Any]) -> str:
    if s["global_step"] is None:
        return "–"
    return f"{s['global_step']:,}" + (f" / {s['max_steps']:,}" if s["max_steps"] is not None else "")


def _bar(s: dict[str, Any]) -> str:
    if s["global_step"] is None or not s["max_steps"]:
        return ""
    share = min(1.0, s["global_step"] / s["max_steps"])
    full = int(share * _BAR_WIDTH)
    return "━" * full + "╌" * (_BAR_WIDTH - full) + f" {share:.1%}"


def _snapshot(s: dict[str, Any], tier: str) -> str:
    snapshot = s["snapshots"][tier]
    return "–" if snapshot is None else f"step {snapshot['step']:,}, {_duration(snapshot['age_s'])} ago"


def _rate(value: Any, unit: str) -> str:
    if value is None:
        return ""
    return f"{value:,.2f} {unit}" if isinstance(value, int | float) else f"{value} {unit}"


def _number(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _or_dash(value: Any) -> str:
    return "–" if value is None else str(value)


def _size(value: int | None) -> str:
    return "–" if value is None else f"{value / 2**20:,.0f} MiB"


def _duration(seconds: float | None) -> str:
    """Such as 0.3 s, 12 s, 4 min 10 s, 3 h 05 min, 2 d 4 h."""
    if seconds is None:
        return "–"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"
