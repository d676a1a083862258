"""The settings of a job by name: the tables of a file they stand in, their types, how a value is checked.

A setting has one name everywhere: in a flat file, as a flag (``--global-batch``) and in ``run.json``. A file
may also sort settings into the tables of ``TABLES``. docs/simulation.md lists them.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from foretrace.door import counted, own_table
from foretrace.simulator.errors import ConfigError

_ROWS: Final[Mapping[str, Mapping[str, tuple[str, str, str]]]] = own_table("simulator/settings.toml")

LISTED: Final[Mapping[str, Mapping[str, tuple[str, str]]]] = MappingProxyType(
    {
        heading: {name: (kind, text) for name, (kind, text, _) in rows.items()}
        for heading, rows in _ROWS.items()
    }
)
"""Type and line of ``--help`` of each setting, by heading there; only of what has a flag of its own."""


def _tables() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for rows in _ROWS.values():
        for name, (_, _, place) in rows.items():
            table, _, key = place.partition(".")
            found.setdefault(table, {})[key or name] = name
    return found


TABLES: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType(_tables())
"""Tables of a file; in each, what a key is called there and the setting it gives.

``[framework]`` also takes the conventions of a framework by their names.
"""

OUTER: Final = tuple(TABLES["outer"].values())
"""Settings of sites that train apart."""

CONVENTIONS: Final = "conventions"
"""Setting that holds conventions by name."""

SHAPE: Final = "shape"
"""Setting that holds the fields of a model that is no preset; in a file, ``[model]`` has them by name."""

_TYPES: Final = {"str": str, "int": int, "float": float, "bool": bool, "tuple": tuple}

KINDS: Final[Mapping[str, type]] = MappingProxyType(
    {
        **{name: _TYPES[kind] for rows in LISTED.values() for name, (kind, _) in rows.items()},
        **dict.fromkeys((CONVENTIONS, SHAPE), dict),
    }
)
"""Every setting and its type."""

DEGREES: Final = frozenset({"tp", "cp", "ep", "pp", "dp"})
"""Settings by which ranks are divided; that of tensor parallelism in experts may be 0: not said."""

MOST: Final = 2**31 - 1
"""Largest number of a setting: what a timeline numbers steps and micro-batches with."""

_TOML_NAMES: Final = {
    str: 'text, in "quotes"',
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    dict: "a table of names and values",
    tuple: "a list of whole numbers",
}


def near_setting(name: str) -> str:
    """Return the setting that *name* is most like, in words; where it is like none, where all are listed.

    >>> near_setting("global_bacth"), near_setting("description")
    ('did you mean global_batch?', 'foretrace simulate --help lists the settings of a job')
    """
    near = difflib.get_close_matches(name, KINDS, n=1)
    return f"did you mean {near[0]}?" if near else "foretrace simulate --help lists the settings of a job"


def checked(place: str, name: str, value: object) -> Any:
    """Return *value* if it has the type of setting *name*, and any job may have it. Raises ConfigError."""
    if name not in KINDS:
        raise ConfigError(f"unknown setting {name!r}; {near_setting(name)}")
    kind = KINDS[name]
    # A list first: a flag gives it as one word, which is no tuple yet.
    if kind is tuple and (listed := _whole_numbers(value)) is not None:
        return listed
    # 2 is written for 2.0, too. To Python True is an int, and must not pass for a number.
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise ConfigError(f"{place} = {value!r}: must be {_TOML_NAMES[kind]}")
    if isinstance(value, int) and abs(value) > MOST:
        raise ConfigError(f"{place} = {value}: at most {MOST:,}")
    if name in DEGREES and isinstance(value, int) and value < 1:  # before anything is divided by it
        raise ConfigError(f"{place}={value}: a parallel degree is a whole number of at least 1")
    # Opening a path with NUL in it raises ValueError, which is no OSError.
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(f"{place} = {value!r}: no name and no path holds the character NUL")
    return value


def _whole_numbers(value: object) -> tuple[int, ...] | None:
    """Return a list of whole numbers, or one as a flag gives it (``"15, 16, 16"``); None if it is not one."""
    parts = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        return None
    if not all(isinstance(part, int) or (isinstance(part, str) and counted(part) >= 0) for part in parts):
        return None
    return tuple(int(part) for part in parts)
