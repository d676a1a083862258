"""Figures of one run over time: its schedule, what a step is made of, its memory."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from foretrace.traces.analysis.memory import curves
from foretrace.traces.analysis.metrics import breakdown as step_breakdown
from foretrace.traces.analysis.metrics import step_times_ns
from foretrace.traces.analysis.windows import extent_ns, windows
from foretrace.traces.errors import FigureError
from foretrace.traces.figures.drawing import (
    chosen_ranks,
    chosen_step,
    empty_figure,
    heading,
    lay_out,
    marker,
    row_names,
)
from foretrace.traces.join import rank_pairs
from foretrace.traces.report.cells import COMPUTE_LANE, RankStep, rank_step
from foretrace.traces.report.findings import critical_chain
from foretrace.traces.report.format import format_si
from foretrace.traces.report.kinds import Kinds, Labels, axis_label, fill, palette
from foretrace.traces.report.lanes import lane_order
from foretrace.traces.report.links import TIERS, links_of, tiers_of, utilisation, way_name
from foretrace.traces.report.rows import reading_order
from foretrace.traces.report.run import NOTHING, View
from foretrace.traces.report.run import overview as report_overview
from foretrace.traces.report.words import memory_limit_bytes, run_labels, subtitle, title
from foretrace.traces.run import Run

MOST_CELLS: Final = 3_000  # cells of a schedule; with 10,000 a zoom takes plotly about a second
MOST_LINES: Final = 512  # ranks in the picture of all of them; of more, every n-th is drawn
_HEIGHT: Final = 0.8  # height of a row's bars, in rows

_SHORT_GAP: Final = 1 / 100
"""Share of the step; shorter gaps within one pass over a micro-batch are drawn together, behind its work."""


class _Cell(NamedTuple):
    """The work of one pass over a micro-batch, or time without any; from the start of the step.

    Two passes that take turns are drawn one above the other, each as high as its share of their time.
    """

    kind: int
    microbatch: int
    start_ns: int
    end_ns: int
    top: float = 0.0
    height: float = 1.0


class _Row(NamedTuple):
    """One row of a figure: what it is called and what its rank does."""

    label: str
    done: RankStep


def schedule(
    run: Run,
    other: Run | None = None,
    *,
    step: int | None = None,
    ranks: Sequence[int] | None = None,
    theme: str = "light",
) -> go.Figure:
    """Draw what each rank does over one step: a bar per pass over a micro-batch, hatched where it waits.

    The area of a colour is its time. Gaps too short to be seen stand behind the work of their pass.

    Args:
        run: the run.
        other: a second run, drawn below it row by row, in its own step of median length.
        step: optimizer step; None: the one of median length.
        ranks: stored ranks to draw; None: all, or the first pipeline where there are too many for a screen.
        theme: ``"light"`` or ``"dark"``.

    Raises:
        FigureError: no such rank, step or theme; or more cells than a figure can hold.
        RunError: the run has no step with a length.
    """
    if other is None:
        kinds, rows, origin_ns = _rows(run, step, ranks)
        origins = [origin_ns] * len(rows)
    else:
        kinds, rows, origins = _rows_of_two((run, other), step, ranks)
    cells = [
        (row.label, cell)
        for row, start in zip(rows, origins, strict=True)
        for cell in _passes(row.done, start)
    ]
    _check(len(cells))
    figure = empty_figure(heading(title(run), subtitle(run)), theme, height=180 + 46 * len(rows))
    for kind in sorted({cell.kind for _, cell in cells}):
        ours = [(row, cell) for row, cell in cells if cell.kind == kind]
        _add_cells(figure, kinds.entries[kind], ours, theme)
    lay_out(figure, [row.label for row in rows])
    figure.update_layout(uniformtext={"minsize": 8, "mode": "hide"})
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

    Raises FigureError: the run has no memory over time, no such rank, or the theme is unknown.
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


def lanes(
    run: Run, *, step: int | None = None, ranks: Sequence[int] | None = None, theme: str = "light"
) -> go.Figure:
    """Draw what is below each row of a report: further streams, and the communication of each axis.

    Of a transfer, what waits for the last rank is low, what hides behind compute is pale.

    Arguments and errors as for ``schedule``; also FigureError if there is nothing of the kind.
    """
    kinds, rows, origin_ns = _rows(run, step, ranks)
    bars: dict[tuple[str, str], list[tuple[str, float, float]]] = {}
    names: list[str] = []
    for row in rows:
        for key in sorted(row.done.lanes.keys() - {COMPUTE_LANE}, key=lane_order):
            lane, cells = kinds.lane(*key[:2]), row.done.lanes[key]
            names.append(f"{row.label} {lane['label']}" + (f" ({key[2] + 1})" if key[2] else ""))
            moves = cells.start_ns + cells.waited_ns
            for part, start, end in (
                ("waits", cells.start_ns, moves),
                ("hidden behind compute", moves, moves + cells.hidden_ns),
                ("", moves + cells.hidden_ns, cells.end_ns),
            ):
                drawn = bars.setdefault((lane["axis"], part), [])
                drawn += [
                    (names[-1], (s - origin_ns) / 1e6, (e - s) / 1e6)
                    for s, e in zip(start, end, strict=True)
                    if e > s
                ]
    if not names:
        raise FigureError(f"{run.path}: these ranks have one stream each and communicate nothing")
    _check(sum(map(len, bars.values())))
    figure = empty_figure(
        heading("Streams and communication", title(run)), theme, height=160 + 26 * len(names)
    )
    colours = palette()[theme]
    for (axis, part), drawn in bars.items():
        figure.add_bar(
            orientation="h",
            y=[name for name, _, _ in drawn],
            base=[start for _, start, _ in drawn],
            x=[length for _, _, length in drawn],
            name=" ".join(filter(None, [axis_label(axis) if axis else "streams", part])),
            width=0.15 if part == "waits" else _HEIGHT,
            marker={
                "color": colours["axes"].get(
                    axis, colours["axes"]["world"] if axis else colours["surface"]["ink"]
                ),
                "opacity": 0.35 if part.startswith("hidden") else 1,
            },
            hovertemplate="%{y}<br>from %{base:.3f} ms, %{x:.3f} ms",
        )
    lay_out(figure, names)
    return figure


def overview(run: Run, *, step: int | None = None, theme: str = "light") -> go.Figure:
    """Draw all ranks in one picture: what each does in each thin slice of a step, a line for each.

    Args:
        run: the run.
        step: optimizer step; None: the one of median length.
        theme: ``"light"`` or ``"dark"``.

    Raises:
        FigureError: no such step or theme.
        RunError: the run has no step with a length.
    """
    kinds = Kinds((run,))
    chosen = chosen_step(run, step)
    view = View(run=run, rows=(), steps=(chosen,), default_step=0, done={}, lanes=(COMPUTE_LANE,), omitted="")
    described, pixels, _ = report_overview(view, Labels(kinds))
    lines = pixels.reshape(described["n_patterns"], described["bins"])[described["pattern"]]
    every = -(-len(lines) // MOST_LINES)
    figure = empty_figure(heading("All ranks", title(run)), theme, height=460)
    present = [int(kind) for kind in np.unique(lines) if kind != NOTHING]
    looks = [fill(kinds.entries[kind], palette(), theme).colour for kind in present]
    number = np.full(NOTHING + 1, len(present), np.uint8)
    number[present] = np.arange(len(present))
    scale = [*looks, palette()[theme]["surface"]["bg"]]
    edges = np.linspace(0, 1, len(scale) + 1)
    figure.add_heatmap(
        z=number[lines[::every]],
        x=np.linspace(0, view.length_ns(chosen) / 1e6, described["bins"]),
        y=[f"rank {rank}" for rank in described["order"][::every]],
        zmin=-0.5,
        zmax=len(present) + 0.5,
        colorscale=[[edges[at + end], colour] for at, colour in enumerate(scale) for end in (0, 1)],
        colorbar={
            "tickvals": list(range(len(present))),
            "ticktext": [kinds.entries[kind]["label"] for kind in present],
        },
        hovertemplate="%{y}, %{x:.2f} ms<extra></extra>",
    )
    figure.update_layout(xaxis_title="ms")
    figure.update_yaxes(autorange="reversed")
    return figure


def critical_path(run: Run, *, step: int | None = None, theme: str = "light") -> go.Figure:
    """Draw the chain of work and transfers that sets the length of a step, on the ranks that it goes through.

    Arguments and errors as for ``overview``; also FigureError if the chain is too long for a figure.
    """
    kinds = Kinds((run,))
    chain, _ = critical_chain(run, chosen_step(run, step), kinds)
    _check(len(chain))
    names = row_names(run)
    ranks = [rank for rank in reading_order(run) if rank in {one.rank for one in chain}]
    figure = empty_figure(heading("Critical path", title(run)), theme, height=180 + 34 * len(ranks))
    for kind in sorted({one.kind for one in chain}):
        ours = [one for one in chain if one.kind == kind]
        figure.add_bar(
            orientation="h",
            y=[names[one.rank] for one in ours],
            base=[one.start_ns / 1e6 for one in ours],
            x=[(one.end_ns - one.start_ns) / 1e6 for one in ours],
            name=kinds.entries[kind]["label"],
            marker=marker(kinds.entries[kind], theme),
            hovertemplate="%{y}<br>from %{base:.3f} ms, %{x:.3f} ms",
        )
    figure.add_scatter(
        x=[at / 1e6 for one in chain for at in (one.start_ns, one.end_ns)],
        y=[names[one.rank] for one in chain for _ in range(2)],
        mode="lines",
        showlegend=False,
        hoverinfo="skip",
        line={"color": palette()[theme]["surface"]["limit"], "width": 1.5},
    )
    lay_out(figure, [names[rank] for rank in ranks])
    return figure


def history(runs: Sequence[Run], *, theme: str = "light") -> go.Figure:
    """Draw how long each step of each run took; simulated ones are dashed.

    Raises:
        FigureError: no run, or an unknown theme.
        RunError: a run has no step with a length.
    """
    if not runs:
        raise FigureError("no run to draw: give one or more")
    figure = empty_figure(heading("History by step", title(runs[0])), theme, height=420)
    series = palette()[theme]["series"]
    names = run_labels(runs) if len(runs) > 1 else (runs[0].info.origin,)
    for number, run in enumerate(runs):
        times = step_times_ns(step_breakdown(run))
        figure.add_scatter(
            x=list(times),
            y=[ns / 1e6 for ns in times.values()],
            mode="lines+markers",
            name=html.escape(names[number] if len(names) == len(runs) else run.info.name),
            line={
                "color": series[number % len(series)],
                "dash": "dash" if run.info.origin == "simulated" else "solid",
            },
        )
    figure.update_layout(xaxis_title="step", yaxis={"title": "ms", "rangemode": "tozero"})
    return figure


def _check(n_cells: int) -> None:
    """Raise FigureError for more cells than a figure holds."""
    if n_cells > MOST_CELLS:
        raise FigureError(
            f"{n_cells:,} cells, and a figure holds {MOST_CELLS:,}; give fewer ranks, "
            "or draw the report, which has no limit: report_html(run)"
        )


def _rows_of_two(
    runs: tuple[Run, Run], step: int | None, ranks: Sequence[int] | None
) -> tuple[Kinds, list[_Row], list[int]]:
    """Return the kinds of both, the rows of each rank in turn, and where the step of each begins."""
    kinds, names, partner = Kinds(runs), run_labels(runs), dict(rank_pairs(*runs))
    chosen = [rank for rank in chosen_ranks(runs[0], ranks) if rank in partner]
    both = (
        _rows(runs[0], step, chosen, kinds),
        _rows(runs[1], None, [partner[rank] for rank in chosen], kinds),
    )
    rows: list[_Row] = []
    origins: list[int] = []
    for pair in zip(*(rows for _, rows, _ in both), strict=False):
        rows += [row._replace(label=f"{row.label}, {name}") for row, name in zip(pair, names, strict=True)]
        origins += [origin for _, _, origin in both]
    if not rows:
        raise FigureError(f"{runs[0].path} and {runs[1].path} have no rank in common to draw")
    return kinds, rows, origins


def _rows(
    run: Run, step: int | None, ranks: Sequence[int] | None, kinds: Kinds | None = None
) -> tuple[Kinds, list[_Row], int]:
    """Return the kinds of *run*, its rows in *step*, and the start of the step."""
    kinds = kinds or Kinds((run,))
    labels = Labels(kinds)
    chosen, names = chosen_step(run, step), row_names(run)
    present = {window.rank for window in windows(run) if window.step == chosen}
    rows = [
        _Row(names[rank], rank_step(run, rank, chosen, labels, labels.of_rank(run, rank)))
        for rank in chosen_ranks(run, ranks)
        if rank in present
    ]
    return kinds, rows, extent_ns(run, chosen)[0]


def _passes(done: RankStep, origin_ns: int) -> Iterator[_Cell]:
    """Yield the cells of a compute lane, in order: of each pass its work, and then the gaps within it."""
    cells = done.compute
    length_ns = cells.end_ns - cells.start_ns
    kind = done.kind_of_passes(int(_SHORT_GAP * length_ns.sum()))
    works = cells.row >= 0
    batch = np.where(works, done.microbatch, -2)
    inner = ~works & (kind != done.kind)
    batch[inner] = batch[np.maximum.accumulate(np.where(inner, 0, np.arange(len(batch))))][inner]
    changes = (np.diff(kind, prepend=-1) != 0) | (np.diff(batch, prepend=-3) != 0)
    pair = done.pair
    first = np.flatnonzero((changes & (pair == 0)) | (np.diff(pair, prepend=0) != 0))
    last = np.append(first[1:], len(kind)) - 1
    for i, j in zip(first, last, strict=True):
        ns_of = np.bincount(done.kind[i : j + 1], length_ns[i : j + 1]).astype(int)
        worked = set(done.kind[i : j + 1][works[i : j + 1]])
        now_ns = int(cells.start_ns[i]) - origin_ns
        if pair[i]:
            forward, backward = done.halves(int(i), int(j))
            until_ns, top = now_ns + sum(int(ns_of[k]) for k in worked), 0.0
            for k in sorted(worked, key=lambda k: k != done.kind[forward]):
                part = int(ns_of[k]) / (until_ns - now_ns)
                of = forward if k == done.kind[forward] else backward
                yield _Cell(int(k), int(batch[of]), now_ns, until_ns, top, part)
                top += part
            now_ns = until_ns
        for k in sorted(np.flatnonzero(ns_of), key=lambda k: k not in worked):
            if k in worked and pair[i]:
                continue
            yield _Cell(int(k), int(batch[i]) if k in worked else -2, now_ns, now_ns + int(ns_of[k]))
            now_ns += int(ns_of[k])


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
        offset=[_HEIGHT * (cell.top - 0.5) for _, cell in cells],
        width=[_HEIGHT * cell.height for _, cell in cells],
        marker=marker(entry, theme),
        customdata=[
            [cell.end_ns / 1e6, f", micro-batch {n}" if n else ""]
            for (_, cell), n in zip(cells, numbers, strict=True)
        ],
        hovertemplate="%{y}%{customdata[1]}<br>%{base:.3f} to %{customdata[0]:.3f} ms (%{x:.3f} ms)"
        f"<extra>{html.escape(entry['label'])}</extra>",
    )


# Figures of communication: what hides behind compute, and how full links were.

MOST_LINKS: Final = 512  # lines of the picture of links; of more ways, the fullest are drawn


def overlap(
    run: Run, *, step: int | None = None, ranks: Sequence[int] | None = None, theme: str = "light"
) -> go.Figure:
    """Draw how much communication hides behind compute on each rank: pale is hidden, solid is exposed.

    Args:
        run: the run.
        step: optimizer step; None: the one of median length.
        ranks: stored ranks to draw; None: all, or the first pipeline where there are too many for a screen.
        theme: ``"light"`` or ``"dark"``.

    Raises:
        FigureError: no such rank, step or theme; or nothing was communicated.
        RunError: the run has no step with a length.
    """
    chosen, wanted = chosen_step(run, step), chosen_ranks(run, ranks)
    rows = {row.rank: row for row in step_breakdown(run) if row.step == chosen and row.rank in wanted}
    if not rows:
        raise FigureError(f"step {chosen}: {run.path} has no such step on these ranks")
    names = row_names(run)
    times_ms: dict[tuple[str, bool], dict[int, float]] = defaultdict(dict)
    for rank, row in rows.items():
        for axis, ns in row.hidden_ns.items():
            times_ms[axis, True][rank] = ns / 1e6
        for state, ns in row.ns.items():
            if state.startswith("exposed:"):
                times_ms[state.removeprefix("exposed:"), False][rank] = ns / 1e6
    shown = {key: value for key, value in times_ms.items() if any(value.values())}
    if not shown:
        raise FigureError(f"{run.path}: nothing was communicated in step {chosen}")
    figure = empty_figure(
        heading("Communication: hidden and exposed", title(run)), theme, height=180 + 34 * len(rows)
    )
    colours = palette()[theme]["axes"]
    for axis, is_hidden in sorted(shown):
        said = "hidden behind compute" if is_hidden else "exposed"
        figure.add_bar(
            y=[names[rank] for rank in rows],
            x=[shown[axis, is_hidden].get(rank, 0.0) for rank in rows],
            orientation="h",
            name=f"{axis_label(axis)} {said}",
            marker={"color": colours.get(axis, colours["world"]), "opacity": 0.35 if is_hidden else 1},
            hovertemplate="%{y}: %{x:.3f} ms<extra>" + f"{axis_label(axis)} {said}</extra>",
        )
    figure.update_layout(barmode="stack", xaxis_title="ms per step")
    figure.update_yaxes(autorange="reversed")
    return figure


def links(run: Run, *, step: int | None = None, theme: str = "light") -> go.Figure:
    """Draw how full each link was over one step: a line per way, white is idle, red is full.

    Args:
        run: a run on disk that was simulated with shared links (``--engine contended``).
        step: optimizer step; None: the one of median length.
        theme: ``"light"`` or ``"dark"``.

    Raises:
        FigureError: the run says nothing of its links, has no such step, or the theme is unknown.
    """
    table = links_of(run)
    if table is None:
        raise FigureError(f"{run.path} does not say how full links were; simulate with --engine contended -o")
    origin_ns, length_ns = extent_ns(run, chosen_step(run, step))
    used, lines = utilisation(table, origin_ns, length_ns)
    base = empty_figure(heading("Links: share in use", title(run)), theme, height=420)
    tiers = tiers_of(lines)
    figure = make_subplots(
        rows=len(tiers), cols=1, shared_xaxes=True, subplot_titles=[TIERS.get(tier, tier) for tier in tiers]
    )
    surface, forward = palette()[theme]["surface"], palette()[theme]["compute"]["forward"]
    times_ms = np.linspace(0, length_ns / 1e6, used.shape[1])
    for number, tier in enumerate(tiers, start=1):
        rows = [row for row, line in enumerate(lines) if line[0] == tier]
        fullest = sorted(sorted(rows, key=lambda row: -used[row].mean())[:MOST_LINKS])
        figure.add_heatmap(
            x=times_ms,
            y=[way_name(*lines[row]) for row in fullest],
            z=(100 * used[fullest]).astype(np.float32),
            zmin=0,
            zmax=100,
            colorscale=[[0, surface["grid"]], [0.85, forward], [1, surface["limit"]]],
            colorbar={"title": "in use", "ticksuffix": " %"},
            showscale=number == 1,
            hovertemplate="%{y}, %{x:.2f} ms: %{z:.0f} %<extra></extra>",
            row=number,
            col=1,
        )
    figure.update_layout(base.layout)
    figure.update_xaxes(title="ms", row=len(tiers), col=1)
    figure.update_yaxes(autorange="reversed")
    return figure
