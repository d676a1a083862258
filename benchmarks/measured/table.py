"""Rows of published tables: cells as people write them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from foretrace.simulator import table
from foretrace.simulator.errors import TableError
from measured.spelling import stated, yes_or_no

THOUSANDS: Final = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
"""A number as people write it."""


class Row(table.Row):
    """One row of a published table. Cells that say that nothing is stated count as missing."""

    def count(self, column: str, default: int | None = None) -> int:
        """Return the cell as a whole number. Raises TableError as ``integer``, or if it is below 1."""
        found = self.integer(column, default)
        if found < 1:
            raise TableError(f"{column}={found}: at least 1")
        return found

    def number_in(self, column: str, default: float | None = None) -> float:
        """Return the cell as a number; thousands may have commas between. Raises TableError if it is none."""
        cell = stated(self.text(column))
        if cell.lower() == "none":
            cell = ""
        plain = cell.replace(",", "") if THOUSANDS.fullmatch(cell) else cell
        return table.Row({column: plain}, self.number).number_in(column, default)

    def flag(self, column: str, *, default: bool) -> bool:
        """Return whether the cell says yes, *default* if nothing. Raises TableError if it is neither."""
        said = yes_or_no(self.text(column), column)
        return default if said is None else said

    def over(self, other: Row) -> Row:
        """Return the row with the cells of *other* where its own are empty."""
        own = {column: cell for column, cell in self._cells.items() if self.text(column)}
        return Row({**other._cells, **own}, self.number)

    def only(self, columns: Iterable[str]) -> Row:
        """Return the row with *columns* alone."""
        return Row({column: self._cells.get(column) for column in columns}, self.number)

    @property
    def id(self) -> str:
        """What the table calls the row, or its number."""
        return self.text("step_id") or super().id


def read_table(path: str | Path, required: Iterable[str]) -> list[Row]:
    """Return the rows of a table. Raises TableError as ``foretrace.simulator.table.read_table``."""
    return [
        Row({name: row.text(name) for name in row.columns}, row.number)
        for row in table.read_table(path, required)
    ]
