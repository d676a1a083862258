"""Figures of one run over time: its schedule, what a step is made of, its memory."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import plotly.graph_objects as go

from foretrace.traces.analysis.windows import windows
from foretrace.traces.compare import typical_step
from foretrace.traces.errors import FigureError
from foretrace.traces.figures.drawing import chosen_ranks, empty_figure, heading, marker, row_names
from foretrace.traces.report.cells import RankStep, rank_step
from foretrace.traces.report.colours import palette
from foretrace.traces.report.format import format_si
from foretrace.traces.report.kinds import Kinds
from foretrace.traces.report.labels import Labels
from foretrace.traces.report.memory import curves
from foretrace.traces.report.naming import subtitle, title
from foretrace.traces.report.words import memory_limit_bytes
from foretrace.traces.run import Run

MOST_CELLS: Final = 3_000
"""Cells of a schedule; with 10,000 a zoom takes plotly about a second."""

_PLACES: Final = {"row": (-0.4, 0.8), "upper": (-0.4, 0.4), "lower": (0.0, 0.4)}
"""Top and height of a cell, in rows, from the middle of its row."""

_SHORT_GAP: Final = 1 / 100
"""Share of the step; a shorter gap within one pass over a micro-batch is drawn as part of the pass."""


class _Cell(NamedTuple):
    """One pass over a micro-batch, or one gap; times from the start of the step.

    Of two passes that take turns, one is drawn in the upper half of the row and one in the lower.
    """

    kind: int
    microbatch: int
    start_ns: int
    end_ns: int
    part: str = "row"


class _Row(NamedTuple):
    """One row of a figure: what it is called and what its rank does."""

    label: str
    done: RankStep


def schedule(
    run: Run, *, step: int | None = None, ranks: Sequence[int] | None = None, theme: str = "light"
) -> go.Figure:
    """Draw what each rank does over one step: a bar per pass over a micro-batch, hatched where it waits.

    Args:
        run: the run.
        step: optimizer step; None: the one of median length.
        ranks: stored ranks to draw; None: all, or the first pipeline where there are too many for a screen.
        theme: ``"light"`` or ``"dark"``.

    Raises:
        FigureError: no such rank, step or theme; or more cells than a figure can hold.
        RunError: the run has no step with a length.
    """
    kinds, rows, origin_ns = _rows(run, step, ranks)
    cells = [(row.label, cell) for row in rows for cell in _passes(row.done, origin_ns)]
    if len(cells) > MOST_CELLS:
        raise FigureError(
            f"{len(cells):,} cells, and a figure holds {MOST_CELLS:,}; give fewer ranks, "
            "or draw the report, which has no limit: report_html(run)"
        )
    figure = empty_figure(heading(title(run), subtitle(run)), theme, height=180 + 46 * len(rows))
    for kind in sorted({cell.kind for _, cell in cells}):
        ours = [(row, cell) for row, cell in cells if cell.kind == kind]
        _add_cells(figure, kinds.entries[kind], ours, theme)
    figure.update_layout(barmode="overlay", xaxis_title="ms", uniformtext={"minsize": 8, "mode": "hide"})
    figure.update_yaxes(
        autorange="reversed", categoryorder="array", categoryarray=[row.label for row in rows]
    )
    return figure


def breakdown(
    run: Run, *, step: int | None = None, ranks: Sequence[int] | None = None, theme: str = "light"
) -> go.Figure:
    """Draw what one step is made of on each rank: stacked bars that add up to 100 %.

    Arguments and errors as for ``schedule``.
    """
    kinds, rows, _ = _rows(run, step, ranks)
    shares = [dict(row.done.parts_ns()) for row in rows]
    figure = empty_figure(heading("Where the step goes", title(run)), theme, height=180 + 34 * len(rows))
    for kind in sorted({kind for share in shares for kind in share}):
        values = [100 * share.get(kind, 0) / sum(share.values()) for share in shares]
        figure.add_bar(
            y=[row.label for row in rows],
            x=values,
            orientation="h",
            name=kinds.entries[kind]["label"],
            marker=marker(kinds.entries[kind], theme),
            hovertemplate="%{y}: %{x:.1f} %<extra>" + kinds.entries[kind]["label"] + "</extra>",
        )
    figure.update_layout(barmode="stack", xaxis={"title": "% of the step", "range": [0, 100]})
    figure.update_yaxes(autorange="reversed")
    return figure


def memory(run: Run, *, ranks: Sequence[int] | None = None, theme: str = "light") -> go.Figure:
    """Draw the memory that each rank holds over time, against what the device has.

    Raises:
        FigureError: the run has no memory over time, no such rank, or the theme is unknown.
    """
    found = curves(run, chosen_ranks(run, ranks))
    if not found:
        raise FigureError(f"{run.path} holds no memory over time; simulate, or record with memory on")
    figure = empty_figure(heading("Memory", title(run)), theme, height=420)
    names = row_names(run)
    series = palette()[theme]["series"]
    for number, curve in enumerate(found):
        figure.add_scatter(
            x=curve.t_ns / 1e6,
            y=curve.total_bytes / 1e9,
            name=f"{names[curve.rank]}, peak {format_si(float(curve.total_bytes.max()), 'B')}",
            mode="lines",
            line={"shape": "hv", "color": series[number % len(series)], "width": 2},
        )
    if limit := memory_limit_bytes(run):
        colour = palette()[theme]["surface"]["limit"]
        figure.add_hline(y=limit / 1e9, line={"color": colour, "dash": "dash"})
        figure.add_annotation(
            x=0, y=limit / 1e9, xref="paper", xanchor="left", yanchor="bottom", showarrow=False,
            text=f"device limit {format_si(limit, 'B')}", font={"color": colour},
        )  # fmt: skip
    figure.update_layout(xaxis_title="ms", yaxis={"title": "GB", "rangemode": "tozero"})
    return figure


def _rows(run: Run, step: int | None, ranks: Sequence[int] | None) -> tuple[Kinds, list[_Row], int]:
    """Return the kinds of *run*, its rows in *step*, and the start of the step."""
    kinds = Kinds((run,))
    labels = Labels(kinds)
    chosen = typical_step(run)[0] if step is None else step
    ends = [window for window in windows(run) if window.step == chosen]
    if not ends:
        steps = ", ".join(map(str, sorted({window.step for window in windows(run)})))
        raise FigureError(f"step {chosen}: {run.path} has steps {steps}")
    names = row_names(run)
    present = {window.rank for window in ends}
    rows = [
        _Row(names[rank], rank_step(run, rank, chosen, labels, labels.of_rank(run, rank)))
        for rank in chosen_ranks(run, ranks)
        if rank in present
    ]
    return kinds, rows, min(window.start_ns for window in ends)


def _passes(done: RankStep, origin_ns: int) -> Iterator[_Cell]:
    """Yield the passes and gaps of a compute lane, in order."""
    cells = done.compute
    window_ns = int(cells.end_ns[-1] - cells.start_ns[0])
    kind = done.kind_of_passes(int(window_ns * _SHORT_GAP))
    batch = np.where(cells.row >= 0, done.microbatch, -2)
    inner = (cells.row < 0) & (kind != done.kind)
    batch[inner] = batch[np.maximum.accumulate(np.where(inner, 0, np.arange(len(batch))))][inner]
    changes = (np.diff(kind, prepend=-1) != 0) | (np.diff(batch, prepend=-3) != 0)
    pair = done.pair
    first = np.flatnonzero((changes & (pair == 0)) | (np.diff(pair, prepend=0) != 0))
    last = np.append(first[1:], len(kind)) - 1
    for i, j in zip(first, last, strict=True):
        start_ns, end_ns = int(cells.start_ns[i]) - origin_ns, int(cells.end_ns[j]) - origin_ns
        if not pair[i]:
            yield _Cell(int(kind[i]), int(batch[i]), start_ns, end_ns)
            continue
        for part, k in zip(("upper", "lower"), done.halves(int(i), int(j)), strict=True):
            yield _Cell(int(kind[k]), int(batch[k]), start_ns, end_ns, part)


def _add_cells(
    figure: go.Figure, entry: Mapping[str, Any], cells: Sequence[tuple[str, _Cell]], theme: str
) -> None:
    """Add the cells of one kind as one trace."""
    numbers = ["" if cell.microbatch < 0 else str(cell.microbatch) for _, cell in cells]
    figure.add_bar(
        orientation="h",
        y=[row for row, _ in cells],
        base=[cell.start_ns / 1e6 for _, cell in cells],
        x=[(cell.end_ns - cell.start_ns) / 1e6 for _, cell in cells],
        name=entry["label"],
        text=numbers,
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        offset=[_PLACES[cell.part][0] for _, cell in cells],
        width=[_PLACES[cell.part][1] for _, cell in cells],
        marker=marker(entry, theme),
        customdata=[
            [cell.end_ns / 1e6, f", micro-batch {n}" if n else ""]
            for (_, cell), n in zip(cells, numbers, strict=True)
        ],
        hovertemplate="%{y}%{customdata[1]}<br>%{base:.3f} to %{customdata[0]:.3f} ms (%{x:.3f} ms)"
        f"<extra>{html.escape(entry['label'])}</extra>",
    )
