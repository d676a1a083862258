"""What all figures share: colours, fonts, hatches, and which ranks are drawn."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import plotly.graph_objects as go

from foretrace.traces.analysis.metrics import typical_step
from foretrace.traces.analysis.windows import windows
from foretrace.traces.errors import FigureError
from foretrace.traces.info import rank_list
from foretrace.traces.report.kinds import fill, mix, palette
from foretrace.traces.report.rows import picks, rows_of
from foretrace.traces.run import Run

_FONT: Final = 'system-ui, "Segoe UI", "DejaVu Sans", sans-serif'


def chosen_ranks(run: Run, ranks: Sequence[int] | None) -> list[int]:
    """Return the stored ranks to draw."""
    stored = set(run.stored_ranks)
    if ranks is None:
        return [rank for rank in picks(run)[0] if rank in stored]
    if unknown := [rank for rank in ranks if rank not in stored]:
        raise FigureError(f"rank {unknown[0]} is not stored; {run.path} has {rank_list(stored)}")
    return list(ranks)


def chosen_step(run: Run, step: int | None) -> int:
    """Return the step to draw: the one of median length if *step* is None."""
    chosen = typical_step(run)[0] if step is None else step
    steps = {window.step for window in windows(run)}
    if chosen not in steps:
        raise FigureError(f"step {chosen}: {run.path} has steps {', '.join(map(str, sorted(steps)))}")
    return chosen


def row_names(run: Run) -> dict[int, str]:
    """Return the name of each stored rank's row, no two alike: plotly draws rows of one name as one."""
    names = {entry["rank"]: entry["label"] for entry in rows_of(run, run.stored_ranks).entries}
    times = Counter(names.values())
    return {rank: name if times[name] == 1 else f"{name} (rank {rank})" for rank, name in names.items()}


def heading(first: str, second: str) -> str:
    """Return a heading of two lines; what comes from a run is escaped, plotly reads markup."""
    return f"{html.escape(first)}<br><sub>{html.escape(second)}</sub>"


def marker(entry: Mapping[str, Any], theme: str) -> dict[str, Any]:
    """Return plotly's marker for a kind."""
    look = fill(entry, palette(), theme)
    found: dict[str, Any] = {"color": look.colour, "line": {"width": 0 if look.hatch else 0.6}}
    found["line"]["color"] = mix(look.colour, "#000000", 0.3)  # of the ground it would take area from the bar
    if look.hatch:
        found["pattern"] = {"shape": look.hatch, "fgcolor": look.line, "size": 6, "solidity": 0.2}
    return found


def lay_out(figure: go.Figure, rows: Sequence[str]) -> None:
    """Have the bars of *figure* lie over each other on *rows*, the first at the top, over time in ms."""
    figure.update_layout(barmode="overlay", xaxis_title="ms")
    figure.update_yaxes(autorange="reversed", categoryorder="array", categoryarray=list(rows))


def empty_figure(title: str, theme: str, *, height: int) -> go.Figure:
    """Return an empty figure in the colours of *theme*."""
    colours = palette()
    if theme not in ("light", "dark"):
        raise FigureError(f"theme {theme!r}: one of light, dark")
    surface = colours[theme]["surface"]
    figure = go.Figure()
    figure.update_layout(
        title={"text": title, "x": 0, "xref": "paper"},
        height=height,
        margin={"l": 90, "r": 24, "t": 64, "b": 96},
        paper_bgcolor=surface["bg"],
        plot_bgcolor=surface["bg"],
        font={"family": _FONT, "size": 12.5, "color": surface["ink"]},
        legend={"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "traceorder": "normal"},
    )
    figure.update_xaxes(gridcolor=surface["grid"], zeroline=False)
    figure.update_yaxes(showgrid=False)
    return figure
