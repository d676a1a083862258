"""Figures of many layouts: throughput against memory, and which of them no other one beats.

``traces.report.sweep`` makes a page of its own of the same rows, which needs no plotly and takes thousands.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from traces.errors import FigureError
from traces.figures.drawing import empty_figure, heading
from traces.report.colours import palette


def pareto(rows: Sequence[Mapping[str, Any]], *, theme: str = "light") -> go.Figure:
    """Draw throughput against peak memory of many layouts, the front, the limit, and the best that fits.

    Args:
        rows: each with ``tokens_per_s_per_gpu`` and ``peak_memory_bytes``, and where known
            ``memory_limit_bytes`` and ``name``: summaries of simulated runs have them.
        theme: ``"light"`` or ``"dark"``.

    Raises:
        FigureError: no row, one without these numbers, or an unknown theme.
    """
    points = [_point(row) for row in rows]
    if not points:
        raise FigureError("no layout to draw: give summaries of simulated runs")
    limit = next((row["memory_limit_bytes"] for row in rows if row.get("memory_limit_bytes")), None)
    fitting = [point for point in points if limit is None or point[0] <= limit]
    best = max(fitting, key=lambda point: point[1], default=None)
    said = f"{len(points)} layouts, {len(fitting)} of them fit"
    figure = empty_figure(heading("Throughput against memory", said), theme, height=480)
    surface, colours = palette()[theme]["surface"], palette()[theme]["compute"]
    for name, ours, colour in (
        ("fits", fitting, colours["forward"]),
        ("does not fit", [point for point in points if point not in fitting], surface["muted"]),
    ):
        if not ours:
            continue
        figure.add_scatter(
            x=[size / 1e9 for size, _, _ in ours],
            y=[rate for _, rate, _ in ours],
            text=[html.escape(said) for _, _, said in ours],
            mode="markers",
            name=name,
            marker={
                "color": colour,
                "size": 8,
                "opacity": 0.8,
                "symbol": "circle" if ours is fitting else "x",
            },
            hovertemplate="%{text}<br>%{x:.1f} GB, %{y:,.0f} tokens/s per GPU<extra></extra>",
        )
    edge = front(points)
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
    if best is not None:
        figure.add_annotation(
            x=best[0] / 1e9, y=best[1],
            text=f"best that fits: {html.escape(best[2])}, {best[1]:,.0f} tokens/s",
            ax=-60, ay=-40, bgcolor=surface["bg"], bordercolor=surface["line"], borderpad=4,
        )  # fmt: skip
    figure.update_layout(
        xaxis_title="peak memory per GPU, GB", yaxis={"title": "tokens/s per GPU", "rangemode": "tozero"}
    )
    return figure


def front(points: Sequence[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """Return the points, by size, that are faster than every one that needs no more.

    >>> front([(1, 10, "a"), (2, 9, "b"), (3, 12, "c"), (3, 11, "d")])
    [(1, 10, 'a'), (3, 12, 'c')]
    """
    found: list[tuple[float, float, str]] = []
    for point in sorted(points, key=lambda point: (point[0], -point[1])):
        if not found or point[1] > found[-1][1]:
            found.append(point)
    return found


def _point(row: Mapping[str, Any]) -> tuple[float, float, str]:
    """Return bytes, tokens per second and GPU, and name of a layout."""
    values = []
    for name in ("peak_memory_bytes", "tokens_per_s_per_gpu"):
        value = row.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise FigureError(f"{row.get('name', 'a layout')}: {name}={value!r}: a number above zero")
        values.append(float(value))
    return values[0], values[1], str(row.get("name", ""))
