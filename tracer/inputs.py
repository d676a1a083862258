"""Tensors among the arguments of a model, also in a batch that is one of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final

MOST_ENTRIES: Final = 16
"""Entries of a list or mapping in which a tensor is looked for: a batch has few parts."""

MOST_DEEP: Final = 3
"""Lists and mappings inside of each other in which a tensor is looked for."""


def tensors_inside(values: Iterable[Any], depth: int = MOST_DEEP) -> Iterator[Any]:
    """Yield the tensors among *values*, then those in lists, tuples and mappings among them.

    >>> from types import SimpleNamespace
    >>> tokens = SimpleNamespace(shape=(8, 16))
    >>> next(tensors_inside([0, [{"tokens": tokens}]])) is tokens
    True
    """
    values = tuple(values)
    yield from (value for value in values if hasattr(value, "shape"))
    if not depth:
        return
    for value in values:
        if isinstance(value, list | tuple | Mapping) and not hasattr(value, "shape"):
            entries = value.values() if isinstance(value, Mapping) else value
            yield from tensors_inside(islice(entries, MOST_ENTRIES), depth - 1)
