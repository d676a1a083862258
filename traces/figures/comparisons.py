"""Figures of two runs, and of many predictions against what was measured."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import plotly.graph_objects as go

from foretrace.traces.compare import compare as compare_runs
from foretrace.traces.errors import FigureError
from foretrace.traces.figures.drawing import empty_figure, heading
from foretrace.traces.report.colours import fill, palette
from foretrace.traces.report.compare import cause_name
from foretrace.traces.report.compare import operations as joined_operations
from foretrace.traces.report.format import format_share, format_time
from foretrace.traces.report.kinds import Kinds
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
