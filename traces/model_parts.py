"""Puts the description of a model together from the parts of it that ranks and pipeline stages hold.

A description may have a ``structure``: by path, in which ``*`` stands for the number of a layer, the class
of the module there, the ``shapes`` of its parameters, its whole-number attributes and the ``layers`` that
have it. That of stages of a pipeline has their numbers, ``stages``: each may count its layers from 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def joined_models(parts: Iterable[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """Return the first of *parts* with everything that others of them hold besides; None if there is none.

    Parts that say nothing new, as those of data-parallel ranks, change nothing. The parameters of a part that
    does are added. Layers of other stages are others, also where they have the same numbers.

    >>> a = {"n_params": 8, "structure": {"layers.*.up": {"layers": [0]}}}
    >>> b = {"n_params": 9, "structure": {"layers.*.up": {"layers": [1]}, "head": {}}}
    >>> joined_models([None, a, b, a])["structure"]
    {'layers.*.up': {'layers': [0, 1]}, 'head': {}}
    """
    joined: dict[str, Any] | None = None
    for part in parts:
        if part is None:
            continue
        if joined is None:
            joined = dict(part)
        elif _has_structure(joined) and _has_structure(part):
            stages, more = set(joined.get("stages", ())), set(part.get("stages", ()))
            others = more - stages
            structure = _united(joined["structure"], _behind(joined, part) if others else part["structure"])
            if others or (structure != joined["structure"] and not more):
                sizes = joined.get("n_params", 0), part.get("n_params", 0)
                n_params = None if None in sizes else sum(sizes)
                joined |= {"n_params": n_params, "structure": structure}
                joined |= {"stages": sorted(stages | more)} if others else {}
    return joined


def _behind(one: Mapping[str, Any], other: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the structure of stages *other*, its layers behind those of *one* where both count from 0."""
    known, structure = _layers(one["structure"]), other["structure"]
    own = _layers(structure)
    if not known & own:
        return dict(structure)
    shift = 1 + max(known) - min(own)
    return {
        path: {**entry, "layers": [layer + shift for layer in entry["layers"]]}
        if "layers" in entry
        else entry
        for path, entry in structure.items()
    }


def _layers(structure: Mapping[str, Any]) -> set[int]:
    return {layer for entry in structure.values() for layer in entry.get("layers", ())}


def _has_structure(model: Mapping[str, Any]) -> bool:
    structure = model.get("structure")
    return isinstance(structure, Mapping) and all(isinstance(entry, Mapping) for entry in structure.values())


def _united(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    found = {path: dict(entry) for path, entry in one.items()}
    for path, entry in other.items():
        if path not in found:
            found[path] = dict(entry)
        elif entry.get("layers"):
            found[path]["layers"] = sorted({*found[path].get("layers", ()), *entry["layers"]})
    return found
