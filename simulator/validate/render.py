"""Shows a validation to a person, in a terminal or as a page: scores, worst rows, reasons for failures."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from foretrace.simulator.errors import TableError
from foretrace.simulator.validate.runs import FitValidation
from foretrace.simulator.validate.scores import Failed, Spread, Validation, reasons
from foretrace.traces.replacing import replacing
from foretrace.traces.report.format import format_share

SHOWN_REASONS: Final = 12
"""Most reasons for failures that are listed; all of them are in ``--json``."""

_UNITS: Final = {"us": "µs"}
"""Units of ``--json`` that are printed otherwise."""

MANY: Final = 1000
"""From here on a figure has no digits behind the point."""

UNITS: Final = 3.0
"""Median error (20-fold) from which the likely reason is that times are in another unit."""

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
    if extra["rest_score"] is not None:
        rest = f"{extra['rest_rows']} rows that do not count: {format_share(extra['rest_score'])}"
        console.print(rest, highlight=False)
    for words, count in extra["assumed"].items():
        console.print(f"{count} rows: {escape(words)}", style="dim", highlight=False)


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


ABOUT = (
    "Every point is a measured training run that was simulated as described, on logarithmic axes. Runs that "
    "could not be simulated: {failures}. The error of a run is |ln(predicted / measured)|; families (source, "
    "model, GPU, precision) count the same, however many runs they have."
)


def write_page(path: str | Path, found: Validation) -> Path:
    """Write the page of *found*, a validation of steps, to *path*, and return it.

    Raises TableError if there is nothing to draw, or the file cannot be written.
    """
    target = Path(path)
    if not found.rows:
        raise TableError(f"{target}: no row was simulated, so there is nothing to draw")
    try:
        with replacing(target) as file:
            file.write(page(found).encode())
    except OSError as error:
        raise TableError(f"{target} cannot be written: {error.strerror or error}") from None
    return target


def page(found: Validation) -> str:
    """Return a page of predicted against measured step times, in one HTML file, every run by its name."""
    rows = [
        {
            "id": row.id,
            "family": row.family,
            "class": row.group,
            "device": device_of(row.what),
            "what": row.what,
            "predicted": float(f"{row.predicted:.5g}"),
            "measured": float(f"{row.measured:.5g}"),
        }
        for row in found.rows
    ]
    data = {
        "about": ABOUT.format(failures=len(found.failures)),
        "classes": sorted({row.group for row in found.rows}),
        "devices": sorted({device_of(row.what) for row in found.rows}),
        "rows": rows,
    }
    template = (resources.files("foretrace.simulator") / "pages" / "steps.html").read_text(encoding="utf-8")
    # Within a script ``</`` would end it, whatever text it stands in.
    return template.replace("/*DATA*/", json.dumps(data, separators=(",", ":")).replace("</", "<\\/"))


def device_of(what: str) -> str:
    """Return the GPU that the name of a row of steps ends with.

    >>> device_of("llama3-8b pp1 dp8 zero1 mbs 1 x 4, 8 h100-sxm")
    'h100-sxm'
    """
    return what.rpartition(" ")[2]
