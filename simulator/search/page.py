"""The page of a search: the layouts that are listed, and the front of all that were considered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from foretrace.simulator.search.space import Space
from foretrace.simulator.search.ties import difference
from foretrace.topologies.units import format_time
from foretrace.traces.report.sweep import write_sweep

SHOWN_PARTS: Final = 4
"""Parts of a waterfall that a sentence holds."""


def write_page(path: str, said: Mapping[str, Any], spaces: Sequence[Space]) -> None:
    """Write the page of what a search said.

    Args:
        path: file to write, whole or not at all.
        said: ``layouts``, best first; ``front``, the fastest for every amount of memory; and what is counted.
        spaces: that were searched.

    Raises:
        ReportError: the file cannot be written.
    """
    listed = [_row(one, number) for number, one in enumerate(said["layouts"], 1)]
    names = [_layout(one) for one in said["layouts"]]
    rows = [*listed, *(_row(one, None) for one in said["front"] if _layout(one) not in names)]
    machines = ", ".join(f"{space.cluster.n_gpus} × {space.cluster.name}" for space in spaces)
    write_sweep(path, rows, title=f"{spaces[0].model.name} on {machines}", notes=_notes(said))


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
