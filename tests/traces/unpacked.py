"""Reads what a page gets by its format alone, as the page does."""

import base64
import gzip
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def decode(columns: Sequence[Sequence[Any]], text: str) -> dict[str, NDArray[Any]]:
    """Return the arrays that ``Pack.encode`` made *text* of, by name."""
    return taken_apart(columns, gzip.decompress(base64.b64decode(text)))


def taken_apart(columns: Sequence[Sequence[Any]], raw: bytes) -> dict[str, NDArray[Any]]:
    """Return the arrays that ``Pack.raw`` put together, by name."""
    data = np.frombuffer(raw, np.uint8)
    found = {}
    for name, dtype, offset, length, *only in columns:
        kind = np.dtype(dtype).newbyteorder("<")
        if only:
            found[name] = np.full(length, only[0], kind)
            continue
        planes = data[offset : offset + length * kind.itemsize].reshape(kind.itemsize, length)
        found[name] = np.ascontiguousarray(planes.T).reshape(-1).view(kind)
    return found
