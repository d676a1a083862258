"""Which part of a memory a tensor is, and how much of it a kernel has not read yet."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any, NamedTuple


class Region(NamedTuple):
    """A part of a memory, as a view describes it.

    Attributes:
        memory: number of the memory.
        n_bytes: bytes of the part; an element that a view repeats counts once.
        of_bytes: bytes of the whole memory.
        begin: byte with which it begins.
        dims: distance in bytes and number of what follows each other, the farthest first; () of all.
    """

    memory: int
    n_bytes: int
    of_bytes: int
    begin: int = 0
    dims: tuple[tuple[int, int], ...] = ()


def region_of(tensor: Any, memory: int) -> Region:
    """Return which part of the *memory* of that number a tensor is."""
    item, of_bytes = int(tensor.element_size()), int(tensor.untyped_storage().nbytes())
    dims, n_bytes = [(1, item)], item
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda dim: int(dim[1])):
        if stride == 0 or size == 1:
            continue
        n_bytes *= int(size)
        apart, number = dims[-1]
        if int(stride) * item == apart * number:
            dims[-1] = (apart, number * int(size))
        else:
            dims.append((int(stride) * item, int(size)))
    if n_bytes >= of_bytes:
        return Region(memory, of_bytes, of_bytes)
    return Region(memory, n_bytes, of_bytes, int(tensor.storage_offset()) * item, tuple(reversed(dims)))


class Unwritten:
    """A result that is in no memory yet.

    Attributes:
        n_bytes: its size.
        dtype: type of its elements.
        at: number of the kernel that computes it, and of the call that it belongs to.
        roots: what in memory it is made of.
    """

    __slots__ = ("at", "dtype", "n_bytes", "roots")

    def __init__(self, n_bytes: int, dtype: str, at: tuple[int, int], roots: Set[Region]) -> None:
        self.n_bytes, self.dtype, self.at, self.roots = n_bytes, dtype, at, roots


class Reading:
    """What one kernel reads: each byte once."""

    def __init__(self) -> None:
        self._read: dict[int, list[Region]] = {}

    def add(self, regions: Iterable[Region]) -> int:
        """Read *regions*; return the bytes that had not been read."""
        return sum(map(self._add, regions))

    def _add(self, region: Region) -> int:
        found = self._read.setdefault(region.memory, [])
        if any(_contains(one, region) for one in found):
            return 0
        before = sum(one.n_bytes for one in found)
        found[:] = [one for one in found if not _contains(region, one)]
        fresh = min(region.n_bytes + sum(one.n_bytes for one in found), region.of_bytes) - before
        found.append(region)
        return max(fresh, 0)


def _contains(outer: Region, inner: Region) -> bool:
    """Return whether all bytes of *inner* are some of *outer*: each distance is one along *outer*'s."""
    if not outer.dims or outer == inner:
        return True
    if not inner.dims or inner.n_bytes > outer.n_bytes or inner.begin < outer.begin:
        return False
    last = _along(outer, inner.begin - outer.begin)
    for apart, number in inner.dims:
        last = [at + (number - 1) * step for at, step in zip(last, _along(outer, apart), strict=True)]
    return all(at < number for at, (_, number) in zip(last, outer.dims, strict=True))


def _along(region: Region, distance: int) -> list[int]:
    """Return how many steps of each dimension of a *region* a *distance* in bytes is."""
    steps = []
    for apart, _ in region.dims:
        n_steps, distance = divmod(distance, apart)
        steps.append(n_steps)
    return steps
