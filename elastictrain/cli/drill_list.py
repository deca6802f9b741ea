"""`elastictrain drill list`: every fault, what happens and what must follow."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console


def show_list(*, as_json: bool) -> None:
    """Prints all faults."""
    from elastictrain.core.fault_table import TABLE
    from elastictrain.core.node_faults import NODE_TABLE

    if as_json:
        fields: list[dict[str, Any]] = [
            {"fault": f.name, "phase": f.phase.name.lower(), "expect": f.expect.value, "explanation": f.explanation}
            for f in TABLE
        ]
        # These happen to a node between two steps: in no phase of a rank's.
        fields += [
            {"fault": f.name, "phase": None, "nodes": f.num_nodes, "expect": f.expect, "explanation": f.explanation}
            for f in NODE_TABLE
        ]
        typer.echo(json.dumps(fields, indent=2))
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("fault", "what happens", "the job then", "live"):
        table.add_column(name, no_wrap=name == "fault", overflow="fold")
    for f in TABLE:
        table.add_row(f.name, f.explanation, f.expect.value, "yes" if f.is_live else "")
    table.add_section()
    table.add_row("several nodes", "Network namespaces on this machine (root, util-linux, iproute2); see --nodes.")
    for each in NODE_TABLE:
        table.add_row(each.name, each.explanation, each.expect, "")
    wide_console().print(table)


def wide_console() -> Console:
    """As wide as the terminal; where there is none, as wide as the table."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 200, highlight=False)
