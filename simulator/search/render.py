"""Shows the layouts that a search has found: a table, why another loses, and what if."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from foretrace.simulator import energy
from foretrace.simulator.search.describe import conventions_line, difference
from foretrace.simulator.search.space import Space
from foretrace.topologies.units import format_bytes, format_time
from foretrace.traces.console import stdout
from foretrace.traces.report.format import format_share
from foretrace.traces.report.html import sweep_html

BAR: Final = 30
"""Letters that the longest bar of a waterfall takes."""

WIDE: Final = 120
"""Letters from which a line holds intervals and all that a budget gives."""

ROOMY: Final = 100
"""Letters from which a line holds schedule and states beside the degrees."""

_BUDGETS: Final = {"days": "days", "usd": "$ in all", "usd_per_1b_tokens": "$/1B"}
"""Figures of money and time, those of a number of tokens first: a narrow line has room for two."""


def show(said: Mapping[str, Any]) -> None:
    """Print what ``foretrace search --json`` says, for people."""
    console, layouts = stdout(), said["layouts"]
    if said["machines"]:
        console.print(_machines(said["machines"]))
        console.print()
    console.print(_table(layouts, several=len(said["machines"]) > 1))
    console.print(
        f"{said['n_candidates']:,} layouts considered; {said['n_pipelines_run']:,} pipelines run, "
        f"{said['n_simulated']:,} simulated whole, {said['n_too_large']:,} of those looked at do not fit"
    )
    if said["interrupted"]:
        console.print("interrupted: these are the best that had been simulated; others may be better")
    conventions = said["conventions"]
    line = conventions_line(conventions["framework"], conventions["step_time_s"])
    console.print(line, markup=False)
    for line in said["prices"]:
        console.print(line, markup=False)
    console.print(_energy(layouts[0]), markup=False)
    if any(one["tied"] for one in layouts[1:]):
        console.print(f"= tied with the best: {difference().words}", markup=False)
    if said["why_not"]["parts"]:
        _waterfall(console, said["why_not"], layouts)
    for one in said["what_if"]:
        console.print(_what_if(one), markup=False)
    if said["file"]:
        console.print(f"run: foretrace simulate {said['file']}", markup=False)
    if said["report"]:
        console.print(f"page: {said['report']}", markup=False)


def _energy(best: Mapping[str, Any]) -> str:
    """Return the energy of the best layout, or that nobody knows it."""
    if (found := best["energy"]) is None:
        return energy.unknown(best["cluster"])
    return f"energy of 1: {energy.line(found)}"


def _machines(machines: Sequence[Mapping[str, Any]]) -> Table:
    """Return the best layout of each machine, and whether the budget pays for it."""
    best = [one["best"] for one in machines if one["best"]]
    extra = [name for name in _BUDGETS if any(one[name] is not None for one in best)]
    table = Table(box=None, header_style="dim", pad_edge=False, title="the best of each machine")
    table.title_justify = "left"
    for name in ("machine", "layout", "data parallel"):
        table.add_column(name, overflow="fold")
    for name in ("step", "MFU", *(_BUDGETS[one] for one in extra), ""):
        table.add_column(name, justify="right", no_wrap=True)
    for machine in machines:
        name, one = escape(f"{machine['gpus']} {machine['cluster']}"), machine["best"]
        if one is None:
            table.add_row(name, "nothing fits")
            continue
        table.add_row(
            name,
            _degrees(one),
            _states(one),
            format_time(one["step_time_s"]),
            format_share(one["mfu"]),
            *(amount(one[name]) for name in extra),
            "over budget" if machine["within_budget"] is False else "",
        )
    return table


def _table(layouts: Sequence[Mapping[str, Any]], *, several: bool) -> Table:
    """Return the layouts, each with its machine if *several* compete.

    Where a line is too short for all of it, schedule and states stand below the degrees.
    """
    width = stdout().width
    wide, narrow = width >= WIDE, width < ROOMY
    extra = [name for name in _BUDGETS if any(one[name] is not None for one in layouts)]
    # A narrow line has room for two of them.
    extra = extra[: None if wide else 2]
    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column("", justify="right", no_wrap=True)
    words = ["layout", "batch", *([] if narrow else ["schedule", "data parallel"])]
    for name in (*(["machine"] if several else []), *words):
        table.add_column(name, overflow="fold", no_wrap=name in ("batch", "schedule"))
    for name in ("step", *(["likely"] if wide else []), "MFU", "memory", *(_BUDGETS[one] for one in extra)):
        table.add_column(name, justify="right", no_wrap=True)
    for number, one in enumerate(layouts, 1):
        below = f"\n[dim]{f'{_schedule(one)}, {_states(one)}'.removeprefix('-, ')}[/dim]" if narrow else ""
        table.add_row(
            f"{'=' if one['tied'] and len(layouts) > 1 else ''}{number}",
            *([escape(f"{one['gpus']} {one['cluster']}")] if several else []),
            _degrees(one) + below,
            f"{one['micro_batch']}×{one['n_microbatches']}",
            *([] if narrow else [_schedule(one), _states(one)]),
            format_time(one["step_time_s"]),
            *([_likely(one["step_time_interval_s"])] if wide else []),
            format_share(one["mfu"]),
            format_bytes(one["peak_memory_bytes"]),
            *(amount(one[name]) for name in extra),
        )
    return table


def amount(value: float | None) -> str:
    """Return days or dollars with three digits, millions as such.

    >>> amount(5_483_000.0), amount(14_400.0), amount(61.99), amount(None)
    ('5.48 M', '14,400', '62', '?')
    """
    if value is None:
        return "?"
    if value >= 1e6:
        return f"{value / 1e6:,.3g} M"
    return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def _degrees(one: Mapping[str, Any]) -> str:
    named = [f"{axis}{one[axis]}" for axis in ("tp", "cp", "pp", "dp", "ep") if one[axis] > 1]
    if one["expert_tp"] is not None:
        named.append(f"etp{one['expert_tp']}")
    if one["across_nodes"]:
        named.append(f"({', '.join(one['across_nodes'])} across nodes)")
    return " ".join(named) or "-"


def _states(one: Mapping[str, Any]) -> str:
    recompute = "" if one["recompute"] == "none" else f", {one['recompute']} recompute"
    of_layers = f" of {one['offload_layers']} layers" if one["offload_layers"] else ""
    offload = "" if one["offload"] == "none" else f", {one['offload']}{of_layers} offloaded"
    return f"{one['sharding']}{recompute}{offload}"


def _likely(interval: Sequence[float] | None) -> str:
    """Return where the step time is likely to lie, in the unit of the lower end."""
    return "" if interval is None else "-".join(f"{end:.3g}" for end in interval)


def _schedule(one: Mapping[str, Any]) -> str:
    if one["pp"] == 1:
        return "-"
    return f"{one['schedule']} ×{one['virtual_stages']}" if one["virtual_stages"] else str(one["schedule"])


def _waterfall(console: Console, why: Mapping[str, Any], layouts: Sequence[Mapping[str, Any]]) -> None:
    """Print where a layout loses its time to the best, as bars that go on where the one before ended."""
    at, parts = why["layout"], why["parts"]
    best = layouts[0]["step_time_s"]
    same = layouts[at - 1]["step_time_s"] == best
    console.print(
        f"{at} takes as long as 1, {format_time(best)}:"
        if same
        else f"why {at} loses to 1, {format_time(best)}:"
    )
    # Less than a thousandth of a step is no cause.
    shown = [part for part in parts if abs(part["seconds"]) >= 1e-3 * best]
    scale = max((abs(part["seconds"]) for part in shown), default=1.0)
    total = best
    for part in shown:
        total += part["seconds"]
        # Something that counts has one letter at least.
        bar = ("+" if part["seconds"] > 0 else "-") * max(round(BAR * abs(part["seconds"]) / scale), 1)
        console.print(
            f"  {part['cause'].replace(':', ' '):<16} {part['seconds']:>+9.3g} s  {bar}", markup=False
        )
    console.print(
        f"  {'together':<16} {layouts[at - 1]['step_time_s'] - best:>+9.3g} s  {format_time(total)}"
    )


def _what_if(one: Mapping[str, Any]) -> str:
    best, kept = one["best"], one["kept"]
    lead = f"if {one['what']}: "
    if one["same"]:
        return f"{lead}the same layout, {format_time(best['step_time_s'])} a step"
    slower = kept["step_time_s"] / best["step_time_s"] - 1 if kept else None
    loses = (
        ""
        if slower is None
        else f"; the one above takes {format_time(kept['step_time_s'])}, {format_share(slower, '+.1f')}"
    )
    batch = f"{best['micro_batch']}×{best['n_microbatches']}"
    layout = [part for part in (_degrees(best), batch, _schedule(best), _states(best)) if part != "-"]
    return f"{lead}{', '.join(layout)}: {format_time(best['step_time_s'])} a step{loses}"


# The page of a search: the layouts that are listed, and the front of all that were considered.

SHOWN_PARTS: Final = 4
"""Parts of a waterfall that a sentence holds."""


def page(said: Mapping[str, Any], spaces: Sequence[Space]) -> str:
    """Return the page of what a search said.

    *said*: ``layouts``, best first; ``front``, the fastest for every amount of memory; and what is counted.
    """
    listed = [_row(one, number) for number, one in enumerate(said["layouts"], 1)]
    names = [_layout(one) for one in said["layouts"]]
    rows = [*listed, *(_row(one, None) for one in said["front"] if _layout(one) not in names)]
    machines = ", ".join(f"{space.cluster.n_gpus} × {space.cluster.name}" for space in spaces)
    return sweep_html(rows, title=f"{spaces[0].model.name} on {machines}", notes=_notes(said))


def _row(one: Mapping[str, Any], rank: int | None) -> dict[str, Any]:
    """Return a row of the page; *rank* is its place in the list, None if it is on the front alone.

    Without a pipeline nothing is scheduled.
    """
    own = {"rank": rank, "tied": "with the best" if one.get("tied") else None}
    return {**one, **own, "schedule": one["schedule"] if one["pp"] > 1 else None}


def _layout(one: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what tells a layout from all others."""
    settings = (
        *("micro_batch", "schedule", "virtual_stages", "sharding", "recompute", "offload"),
        "offload_layers",
    )
    return (one["name"], *(one[name] for name in settings))


