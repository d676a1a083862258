"""Reads a machine or a device from TOML, and says what is wrong in the words of the file."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any, Final, TypeVar

from foretrace.door import load
from foretrace.topologies.errors import CatalogError, TopologyError, UnitError

T = TypeVar("T")
_REQUIRED: Final = object()


class Section:
    """One table of a TOML file: typed values out, sources collected, unknown keys refused.

    A figure is written ``key = "450 GB/s"`` or ``key = { value = "450 GB/s", source = "..." }``; a source may
    be the name of an entry of the file's ``[sources]``.
    """

    def __init__(
        self, table: Mapping[str, Any], where: str, known_sources: Mapping[str, str] | None = None
    ) -> None:
        self.where = where
        self.sources: dict[str, str] = {}
        self._table = table
        self._known = known_sources if known_sources is not None else _named_sources(table, where)
        self._read: set[str] = {"sources"}

    def __contains__(self, key: str) -> bool:
        return key in self._table

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def is_table(self, key: str) -> bool:
        """Return whether *key* holds a table rather than a value."""
        return isinstance(self._table.get(key), dict)

    def get(self, key: str, convert: Callable[[Any], T], default: Any = _REQUIRED) -> T:
        """Return the value of *key* through *convert*, or *default*.

        Raises:
            CatalogError: the key is missing and has no default, or *convert* refuses its value.
        """
        self._read.add(key)
        if key not in self._table:
            if default is _REQUIRED:
                # A key that was read already is spelt right, and cannot be meant for this one.
                near = difflib.get_close_matches(key, set(self._table) - self._read, n=1, cutoff=0.8)
                hint = f"; is {near[0]!r} meant for it?" if near else ""
                raise CatalogError(f"{self.where}: {key} is missing{hint}")
            return default  # type: ignore[no-any-return]  # the caller's own default
        raw = self._table[key]
        if isinstance(raw, dict) and "value" in raw:
            if unknown := set(raw) - {"value", "source"}:
                raise CatalogError(
                    f"{self.where}: {key} has {sorted(unknown)[0]!r}; it takes value and source"
                )
            if source := raw.get("source"):
                self.sources[key] = self._known.get(source, source)
            raw = raw["value"]
        try:
            return convert(raw)
        except TopologyError as error:  # a unit that is wrong, or one table of a list
            # An error in one table of a list names its place itself; its text begins with the name of that
            # table.
            own = isinstance(error, UnitError) and not str(error).startswith("[[")
            raise type(error)(f"{self.where}: {f'{key} = ' if own else ''}{error}") from None
        except (TypeError, ValueError) as error:
            raise CatalogError(f"{self.where}: {key} = {raw!r}: {error}") from None

    def section(self, key: str) -> Section:
        """Return the table *key*, empty if the file has none."""
        self._read.add(key)
        table = self._table.get(key, {})
        if not isinstance(table, dict):
            raise CatalogError(f"{self.where}: {key} = {table!r} must be a table, [{key}]")
        return Section(table, f"{self.where} [{key}]", self._known)

    def sections(self) -> dict[str, Section]:
        """Return every table in this one by name."""
        return {
            key: self.section(key)
            for key, value in self._table.items()
            if isinstance(value, dict) and "value" not in value
        }

    def note_source(self, key: str) -> None:
        """Take the table's own ``source`` as that of *key*, for a figure that is a table itself."""
        source = self.get("source", text, "")
        if source:
            self.sources[key] = self._known.get(source, source)

    def done(self) -> None:
        """Raise CatalogError if the table has a key that nobody asked for."""
        for key in self._table:
            if key not in self._read:
                near = difflib.get_close_matches(key, self._read - {"sources"}, n=1)
                hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(sorted(self._read))}"
                raise CatalogError(f"{self.where}: unknown key {key!r}; {hint}")


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file. Raises CatalogError if it cannot be read."""
    return load(path, "TOML", CatalogError)


def text(value: object) -> str:
    """Return *value* if it is text. Raises TypeError if it is not."""
    if not isinstance(value, str):
        raise TypeError('must be text, in "quotes"')
    return value


def whole(value: object) -> int:
    """Return *value* if it is a whole number. Raises TypeError if it is not."""
    # To Python True is an int.
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError("must be a whole number")
    return value


def number(value: object) -> float:
    """Return *value* if it is a finite number without a unit. Raises TypeError if it is not."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise TypeError("must be a number")
    return float(value)


def truth(value: object) -> bool:
    """Return *value* if it is true or false. Raises TypeError if it is not."""
    if not isinstance(value, bool):
        raise TypeError("must be true or false")
    return value


def _named_sources(table: Mapping[str, Any], where: str) -> Mapping[str, str]:
    named = table.get("sources", {})
    if not isinstance(named, dict) or not all(isinstance(value, str) for value in named.values()):
        raise CatalogError(f"{where}: [sources] maps short names to text")
    return named
