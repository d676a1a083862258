"""Columns on their way to a web page: typed arrays in one gzip'd blob, as text.

A span costs the page 1 to 6 bytes this way, a hundred times less than as JSON. Times become whole ticks that
fit 32 bits, counted from the end of the span before; spans that share all their words share one label.
Columns are little-endian and stored byte by byte: all lowest bytes, then the next ones, so that the high
bytes, mostly equal, compress to nothing.
"""

from __future__ import annotations

import base64
import gzip
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_MOST_TICKS: Final = 2**29  # ticks of a step: fine enough for a billionth of it, with room in 32 bits

LARGE: Final = 200_000
"""Values of an array above which a page gets those of its first picture before the others."""

_UNSIGNED: Final = (np.uint8, np.uint16, np.uint32)
_SIGNED: Final = (np.int8, np.int16, np.int32)


class Pack:
    """Collects named arrays and encodes them together.

    Attributes:
        columns: one ``[name, dtype, byte offset, length]`` per array, what a reader needs to find it again; a
            fifth item is the value of an array that has one value throughout and takes no bytes.
        later: what a page needs only after its first picture; None if everything comes at once.
    """

    def __init__(self, *, split: bool = False) -> None:
        """Begin empty; with *split*, what ``add_parts`` gets is parted if it is large."""
        self.columns: list[list[Any]] = []
        self.later: Pack | None = Pack() if split else None
        self._chunks: list[bytes] = []
        self._n_bytes = 0

    def add(self, name: str, values: NDArray[Any]) -> None:
        """Append *values*, of a type that a browser has: at most 32 bits if whole, 64 if not."""
        data = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
        where = [name, data.dtype.name, self._n_bytes, len(data)]
        # The ends first: most arrays differ there, and need no look at the whole.
        if len(data) > 1 and data[0] == data[-1] and (data == data[0]).all():
            self.columns.append([*where, data[0].item()])
            return
        planes = data.view(np.uint8).reshape(len(data), data.itemsize).T
        self.columns.append(where)
        self._chunks.append(planes.tobytes())
        self._n_bytes += data.nbytes

    def add_parts(self, arrays: Mapping[str, NDArray[Any]], first: tuple[int, int]) -> tuple[int, int]:
        """Append arrays of one length, of which the values in *first* are needed first.

        Returns:
            The range that is here; values outside it are in ``later``, one after the other.
        """
        n = max((len(values) for values in arrays.values()), default=0)
        low, high = first if self.later is not None and n > LARGE else (0, n)
        for name, values in arrays.items():
            self.add(name, values[low:high])
            if self.later is not None and high - low < n:
                self.later.add(name, np.concatenate([values[:low], values[high:]]))
        return low, high

    def raw(self) -> bytes:
        """Return all arrays as they lie at their offsets, for a reader on the same machine."""
        return b"".join(self._chunks)

    def encode(self) -> str:
        """Return all arrays as base64 of gzip; equal arrays give equal text."""
        packed = gzip.compress(self.raw(), compresslevel=6, mtime=0)
        return base64.b64encode(packed).decode("ascii")


def tick_ns(length_ns: int) -> int:
    """Return the finest tick, a power of ten of nanoseconds, of which *length_ns* has at most 2**29.

    >>> tick_ns(500_000_000), tick_ns(5_000_000_000), tick_ns(16_000_000_000)
    (1, 10, 100)
    """
    tick = 1
    while length_ns // tick > _MOST_TICKS:
        tick *= 10
    return tick


def to_ticks(
    start_ns: NDArray[np.int64], end_ns: NDArray[np.int64], ptr: NDArray[Any], tick: int
) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Return the gap before each span of its lane and its duration, in ticks.

    Both ends are rounded on their own, so that spans that touch still touch: their gap is 0, which costs
    nothing, where a start relative to the one before would repeat every duration.

    Args:
        start_ns: from the start of the step, sorted within each lane, whose spans do not overlap. Shape
            (n_spans,).
        end_ns: as ``start_ns``.
        ptr: where each lane begins, and the number of spans. Shape (n_lanes + 1,).
        tick: nanoseconds per tick.
    """
    start = (start_ns + tick // 2) // tick
    end = (end_ns + tick // 2) // tick
    gap = start - np.concatenate([[0], end[:-1]])
    # The first span of a lane follows none. Of a lane without spans there is no first.
    first = ptr[:-1][np.diff(ptr) > 0]
    gap[first] = start[first]
    return gap.astype(np.uint32), (end - start).astype(np.uint32)


def smallest(values: NDArray[Any]) -> NDArray[Any]:
    """Return whole *values* in the smallest type that a browser has and that holds them all.

    >>> smallest(np.array([0, 70_000])).dtype, smallest(np.array([-1, 7])).dtype
    (dtype('uint32'), dtype('int8'))
    """
    if not len(values):
        return values.astype(np.uint8)
    low, high = int(values.min()), int(values.max())
    for kind in _UNSIGNED if low >= 0 else _SIGNED:
        if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max:
            return values.astype(kind)
    raise OverflowError(f"{low} to {high} does not fit 32 bits")
