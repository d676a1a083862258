"""Shows which machine runs a rehearsed script best."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rich.markup import escape
from rich.table import Table

from foretrace.simulator.search.render import amount
from foretrace.topologies.units import format_bytes, format_time
from foretrace.traces.console import stdout
from foretrace.traces.report.format import format_share

WIDE: Final = 120
"""Letters from which a line holds all figures."""

COSTS: Final = {"usd_per_1b_tokens": "$/1B tokens", "days": "days", "usd": "$ in all"}


def show_machines(said: Mapping[str, Any]) -> None:
    """Print what ``foretrace search --rehearsal --json`` says, for people."""
    rows = said["machines"]
    several = len({row["links"] for row in rows}) > 1
    console = stdout()
    is_wide = console.width >= WIDE
    costs = [name for name in COSTS if any(row[name] is not None for row in rows)][: None if is_wide else 1]
    table = Table(box=None, header_style="dim", pad_edge=False)
    for name in ("", "machine", *(["links"] if several else [])):
        table.add_column(name)
    speed = ["tokens/s/GPU"] if is_wide else []
    for name in ("step", "MFU", *speed, "exposed", "memory", *(COSTS[one] for one in costs)):
        table.add_column(name, justify="right", no_wrap=True)
    for number, row in enumerate(rows, 1):
        held = row["peak_memory_bytes"]
        memory = "-" if held is None else format_bytes(held)
        limit = "" if row["fits"] is not False else f" > {format_bytes(row['memory_limit_bytes'])}"
        table.add_row(
            str(number),
            escape(f"{row['gpus']} {row['cluster']}"),
            *([row["links"]] if several else []),
            format_time(row["step_time_s"]),
            "-" if row["mfu"] is None else format_share(row["mfu"]),
            *([_rate(row["tokens_per_s_per_gpu"])] if is_wide else []),
            format_share(row["exposed_comm_fraction"]),
            memory + limit,
            *(amount(row[one]) for one in costs),
        )
    console.print(table)
    for sentence in said["warnings"]:
        console.print(f"[yellow]![/] {escape(sentence)}", highlight=False)
    for sentence in said["left_out"]:
        console.print(f"left out: {sentence}", markup=False)


def _rate(tokens_per_s: float | None) -> str:
    return "-" if tokens_per_s is None else f"{tokens_per_s:,.0f}"