def _notes(said: Mapping[str, Any]) -> list[str]:
    """Return the sentences below the title."""
    layouts = said["layouts"]
    notes = [
        f"{said['n_candidates']:,} layouts considered, {said['n_simulated']:,} of them simulated in full.",
        f"Shown: the {len(layouts)} best, and the Pareto front of speed against memory over all layouts.",
    ]
    if any(one["tied"] for one in layouts[1:]):
        notes.append(f"Tied with the best: {difference().words}.")
    # Less than a nanosecond is rounding.
    parts = [part for part in said["why_not"]["parts"] if round(part["seconds"], 9)][:SHOWN_PARTS]
    if parts:
        at = said["why_not"]["layout"]
        slower = layouts[at - 1]["step_time_s"] - layouts[0]["step_time_s"]
        causes = ", ".join(f"{_signed(part['seconds'])} {part['cause'].replace(':', ' ')}" for part in parts)
        lead = (
            f"Layout {at} takes {format_time(slower)} longer per step than layout 1"
            if slower
            else f"Layout {at} takes as long as layout 1"
        )
        notes.append(f"{lead}: {causes}.")
    return notes


def _signed(seconds: float) -> str:
    """Return a difference of times with its sign."""
    return f"{'−' if seconds < 0 else '+'}{format_time(abs(seconds))}"
