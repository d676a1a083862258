"""Reads the values of a ``run.json``: their shapes are checked, and what is wrong is said in words."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from foretrace.traces.audit import Audit
from foretrace.traces.errors import RunError, TraceError
from foretrace.traces.layout import Group, Layout

SHOWN_CHARACTERS: Final = 60
"""Most characters of a wrong value that an error shows, so that it stays one line."""

_NONE: Final = type(None)
_JSON_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "origin": (str,),
    "world_size": (int,),
    "name": (str,),
    "layout": (dict, _NONE),
    "model": (dict, _NONE),
    "cluster": (dict, _NONE),
    "job": (dict, _NONE),
    "groups": (list,),
    "representatives": (list, _NONE),
    "clock": (dict,),
    "processes": (dict,),
    "summary": (dict,),
    "warnings": (list,),
    "dropped": (dict,),
    "audit": (dict, _NONE),
    "versions": (dict,),
    "started": (str, _NONE),
    "finished": (bool,),
}
"""What each key of the JSON object may be."""

_WORDS: Final[Mapping[type, str]] = {
    str: "a text",
    int: "a whole number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
    _NONE: "null",
}
"""What a person who reads JSON calls these types."""


def info_values(document: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Turn the JSON object of a run into the arguments of ``RunInfo``, clocks into those of ``Clock``.

    Args:
        document: what ``run.json`` holds.
        known: keys to take; others are left out.

    Raises:
        RunError: a key is missing, or its value has a wrong shape.
        LayoutError: the degrees are not those of a layout.
    """
    values = {name: document[name] for name in known if name in document}
    for name, kinds in _JSON_TYPES.items():
        if name in values and type(values[name]) not in kinds:
            raise _wrong(name, values[name], " or ".join(_WORDS[kind] for kind in kinds))
    for name in ("origin", "world_size"):
        if name not in values:
            raise RunError(f"no {name!r} in it")
    for name, (build, needed) in _BUILT.items():
        if values.get(name) is None:
            continue
        try:
            values[name] = build(values[name])
        except TraceError:
            raise
        except (ValueError, TypeError, AttributeError, KeyError, OverflowError):
            raise _wrong(name, values[name], needed) from None
    return values


def _wrong(name: str, value: object, needed: str) -> RunError:
    """Return the error that says that *name* cannot be *value*."""
    text = json.dumps(value)
    shown = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
    return RunError(f"{name} is {shown}, but {needed} is needed")


def _groups(given: list[Any]) -> tuple[Group, ...]:
    return tuple(
        Group(id=int(group["id"]), axis=str(group["axis"]), ranks=tuple(map(int, group["ranks"])))
        for group in given
    )


def _clock(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a clock."""
    whole = {name: int(given.get(name, 0)) for name in ("offset_ns", "uncertainty_ns", "reference_ns")}
    drift_ppb = float(given.get("drift_ppb", 0.0))
    return {**whole, "drift_ppb": drift_ppb, "applied": bool(given.get("applied", True))}


def _process(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a process."""
    texts = {name: str(given.get(name, "")) for name in ("host", "namespace", "error")}
    whole = {name: int(given.get(name, 0)) for name in ("pid", "error_ns")}
    is_finished, sees_calls = bool(given.get("is_finished", False)), bool(given.get("sees_calls", True))
    return {**texts, **whole, "is_finished": is_finished, "sees_calls": sees_calls}


_BUILT: Final[Mapping[str, tuple[Callable[[Any], object], str]]] = {
    "layout": (lambda given: Layout(**given), "an object of degrees pp, dp, cp, tp and ep"),
    "groups": (_groups, "a list of objects with id, axis and ranks"),
    "clock": (
        lambda given: {int(rank): _clock(clock) for rank, clock in given.items()},
        "an object that leads from a rank to the numbers of its clock",
    ),
    "processes": (
        lambda given: {int(rank): _process(process) for rank, process in given.items()},
        "an object that leads from a rank to its process",
    ),
    "dropped": (
        lambda given: {reason: int(count) for reason, count in given.items()},
        "an object that leads from a reason to a count",
    ),
    "audit": (Audit.from_json, "an object with collectives, transfers, reasons and differences"),
    "warnings": (lambda given: tuple(map(str, given)), "a list of texts"),
    "representatives": (lambda given: tuple(map(int, given)), "a list of ranks"),
}
"""How the values that are no plain JSON are made, and what they are made of."""
