"""The verb ``foretrace validate``: predictions held against tables of measurements."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from simulator.validate import Validation

Command = TypeVar("Command", bound=Callable[..., Any])


@click.group()
def validate() -> None:
    """Predict every row of a measured table and say how far off it is, by family.

    The score is the mean over families of the median |ln(predicted / measured)|. Rows that cannot be
    predicted are counted, with the reason; none is left out.
    """


def common(command: Command) -> Command:
    """Add what every table takes: the table, ``--worst`` and ``--json``."""
    command = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")(command)
    command = click.option(
        "--worst", type=click.IntRange(min=0), default=10, show_default=True, help="Worst rows to list."
    )(command)
    return click.argument("table", type=click.Path(dir_okay=False))(command)


def report(validation: Validation, worst: int, *, as_json: bool) -> None:
    """Print *validation*, for a program or for a person."""
    if as_json:
        click.echo(json.dumps(validation.document(worst)))
        return
    from rich.console import Console

    from simulator.validate_render import show

    show(validation, Console(), worst)


@validate.command()
@common
@click.option("--device", help="Device of the catalogue, where the table does not name one.")
@click.option(
    "--burst/--sustained", default=None, help="Whether clocks were free of lasting load. [default: by form]"
)
def kernels(table: str, worst: int, device: str | None, *, burst: bool | None, as_json: bool) -> None:
    """Times of matrix products and attention kernels.

    For example: foretrace validate kernels kernels.csv
    """
    from simulator.validate_kernels import validate_kernels

    report(validate_kernels(table, device=device, burst=burst), worst, as_json=as_json)
