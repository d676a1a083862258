"""Typed access to the keys of a Hugging Face ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Final, TypeVar

from foretrace.door import ShapeError, own_table, shaped
from foretrace.simulator.errors import ModelError

T = TypeVar("T")
Shape = dict[str, int | bool | str]
"""Fields of a model, by name."""


SAVED_AS: Final[Mapping[str, str]] = MappingProxyType({"num_experts": "num_local_experts"})
"""What transformers 5 calls a key when it writes it."""


@cache
def _defaults() -> Mapping[str, Mapping[str, Mapping[str, object]]]:
    return own_table("simulator/models/hf_defaults.toml")


def with_defaults(values: Mapping[str, object], kind: str, part: str = "text") -> dict[str, object]:
    """Return *values* over what the class of a *kind* has by default; of its ``"text"`` or ``"vision"``."""
    known = _defaults()[part].get(kind, {})
    return {**{key: value for key, value in known.items() if SAVED_AS.get(key) not in values}, **values}


class Config:
    """A config file whose keys are asked for by name and type."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self._values = values
        self._where = where

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a whole number; ``null`` and a missing key give *default*."""
        return self._typed(int, key, default)

    def flag(self, key: str, *, default: bool) -> bool:
        """Return true or false; ``null`` and a missing key give *default*."""
        return self._typed(bool, key, default)

    def word(self, key: str, default: str) -> str:
        """Return a text; ``null`` and a missing key give *default*."""
        return self._typed(str, key, default)

    def within(self, key: str, default: Mapping[str, object] | None = None) -> Config:
        """Return the object under *key*; ``null`` and a missing key give *default*."""
        return Config(self._typed(dict, key, default), f"{self._where}: {key}")

    def number(self, key: str, default: float) -> float:
        """Return a number; ``null`` and a missing key give *default*."""
        return self._typed(float, key, default)

    def items(self, key: str, kind: type[T]) -> list[T]:
        """Return a list of *kind*; ``null`` and a missing key give an empty one."""
        listed = self._typed(list, key, [])
        try:
            return [shaped(kind, one, key) for one in listed]
        except ShapeError as error:
            raise ModelError(f"{self._where}: {error}") from None

    def alike(self, key: str) -> int:
        """Return a whole number, or the one that a list has for every layer."""
        if not isinstance(self._values.get(key), list):
            return self.integer(key)
        listed = sorted(set(self.items(key, int)))
        self.need(len(listed) == 1, f"{key} has {listed}: equal in all layers is supported")
        return listed[0]

    def automatic(self, key: str, value: int) -> int:
        """Return a whole number; ``"auto"``, ``null`` and a missing key give *value*."""
        return value if self._values.get(key) == "auto" else self.integer(key, value)

    def multiple(self, key: str, value: int, unit: int) -> int:
        """Return how many times *unit* the *value* of *key* is; a ModelError unless that is whole."""
        self.need(bool(unit) and value % unit == 0, f"{key}={value} is no multiple of an expert's {unit}")
        return value // unit

    def need(self, is_so: bool, otherwise: str) -> None:  # noqa: FBT001 - reads as an assertion
        """Raise ModelError with what is *otherwise* unless *is_so*."""
        if not is_so:
            raise ModelError(f"{self._where}: {otherwise}")

    def _typed(self, kind: type[T], key: str, default: object) -> T:
        value = self._values.get(key, self._values.get(SAVED_AS.get(key, "")))
        if value is None and (value := default) is None:
            raise ModelError(f"{self._where}: missing key {key!r}")
        try:
            found: T = shaped(kind, value, key)
        except ShapeError as error:
            raise ModelError(f"{self._where}: {error}") from None
        return found
