"""Tables that the verbs about machines print, in a terminal and in a file or a pipe."""

from __future__ import annotations

from typing import Final

import click
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

FILE_WIDTH: Final = 160
"""Columns of what goes to a file or a pipe."""


def table_of(*columns: str) -> Table:
    """Return an empty table with *columns*, whose names are never markup."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(escape(column), no_wrap=True)
    return table


def add_row(table: Table, *cells: str) -> None:
    """Add a row of plain text: what a file calls things is never markup."""
    table.add_row(*map(escape, cells))


def print_table(table: Table) -> None:
    """Print *table*; what goes to a file or a pipe has no spaces at the ends of its lines."""
    console = Console(emoji=False)
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as held:
        console.print(table, width=FILE_WIDTH)
    click.echo("\n".join(line.rstrip() for line in held.get().splitlines()))
