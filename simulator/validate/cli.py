"""The verb ``foretrace validate``: predictions held against tables of measurements."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import click

if TYPE_CHECKING:
    from rich.console import Console

    from foretrace.simulator.validate.fit import FitValidation
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
        click.echo(json.dumps(document))
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
@click.option("--device", help="Device of the catalogue, where the table does not name one.")
@click.option(
    "--burst/--sustained",
    default=None,
    help="Whether kernels ran at burst clocks, without sustained load. [default: from the form of the table]",
)
def kernels(table: str, worst: int, device: str | None, *, burst: bool | None, as_json: bool) -> None:
    """Times of matrix products and attention kernels.

    For example: foretrace validate kernels kernels.csv
    """
    from foretrace.simulator.validate.kernels import validate_kernels
    from foretrace.simulator.validate.render import show

    report(validate_kernels(table, device=device, burst=burst), show, worst, as_json=as_json)


@validate.command()
@common
@click.option(
    "--machine",
    "machines",
    multiple=True,
    metavar="WORDS=MACHINE",
    help="Machine, by name or as a TOML file, for rows whose hardware begins with WORDS. Repeatable.",
)
def collectives(table: str, worst: int, machines: tuple[str, ...], *, as_json: bool) -> None:
    """Times of collectives and transfers between GPUs.

    For example: foretrace validate collectives collectives.csv --machine "A100 DGX=dgx-a100-staged"
    """
    from foretrace.simulator.errors import TableError
    from foretrace.simulator.validate.collectives import validate_collectives
    from foretrace.simulator.validate.render import show

    stated = []
    for machine in machines:
        words, equals, name = machine.rpartition("=")
        if not (words.strip() and equals and name.strip()):
            raise TableError(f"--machine {machine!r}: WORDS=MACHINE, as in 'A100 DGX=dgx-a100-staged'")
        stated.append((words.strip(), name.strip()))
    report(validate_collectives(table, stated), show, worst, as_json=as_json)


@validate.command()
@common
@click.option(
    "--steps", type=click.Path(dir_okay=False), help="Table of step times. [default: steps.csv beside TABLE]"
)
def memory(table: str, worst: int, steps: str | None, *, as_json: bool) -> None:
    """Peak memory of a rank, allocated or reserved.

    For example: foretrace validate memory memory.csv
    """
    from foretrace.simulator.validate.memory import validate_memory
    from foretrace.simulator.validate.render import show

    report(validate_memory(table, steps=steps), show, worst, as_json=as_json)


@validate.command()
@common
@click.option(
    "--ran",
    type=click.Path(dir_okay=False),
    help="Table of runs that completed. [default: memory.csv beside TABLE]",
)
@click.option(
    "--steps", type=click.Path(dir_okay=False), help="Table of step times. [default: steps.csv beside TABLE]"
)
def fit(table: str, worst: int, ran: str | None, steps: str | None, *, as_json: bool) -> None:
    """Whether runs fit into memory, those that failed too.

    For example: foretrace validate fit failed_runs.csv
    """
    from foretrace.simulator.validate.fit import validate_fit
    from foretrace.simulator.validate.render import show_fit

    report(validate_fit(table, ran=ran, steps=steps), show_fit, worst, as_json=as_json)


@validate.command()
@common
@click.option(
    "--calibrate",
    type=click.Choice(["one-run"]),
    help="Calibrate each cluster on one of its runs, and score the rest; each machine and model likewise.",
)
@click.option("--workers", type=click.IntRange(min=1), help="Processes to use. [default: one per processor]")
@click.option(
    "--html", type=click.Path(dir_okay=False), help="HTML page to write, predicted against measured."
)
def steps(
    table: str, worst: int, calibrate: str | None, workers: int | None, html: str | None, *, as_json: bool
) -> None:
    """Time of a training step, each row simulated as a job.

    For example: foretrace validate steps steps.csv --calibrate one-run --html steps.html
    """
    from rich.console import Console
    from rich.progress import Progress

    from foretrace.simulator.validate.render import show_steps
    from foretrace.simulator.validate.steps import validate_steps

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("simulating", total=None)
        found = validate_steps(
            table,
            calibrate=calibrate,
            workers=workers,
            tell=lambda done, total: progress.update(task, advance=done, total=total),
        )
    if html is not None:
        from foretrace.simulator.validate.page import write_page

        write_page(html, found)
    report(found, show_steps, worst, as_json=as_json)
