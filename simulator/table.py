"""Reads a measured table: CSV or Parquet in, rows with typed access out, columns checked at the door."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from foretrace.door import MOST_VALUES, MOST_WHOLE, open_regular, read_text
from foretrace.simulator.errors import TableError

TRUTHS: Final = {"true": True, "false": False}
"""What a cell that says yes or no has, in any case."""


LISTED: Final = (
    "; docs/accuracy.md lists the columns, and the command that turns tables of publications into them"
)


class Row:
    """One row of a measured table. Empty cells count as missing.

    *number*: position of the row in its table, from 1: its name where the table has no ids.
    """

    def __init__(self, cells: Mapping[str, object], number: int) -> None:
        self._cells = cells
        self.number = number

    def text(self, column: str, default: str = "") -> str:
        """Return the cell as text, *default* if it is empty, no number, or there is no such column."""
        value = self._cells.get(column)
        is_empty = value is None or value == "" or (isinstance(value, float) and math.isnan(value))
        return default if is_empty else str(value)

    def integer(self, column: str, default: int | None = None) -> int:
        """Return the cell as a whole number. Raises TableError as ``number_in``, or if it is not whole."""
        found = self.number_in(column, default)
        if found != int(found) or abs(found) > MOST_WHOLE:
            raise TableError(f"{column}={found!r}: a whole number of at most 64 bits is needed")
        return int(found)

    def number_in(self, column: str, default: float | None = None) -> float:
        """Return the cell as a number.

        Raises TableError if it is empty and there is no *default*, or it is no number.
        """
        cell = self.text(column)
        if not cell:
            if default is None:
                raise TableError(f"{column} is not given")
            return default
        try:
            found = float(cell)
        except ValueError:
            found = math.nan
        if not math.isfinite(found):
            raise TableError(f"{column}={cell!r}: a number is needed")
        return found

    def above_zero(self, column: str) -> float:
        """Return the cell as a number. Raises TableError as ``number_in``, or if it is not above zero."""
        found = self.number_in(column)
        if found <= 0:
            raise TableError(f"{column}={self.text(column)}: a number above zero is needed")
        return found

    def flag(self, column: str, *, default: bool) -> bool:
        """Return whether the cell is true, *default* if it is empty. Raises TableError if it is neither."""
        cell = self.text(column)
        if cell and cell.lower() not in TRUTHS:
            raise TableError(f"{column}={cell!r}: true or false")
        return TRUTHS[cell.lower()] if cell else default

    def beside(self, folder: Path, columns: Iterable[str]) -> Row:
        """Return the row with those of *columns* that name a file of *folder* as its path."""
        paths = {name: folder / word for name in columns if (word := self.text(name))}
        found = {name: str(path) for name, path in paths.items() if path.is_file()}
        return Row({**self._cells, **found}, self.number)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the table, with or without a value in this row."""
        return tuple(self._cells)

    @property
    def id(self) -> str:
        """What the table calls the row, or its number."""
        return self.text("id") or f"row {self.number}"


def read_table(path: str | Path, required: Iterable[str]) -> list[Row]:
    """Return the rows of a ``.csv`` or ``.parquet`` file.

    Raises TableError if it cannot be read, has no rows, or a column is missing.
    """
    path = Path(path)
    rows = _parquet(path) if path.suffix == ".parquet" else _csv(path)
    if not rows:
        raise TableError(f"{path}: no rows")
    found = [Row(cells, number) for number, cells in enumerate(rows, start=1)]
    require(found[0], required, path)
    return found


def require(row: Row, columns: Iterable[str], path: str | Path) -> None:
    """Refuse a table whose first *row* lacks one of *columns*. Raises TableError, which names the table."""
    if missing := [column for column in columns if column not in row.columns]:
        raise TableError(f"{path}: no column {', '.join(missing)}; it has {', '.join(row.columns)}{LISTED}")


def _csv(path: Path) -> list[dict[str, object]]:
    try:
        # ``newline=""`` leaves breaks within quotes to csv; ``strict`` refuses what it would guess at
        # otherwise.
        reader = csv.reader(io.StringIO(read_text(path, TableError), newline=""), strict=True)
        columns = next(reader, [])
        # A blank line is no row.
        return [_cells(columns, cells, f"{path}, line {reader.line_num}") for cells in reader if cells]
    except csv.Error as error:
        raise TableError(f"{path} is not a CSV table: {error}") from None


def _cells(columns: list[str], cells: list[str], where: str) -> dict[str, object]:
    if len(cells) != len(columns):
        raise TableError(f"{where}: {len(cells)} cells for {len(columns)} columns; is the table cut off?")
    return dict(zip(columns, cells, strict=True))


def _parquet(path: Path) -> list[dict[str, object]]:
    try:
        with open_regular(path, TableError) as file:
            parquet = pq.ParquetFile(file)
            # By the footer, before anything is read: a small file may unpack to more than memory holds.
            if parquet.metadata.num_rows * parquet.metadata.num_columns > MOST_VALUES:
                raise TableError(f"{path}: more than {MOST_VALUES:,} cells")
            found: list[dict[str, object]] = parquet.read().to_pylist()
    except OSError as error:
        raise TableError(f"{path} cannot be read: {error.strerror or error}") from None
    except pa.ArrowException as error:
        raise TableError(f"{path} is not a Parquet table: {error}") from None
    return found
