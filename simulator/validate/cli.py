"""The verb ``foretrace validate``: predictions held against tables of measurements."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import click

from foretrace.door import json_text

if TYPE_CHECKING:
    from rich.console import Console

    from foretrace.simulator.validate.runs import FitValidation
    from foretrace.simulator.validate.scores import Validation

Command = TypeVar("Command", bound=Callable[..., Any])
Found = TypeVar("Found")
Show: TypeAlias = "Callable[[Found, Console, int], None]"
"""Prints what was found, with so many of the worst rows."""


@click.group()
def validate() -> None:
    """Predict every row of a measured table and say how far off it is, by family.

    The score is the mean over families of the median |ln(predicted / measured)|. Rows that cannot be
    predicted are counted, with the reason; none is left out. If none could be predicted, the exit status
    is 1.
    """


def common(command: Command) -> Command:
    """Add what every table takes: the table, ``--worst`` and ``--json``."""
    command = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")(command)
    command = click.option(
        "--worst",
        type=click.IntRange(min=0),
        default=10,
        show_default=True,
        help="Number of worst rows to list.",
    )(command)
    return click.argument("table", type=click.Path(dir_okay=False))(command)


def report(found: Validation | FitValidation, show: Show[Any], worst: int, *, as_json: bool) -> None:
    """Print *found*, for a program or, with *show*, for a person; end with status 1 if it has no row."""
    document = found.document(worst)
    if as_json:
        click.echo(json_text(document))
    else:
        from foretrace.traces.console import stdout

        show(found, stdout(highlight=True), worst)
    if document["rows"] and document["failures"] == document["rows"]:
        reason = next(iter(document["failure_reasons"]))
        rows = f"{document['rows']:,} rows of {found.table}"
        click.echo(f"Error: none of the {rows} could be predicted; most often: {reason}", err=True)
        click.get_current_context().exit(1)


@validate.command()
@common
@click.option("--device", default="", help="Device, in place of the hardware of the rows.")
def kernels(table: str, worst: int, device: str, *, as_json: bool) -> None:
    """Times of matrix products and attention kernels.

    For example: foretrace validate kernels kernels.csv
    """
    from foretrace.simulator.validate.kernels import validate_kernels
    from foretrace.simulator.validate.render import show

    report(validate_kernels(table, device=device), show, worst, as_json=as_json)


@validate.command()
@common
def collectives(table: str, worst: int, *, as_json: bool) -> None:
    """Times of collectives and transfers between GPUs.

    For example: foretrace validate collectives collectives.csv
    """
    from foretrace.simulator.validate.collectives import validate_collectives
    from foretrace.simulator.validate.render import show

    report(validate_collectives(table), show, worst, as_json=as_json)


@validate.command()
@common
def memory(table: str, worst: int, *, as_json: bool) -> None:
    """Peak memory of a rank, allocated or reserved.

    For example: foretrace validate memory memory.csv
    """
    from foretrace.simulator.validate.render import show
    from foretrace.simulator.validate.runs import validate_memory

    report(validate_memory(table), show, worst, as_json=as_json)


@validate.command()
@common
def fit(table: str, worst: int, *, as_json: bool) -> None:
    """Whether runs fit into memory, those that failed too.

    For example: foretrace validate fit runs.csv
    """
    from foretrace.simulator.validate.render import show_fit
    from foretrace.simulator.validate.runs import validate_fit

    report(validate_fit(table), show_fit, worst, as_json=as_json)


@validate.command()
@common
@click.option("--workers", type=click.IntRange(min=1), help="Processes to use. [default: one per processor]")
@click.option(
    "--html", type=click.Path(dir_okay=False), help="HTML page to write, predicted against measured."
)
def steps(table: str, worst: int, workers: int | None, html: str | None, *, as_json: bool) -> None:
    """Time of a training step, each row simulated as a job.

    For example: foretrace validate steps steps.csv --html steps.html
    """
    from rich.console import Console
    from rich.progress import Progress

    from foretrace.simulator.validate.render import show_steps, write_page
    from foretrace.simulator.validate.runs import validate_steps
    from foretrace.traces.replacing import check_can_write

    check_can_write(Path(html) if html is not None else None)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("simulating", total=None)
        found = validate_steps(
            table,
            workers=workers,
            tell=lambda done, total: progress.update(task, advance=done, total=total),
        )
    if html is not None:
        write_page(html, found)
    report(found, show_steps, worst, as_json=as_json)
