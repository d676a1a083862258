"""Figures of communication: what hides behind compute, and how full links were."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from foretrace.traces.analysis.metrics import breakdown, typical_step
from foretrace.traces.analysis.windows import windows
from foretrace.traces.errors import FigureError
from foretrace.traces.figures.drawing import chosen_ranks, empty_figure, heading, row_names
from foretrace.traces.report.kinds import axis_label, palette
from foretrace.traces.report.links import TIERS, links_of, tiers_of, utilisation, way_name
from foretrace.traces.report.words import title
from foretrace.traces.run import Run

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
    chosen = typical_step(run)[0] if step is None else step
    wanted = chosen_ranks(run, ranks)
    rows = {row.rank: row for row in breakdown(run) if row.step == chosen and row.rank in wanted}
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
    chosen = typical_step(run)[0] if step is None else step
    ends = [window for window in windows(run) if window.step == chosen]
    if not ends:
        raise FigureError(f"step {chosen}: {run.path} has no such step")
    origin_ns = min(window.start_ns for window in ends)
    length_ns = max(window.end_ns for window in ends) - origin_ns
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
