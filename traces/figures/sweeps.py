"""Figures of many layouts: throughput against memory, and which of them no other one beats.

``traces.report.sweep`` makes a page of its own of the same rows, which needs no plotly and takes thousands.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import plotly.graph_objects as go

from foretrace.traces.errors import FigureError
from foretrace.traces.figures.drawing import empty_figure, heading
from foretrace.traces.report.colours import palette

Point = tuple[float, float, str]  # bytes, tokens per second and GPU, and name of a layout

_SYMBOLS: Final = ("circle", "square", "diamond", "triangle-up", "triangle-down")


def pareto(rows: Sequence[Mapping[str, Any]], *, by: str = "tp", theme: str = "light") -> go.Figure:
    """Draw throughput against peak memory of many layouts, the front, the limit, and the best that fits.

    Args:
        rows: each with ``tokens_per_s_per_gpu`` and ``peak_memory_bytes``, and where known
            ``memory_limit_bytes`` and ``name``: summaries of simulated runs have them, and the layouts of
            ``foretrace search --json``.
        by: setting that colour and shape tell apart, where the rows have it.
        theme: ``"light"`` or ``"dark"``.

    Raises:
        FigureError: no row, one without these numbers, or an unknown theme.
    """
    points = [_point(row) for row in rows]
    if not points:
        raise FigureError("no layout to draw: give summaries of simulated runs")
    limit = next((row["memory_limit_bytes"] for row in rows if row.get("memory_limit_bytes")), None)
    fitting = [point for point in points if limit is None or point[0] <= limit]
    said = f"{len(points)} layouts, {len(fitting)} of them fit"
    figure = empty_figure(heading("Throughput against memory", said), theme, height=480)
    grouped: dict[str, list[Point]] = {}
    for row, point in zip(rows, points, strict=True):
        grouped.setdefault(str(row[by]) if row.get(by) is not None else "", []).append(point)
    names = sorted(
        grouped, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name)
    )
    for number, name in enumerate(names):
        _add_layouts(
            figure, grouped[name], f"{by} {name}" if name else "", number=number, limit=limit, theme=theme
        )
    _add_edges(figure, front(points), limit, max(fitting, key=lambda point: point[1], default=None), theme)
    figure.update_layout(
        # A line at each doubling.
        xaxis={"title": "peak memory per GPU, GB", "type": "log", "dtick": math.log10(2)},
        yaxis={"title": "tokens/s per GPU", "rangemode": "tozero"},
    )
    return figure


def _add_layouts(
    figure: go.Figure, points: Sequence[Point], group: str, *, number: int, limit: float | None, theme: str
) -> None:
    """Add the layouts of one group: those that fit, and pale those that do not."""
    series = palette()[theme]["series"]
    for fits in (True, False):
        ours = [point for point in points if (limit is None or point[0] <= limit) is fits]
        if not ours:
            continue
        figure.add_scatter(
            x=[size / 1e9 for size, _, _ in ours],
            y=[rate for _, rate, _ in ours],
            text=[html.escape(name) for _, _, name in ours],
            mode="markers",
            name=html.escape(", ".join(filter(None, [group, "fits" if fits else "does not fit"]))),
            marker={
                # Neighbouring colours are alike: every third one is taken.
                "color": series[(3 * number + 1) % len(series)],
                "size": 9,
                "opacity": 0.9 if fits else 0.3,
                "symbol": _SYMBOLS[number % len(_SYMBOLS)],
            },
            hovertemplate="%{text}<br>%{x:.1f} GB, %{y:,.0f} tokens/s per GPU<extra></extra>",
        )


def _add_edges(
    figure: go.Figure, edge: Sequence[Point], limit: float | None, best: Point | None, theme: str
) -> None:
    """Add the front, the limit of the device, and the name of the best layout that fits."""
    surface = palette()[theme]["surface"]
    figure.add_scatter(
        x=[size / 1e9 for size, _, _ in edge],
        y=[rate for _, rate, _ in edge],
        mode="lines",
        name="no other is faster with less",
        line={"shape": "hv", "color": surface["ink"], "width": 1.2},
        hoverinfo="skip",
    )
    if limit is not None:
        figure.add_vline(x=limit / 1e9, line={"color": surface["limit"], "dash": "dash"})
        figure.add_annotation(
            x=math.log10(limit / 1e9), y=1, yref="paper", xanchor="left", text="does not fit",
            showarrow=False, font={"color": surface["limit"]},
        )  # fmt: skip
    if best is not None:
        figure.add_annotation(
            x=math.log10(best[0] / 1e9), y=best[1],  # plotly takes the logarithm where the axis is one
            text=f"best that fits: {html.escape(best[2])}, {best[1]:,.0f} tokens/s",
            ax=-60, ay=150, bgcolor=surface["bg"], bordercolor=surface["line"], borderpad=4,
        )  # fmt: skip


def front(points: Sequence[Point]) -> list[Point]:
    """Return the points, by size, that are faster than every one that needs no more.

    >>> front([(1, 10, "a"), (2, 9, "b"), (3, 12, "c"), (3, 11, "d")])
    [(1, 10, 'a'), (3, 12, 'c')]
    """
    found: list[Point] = []
    for point in sorted(points, key=lambda point: (point[0], -point[1])):
        if not found or point[1] > found[-1][1]:
            found.append(point)
    return found


def _point(row: Mapping[str, Any]) -> Point:
    """Return bytes, tokens per second and GPU, and name of a layout."""
    values = []
    for name in ("peak_memory_bytes", "tokens_per_s_per_gpu"):
        value = row.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise FigureError(f"{row.get('name', 'a layout')}: {name}={value!r}: a number above zero")
        values.append(float(value))
    return values[0], values[1], str(row.get("name", ""))
