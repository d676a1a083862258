"""What tells a batch from others, so that ranks can be asked whether they load the same rows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

MOST_TENSORS: Final = 8
"""Tensors of a batch that are looked at."""

MOST_NUMBERS: Final = 1 << 16
"""Numbers of a tensor that are looked at, of its first rows."""


class Mark(NamedTuple):
    """What tells a batch from others.

    Attributes:
        indices: a digest of the places of its samples in their data set, "" if these are not known.
        content: one of its numbers, "" if its rows are all alike, as made-up ones may be.
    """

    indices: str
    content: str


def mark_of(tensors: Sequence[Any], indices: Sequence[Any] | None) -> Mark:
    """Return what tells a batch of these real *tensors*, the samples *indices* of a data set, from others."""
    known = [str(one) for one in indices or () if one is not None]
    arrays = [one for one in map(_first_rows, tensors[:MOST_TENSORS]) if one is not None]
    varied = any(len(one) > 1 and bool((one[1:] != one[:1]).any()) for one in arrays)
    return Mark(
        _digest(one.encode() for one in known), _digest(_bytes(one) for one in arrays) if varied else ""
    )


def _digest(parts: Iterable[bytes]) -> str:
    found = hashlib.sha256()
    n_parts = 0
    for part in parts:
        found.update(part + b";")
        n_parts += 1
    return found.hexdigest()[:16] if n_parts else ""


def _bytes(array: Any) -> bytes:
    return f"{array.dtype} {array.shape} ".encode() + bytes(array.tobytes())


def _first_rows(tensor: Any) -> Any:
    """Return the first rows of *tensor* as an array, None if it has no numbers or NumPy not its type."""
    if type(tensor).__name__ == "FakeTensor":
        return None
    try:
        array = tensor.detach().numpy()
    except (TypeError, RuntimeError, AttributeError, NotImplementedError):
        return None
    if not array.size:
        return None
    return array[: max(MOST_NUMBERS * len(array) // array.size, 2)]
