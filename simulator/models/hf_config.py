"""Typed access to the keys of a Hugging Face ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping

from foretrace.simulator.errors import ModelError

Shape = dict[str, int | bool | str]
"""Fields of a model, by name."""


class Config:
    """A config file whose keys are asked for by name and type."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self._values = values
        self._where = where

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a whole number; ``null`` and a missing key give *default*."""
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self._where}: missing key {key!r}")
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelError(f"{self._where}: {key}={value!r}: a whole number is needed")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """Return true or false; ``null`` and a missing key give *default*."""
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelError(f"{self._where}: {key}={value!r}: true or false is needed")
        return value

    def word(self, key: str, default: str) -> str:
        """Return a text; ``null`` and a missing key give *default*."""
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise ModelError(f"{self._where}: {key}={value!r}: a text is needed")
        return value

    def within(self, key: str, default: Mapping[str, object] | None = None) -> Config:
        """Return the object under *key*; ``null`` and a missing key give *default*."""
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self._where}: missing key {key!r}")
        if not isinstance(value, Mapping):
            raise ModelError(f"{self._where}: {key}={value!r}: an object is needed")
        return Config(value, f"{self._where}: {key}")

    def number(self, key: str, default: float) -> float:
        """Return a number; ``null`` and a missing key give *default*."""
        value = self._values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{self._where}: {key}={value!r}: a number is needed")
        return float(value)
