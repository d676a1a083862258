"""Shows a validation to a person: score, classes, families, worst rows, and every reason for a failure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from foretrace.simulator.validate.fit import FitValidation
from foretrace.simulator.validate.scores import Failed, Spread, Validation, reasons
from foretrace.traces.report.format import format_share

SHOWN_REASONS: Final = 12
"""Most reasons for failures that are listed; all of them are in ``--json``."""

_UNITS: Final = {"us": "µs"}
"""Units of ``--json`` that are printed otherwise."""

MANY: Final = 1000
"""From here on a figure has no digits behind the point."""

UNITS: Final = 3.0
"""Median error (20-fold) from which the likely reason is that times are in another unit."""

CALIBRATED: Final = {
    "cluster with its framework and precision": "calibrated",
    "machine": "calibrated_machine",
    "model and machine": "calibrated_model",
    "model, machine and release": "calibrated_release",
}
"""What one run was calibrated for, in words, and how its scores are called in ``--json``."""

SHOWN_FAMILIES: Final = 15
"""Most families that are listed; all of them are in ``--json``."""

COUNTS: Final = ("fits", "tight", "under_half", "does_not_fit")
"""Columns of a table of verdicts, in the order shown."""


def show(validation: Validation, console: Console, n_worst: int) -> None:
    """Print *validation* on *console*."""
    score = validation.score
    console.print(
        f"[bold]{validation.kind}[/]: {len(validation.rows):,} rows predicted, "
        f"{len(validation.failures):,} failed, {len(validation.families):,} families, "
        f"score {'-' if score is None else format_share(score)}",
        highlight=False,
    )
    if not validation.rows:
        _failures(validation, console)
        return
    console.print(_table("class", validation.groups, validation.score_by_group()))
    families = validation.families
    table = _table("family", families[:SHOWN_FAMILIES])
    if len(families) > SHOWN_FAMILIES:
        table.caption = f"the worst {SHOWN_FAMILIES} of {len(families)} families"
    console.print(table)
    worst = Table(box=None, header_style="dim", title="worst rows", title_justify="left")
    for name in (
        "row",
        "what",
        f"predicted {_UNITS.get(validation.unit, validation.unit)}",
        "measured",
        "predicted / measured",
    ):
        worst.add_column(name, justify="left" if name in ("row", "what") else "right")
    for row in validation.worst(n_worst):
        ratio = row.predicted / row.measured
        worst.add_row(
            escape(row.id), escape(row.what), _figure(row.predicted), _figure(row.measured), f"{ratio:.2f}"
        )
    console.print(worst)
    _failures(validation, console)


def _figure(value: float) -> str:
    """Return *value* with four digits, and all of those before the point.

    >>> _figure(341.617), _figure(292234.2)
    ('341.6', '292,234')
    """
    return f"{value:,.0f}" if abs(value) >= MANY else f"{value:.4g}"


def show_steps(validation: Validation, console: Console, n_worst: int) -> None:
    """Print *validation* of a table of steps: all of that, and what only steps have."""
    show(validation, console, n_worst)
    extra = validation.extra
    if validation.score is not None and validation.score > UNITS:
        console.print(
            f"[yellow]![/] off by {math.exp(validation.score):,.0f} times: is step_time_s in seconds?"
        )
    for name, key in (("GPU", "score_by_gpu"), ("size", "score_by_size"), ("level", "score_by_level")):
        if extra[key]:
            console.print(_scores(name, extra[key]))
    lines = [
        (f"{extra['stress_rows']} rows flagged as stress", extra["stress_score"]),
        (
            f"with {extra['slow_rows']} rows flagged as slow",
            extra["with_slow_score"] if extra["slow_rows"] else None,
        ),
        ("regret, median over groups", extra["regret_median"]),
        ("regret, mean over groups", extra["regret_mean"]),
    ]
    for name, figure in lines:
        if figure is not None:
            console.print(f"{name}: {format_share(figure)}", highlight=False)
    for name, key in CALIBRATED.items():
        after, before = (extra.get(f"{key}_{when}") for when in ("score", "before"))
        if after is not None and before is not None:
            figures = f"{format_share(after)}, the same runs before {format_share(before)}"
            console.print(f"calibrated on one run per {name}: {figures}", highlight=False)
    if extra["kendall_tau"] is not None:
        console.print(
            f"Kendall tau {extra['kendall_tau']:.2f} over {extra['choice_groups']} groups of layouts",
            highlight=False,
        )
        console.print(_choices(extra["choices_by_source"]))
    for words, count in extra["assumed"].items():
        console.print(f"{count} rows: {escape(words)}", style="dim", highlight=False)


def _choices(sources: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(box=None, header_style="dim")
    table.add_column("layouts to choose from, of")
    for head in ("groups", "Kendall tau", "regret, median", "mean"):
        table.add_column(head, justify="right")
    for name, found in sources.items():
        tau = "-" if found["kendall_tau"] is None else f"{found['kendall_tau']:.2f}"
        regrets = (format_share(found[key]) for key in ("regret_median", "regret_mean"))
        table.add_row(escape(name), str(found["groups"]), tau, *regrets)
    return table


def _scores(name: str, scores: dict[str, float]) -> Table:
    table = Table(box=None, header_style="dim")
    table.add_column(name)
    table.add_column("score", justify="right")
    for key, value in scores.items():
        table.add_row(escape(key), format_share(value))
    return table


def show_fit(found: FitValidation, console: Console, n_worst: int) -> None:
    """Print which runs were predicted to fit, by how they ended."""
    score = found.score
    console.print(
        f"[bold]fit[/]: {len(found.verdicts):,} runs, {len(found.failures):,} not predicted, "
        f"score {'-' if score is None else format_share(score)} (mean share of wrong verdicts)",
        highlight=False,
    )
    table = Table(box=None, header_style="dim")
    for name in ("run", "predicted to fit", "of these tight", "under half full", "not to fit"):
        table.add_column(name, justify="left" if name == "run" else "right")
    for name, counts in found.confusion.items():
        table.add_row(escape(name), *(f"{counts[key]:,}" for key in COUNTS))
    console.print(table)
    for one in found.wrong(n_worst):
        console.print(
            f"completed, predicted not to fit: {escape(one.id)} {escape(one.what)}: "
            f"{one.needed_bytes / 1e9:.1f} of {one.limit_bytes / 1e9:.1f} GB",
            highlight=False,
        )
    _reasons(found.failures, console)


def _failures(validation: Validation, console: Console) -> None:
    _reasons(validation.failures, console)
    for note in validation.notes:
        console.print(escape(note), style="dim", highlight=False)


def _table(name: str, spreads: Iterable[Spread], scores: dict[str, float] | None = None) -> Table:
    table = Table(box=None, header_style="dim")
    table.add_column(name)
    heads = ["rows", "median error", "mean", "9 in 10 within", "bias"]
    for head in [*heads, "score"] if scores else heads:
        table.add_column(head, justify="right")
    for found in spreads:
        figures = [found.median_error, found.mean_error, found.p90_error, found.bias]
        cells = [f"{found.n:,}", *map(format_share, figures)]
        table.add_row(escape(found.name), *cells, *([format_share(scores[found.name])] if scores else []))
    return table


def _reasons(failures: Iterable[Failed], console: Console) -> None:
    found = reasons(failures)
    for reason, count in list(found.items())[:SHOWN_REASONS]:
        console.print(
            f"[yellow]![/] {count} not predicted: {escape(reason)}", highlight=False, soft_wrap=True
        )
    if more := sum(list(found.values())[SHOWN_REASONS:]):
        console.print(f"[yellow]![/] {more} not predicted for other reasons: --json has them all")
