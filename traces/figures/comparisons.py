"""Figures of two runs, and of many predictions against what was measured."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import plotly.graph_objects as go

from foretrace.door import counted
from foretrace.traces.compare import compare as compare_runs
from foretrace.traces.errors import FigureError
from foretrace.traces.figures.drawing import empty_figure, heading
from foretrace.traces.report.compare import cause_name
from foretrace.traces.report.compare import operations as joined_operations
from foretrace.traces.report.format import format_share, format_time
from foretrace.traces.report.kinds import Kinds, fill, palette
from foretrace.traces.run import Run

BAND: Final = 0.1  # error that is drawn as a band: a prediction within 10 % ranks layouts well

SYMBOLS: Final = ("circle", "diamond", "square", "triangle-up", "cross", "x", "star")
"""Shapes of families one after the other, since neighbouring colours of a row are alike."""


def compare(a: Run, b: Run, *, theme: str = "light") -> go.Figure:
    """Draw which causes make up the difference between two runs: a waterfall that ends at the difference.

    Args:
        a: the first run, usually simulated.
        b: the second, usually measured.
        theme: ``"light"`` or ``"dark"``.

    Raises:
        FigureError: the theme is unknown.
        RunError: one of the runs has no step with a length.
    """
    found = compare_runs(a, b)
    kinds = Kinds((a, b))
    causes = [cause for cause in found.causes if cause.difference_ns]
    difference_ns = found.b_step_ns - found.a_step_ns
    share = difference_ns / found.a_step_ns
    said = (
        f"{a.info.origin} {format_time(found.a_step_ns / 1e9)} → {b.info.origin} "
        f"{format_time(found.b_step_ns / 1e9)} ({format_share(share, '+.1f')})"
    )
    figure = empty_figure(
        heading("What makes the difference", said), theme, height=170 + 30 * (len(causes) + 1)
    )
    surface = palette()[theme]["surface"]
    values = [cause.difference_ns / 1e6 for cause in causes]
    figure.add_waterfall(
        orientation="h",
        y=[*(cause_name(cause, kinds) for cause in causes), "step"],
        x=[*values, difference_ns / 1e6],
        measure=[*("relative" for _ in causes), "total"],
        text=[f"{value:+.2f} ms" for value in (*values, difference_ns / 1e6)],
        increasing={"marker": {"color": surface["limit"]}},
        decreasing={"marker": {"color": palette()[theme]["axes"]["tp"]}},
        totals={"marker": {"color": surface["ink"]}},
        connector={"line": {"color": surface["line"]}},
    )
    figure.update_layout(xaxis_title="ms", showlegend=False)
    figure.update_yaxes(autorange="reversed")
    return figure


def operations(a: Run, b: Run, *, theme: str = "light") -> go.Figure:
    """Draw each joined operation of two runs: its time in the second over that in the first, without waiting.

    Arguments and errors as for ``compare``; also FigureError if no operation was joined.
    """
    kinds = Kinds((a, b))
    a_ns, b_ns, kind, _ = joined_operations(compare_runs(a, b), kinds)
    if not len(a_ns):
        raise FigureError(f"{a.path} and {b.path} have no operation in common")
    said = f"{b.info.origin} ÷ {a.info.origin}, {len(a_ns):,} operations"
    figure = empty_figure(heading("Operation by operation", said), theme, height=460)
    figure.add_hline(y=1, line={"color": palette()[theme]["surface"]["ink"], "width": 1})
    for number in np.unique(kind):
        ours, entry = kind == number, kinds.entries[int(number)]
        figure.add_scattergl(
            x=a_ns[ours] / 1e6,
            y=b_ns[ours] / a_ns[ours],
            mode="markers",
            name=entry["label"],
            marker={"color": fill(entry, palette(), theme).colour, "size": 4, "opacity": 0.6},
            hovertemplate="%{x:.4g} ms, × %{y:.3f}",
        )
    figure.update_xaxes(type="log", title=f"ms, {html.escape(a.info.origin)}")
    figure.update_yaxes(type="log", title="ratio")
    return figure


def accuracy(rows: Sequence[Mapping[str, Any]], *, theme: str = "light") -> go.Figure:
    """Draw measured over predicted of many predictions, one point each, against what was predicted.

    Args:
        rows: each with ``predicted`` and ``measured``, above zero and in one unit, and where known ``id`` and
            ``family``, which gives the colour; as ``foretrace validate --json`` lists them.
        theme: ``"light"`` or ``"dark"``.

    Raises:
        FigureError: no row, one without a number above zero, or an unknown theme.
    """
    families: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        for name in ("predicted", "measured"):
            value = row.get(name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise FigureError(f"{row.get('id', 'a row')}: {name}={value!r}: a number above zero")
        families.setdefault(str(row.get("family", "")), []).append(row)
    if not families:
        raise FigureError("no prediction to draw: give rows with predicted and measured")
    # Of logarithms: twice as much and half of it are equally far off.
    error = np.median([abs(np.log(row["predicted"] / row["measured"])) for row in rows])
    median = f"median error {format_share(np.expm1(error))}"
    said = f"{len(rows)} predictions, {median}; the band is ± {format_share(BAND, '.0f')}"
    figure = empty_figure(heading("Measured over predicted", said), theme, height=460)
    surface, series = palette()[theme]["surface"], palette()[theme]["series"]
    figure.add_hrect(y0=1 - BAND, y1=1 + BAND, fillcolor=surface["grid"], line_width=0, layer="below")
    figure.add_hline(y=1, line={"color": surface["ink"], "width": 1})
    for number, (family, ours) in enumerate(sorted(families.items())):
        figure.add_scatter(
            x=[row["predicted"] for row in ours],
            y=[row["measured"] / row["predicted"] for row in ours],
            mode="markers",
            name=html.escape(family) or "predictions",
            marker={
                "color": series[number % len(series)],
                "size": 7,
                "opacity": 0.75,
                "symbol": SYMBOLS[number % len(SYMBOLS)],
            },
            text=[html.escape(str(row.get("id", ""))) for row in ours],
            hovertemplate="%{text}<br>predicted %{x:.4g}<br>measured ÷ predicted %{y:.3f}",
        )
    figure.update_xaxes(type="log", title="predicted")
    figure.update_yaxes(type="log", title="measured ÷ predicted")
    return figure


# Figures of many layouts: throughput against memory, and which of them no other one beats.
#
# ``traces.report.html`` makes a page of its own of the same rows, which needs no plotly and takes thousands.

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
    names = sorted(grouped, key=lambda name: (counted(name) < 0, counted(name), name))
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
