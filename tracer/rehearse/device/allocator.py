"""What the caching allocator of PyTorch would ask of the driver for the tensors of a rehearsal.

Tensors get their memory from blocks that the allocator keeps: of a pool for small or for large ones, and of
one CUDA stream, because a block that is let go may be used again only by what runs after it. So the memory
that a process holds (*reserved*) is more than that of its tensors at any moment: what one stream has let go
does not serve another, and a block that is larger than what is asked for may leave a rest that nobody takes.

The rules are those of c10/cuda/CUDACachingAllocator.cpp (PyTorch 2.6 to 2.11): best fit, rests are split off,
neighbours that are free are joined, segments of 2 MiB, 20 MiB or a multiple of 2 MiB. With
``expandable_segments`` each pool of a stream has one range of addresses, which grows by 2 or 20 MiB at a
time. Nothing is ever short here: what is free is kept until the script empties the cache. A block that
another stream uses (``record_stream``) is free at once.
"""

from __future__ import annotations

import os
from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Final

from foretrace.door import counted

# What PyTorch's allocator holds for a rehearsal: the block that each thing is in, and the most so far.


class Reserved:
    """Finds blocks for what is held."""

    def __init__(self) -> None:
        self.most_bytes = 0  # most bytes that the allocator has held since ``start``
        self.is_looking = True  # whether ``most_bytes`` may grow
        self._allocator: CachingAllocator | None = None
        self._blocks: dict[int, Block] = {}
        self._asked: list[tuple[int, int, int]] | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes that the allocator holds now, in use or not."""
        return 0 if self._allocator is None else self._allocator.reserved_bytes

    @property
    def is_expandable(self) -> bool:
        """Whether segments grow."""
        return self._allocator is not None and self._allocator.is_expandable

    def start(self, *, is_first: bool) -> None:
        """Look for the most from now on; if this is the first step, remember what it asks for."""
        self.most_bytes, self._asked = self.n_bytes, [] if is_first else None

    def empty(self) -> None:
        """Give back what is not in use."""
        if self._allocator is not None:
            self._allocator.empty()

    def place(self, number: int, n_bytes: int = 0, stream: int = 0) -> None:
        """Find a block for what *number* stands for, a new one for another size; none for nothing."""
        if self._allocator is None:
            self._allocator = CachingAllocator.as_set()
        if self._asked is not None:
            self._asked.append((number, n_bytes, stream))
        before = self._blocks.pop(number, None)
        # The new block comes before the old one goes: a resize copies between them
        # (``resize_bytes_cuda`` in ATen/native/cuda/Resize.cpp).
        if n_bytes:
            self._blocks[number] = self._allocator.allocate(n_bytes, stream)
        if before is not None:
            self._allocator.free(before)
        if self.is_looking:
            self.most_bytes = max(self.most_bytes, self._allocator.reserved_bytes)

    def keep(self, n_bytes: int, stream: int) -> None:
        """Find a block on *stream* for *n_bytes* that nothing will ever let go."""
        # Below 0, where no storage is: these are numbered from 0 on.
        self.place(min(0, min(self._blocks, default=0)) - 1, n_bytes, stream)

    def repeat(self, stays: Callable[[int], bool]) -> None:
        """Ask again for what the first step has asked for, as the second one will.

        What the first has made and left goes before, as gradients and results do; but what *stays*, as the
        states of an optimizer, is not made again.
        """
        # Not remembered meanwhile: ``place`` would note these requests as those of a first step.
        asked, self._asked = self._asked or [], None
        left = {number for number, n_bytes, _ in asked if n_bytes and number in self._blocks}
        old = {number for number in left if number < 0 or stays(number)}
        for number in left - old:
            self.place(number)
        for number, n_bytes, stream in asked:
            if number not in old:
                self.place(number, n_bytes, stream)


MIB: Final = 2**20

SMALL_BYTES: Final = MIB
"""Largest request that the pool of small blocks serves (``kSmallSize``)."""

SMALL_SEGMENT_BYTES: Final = 2 * MIB
LARGE_SEGMENT_BYTES: Final = 20 * MIB
"""Segments for small requests (``kSmallBuffer``), for large ones below the next size (``kLargeBuffer``)."""

OWN_SEGMENT_BYTES: Final = 10 * MIB
"""Least request that gets a segment of its own size (``kMinLargeAlloc``)."""

OWN_ROUND_BYTES: Final = 2 * MIB
"""What the size of such a segment is rounded up to (``kRoundLarge``)."""

SPLIT_BYTES: Final = 512
"""Least rest that is split off a small block, or any of an expandable segment (``kMinBlockSize``)."""

ROOM_BYTES: Final = LARGE_SEGMENT_BYTES * 2**24
"""Addresses of an expandable segment: more than it ever takes, and whole pages."""

SETTINGS: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables that say how the allocator works, the first one first."""


def segment_bytes(n_bytes: int) -> int:
    """Return the size of the segment that the driver is asked for, to serve *n_bytes*.

    >>> [segment_bytes(n_bytes) // MIB for n_bytes in (512, MIB, MIB + 512, 10 * MIB, 11 * MIB)]
    [2, 2, 20, 10, 12]
    """
    if n_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if n_bytes < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-n_bytes // OWN_ROUND_BYTES) * OWN_ROUND_BYTES


def settings_of(text: str) -> dict[str, str]:
    """Return what a variable says, by name, in lower case.

    >>> settings_of("expandable_segments:True, max_split_size_mb:128")
    {'expandable_segments': 'true', 'max_split_size_mb': '128'}
    """
    pairs = (one.partition(":") for one in text.lower().replace(" ", "").split(","))
    return {name: value for name, colon, value in pairs if colon}


def set_by_script(text: str) -> None:
    """Take *text* as what the environment says: it holds if nothing has been allocated yet."""
    os.environ[SETTINGS[0]] = text


class Block:
    """A range of addresses of one segment: in use, free, or without memory behind it.

    Attributes:
        pool: of which pool it is.
        address: where it begins.
        n_bytes: its size.
        before, after: its neighbours in the segment.
        is_free: whether nothing is in it.
        is_mapped: whether there is memory behind it.
    """

    __slots__ = ("address", "after", "before", "is_free", "is_mapped", "n_bytes", "pool")

    def __init__(self, pool: _Pool, address: int, n_bytes: int) -> None:
        self.pool, self.address, self.n_bytes = pool, address, n_bytes
        self.before: Block | None = None
        self.after: Block | None = None
        self.is_free = self.is_mapped = True


class _Pool:
    """Free blocks for small or large requests of one stream, the smallest first, then by address."""

    def __init__(self, *, is_small: bool) -> None:
        self.is_small = is_small
        self.page_bytes = SMALL_SEGMENT_BYTES if is_small else LARGE_SEGMENT_BYTES
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []

    def put(self, block: Block) -> None:
        """Let *block* serve requests."""
        block.is_free = True
        insort(self.free, (block.n_bytes, block.address, block))

    def take(self, block: Block) -> None:
        """Let *block* serve nothing else."""
        # A tuple sorts right before those that begin with it, so this finds the block itself.
        del self.free[bisect_left(self.free, (block.n_bytes, block.address))]


class CachingAllocator:
    """Follows the segments that the allocator holds.

    Args:
        is_expandable: whether segments grow (``expandable_segments``).
        max_split_bytes: largest block that is split (``max_split_size_mb``), None: any.

    Attributes:
        is_expandable: as given.
    """

    def __init__(self, *, is_expandable: bool = False, max_split_bytes: int | None = None) -> None:
        self.reserved_bytes = 0  # memory of all segments
        self.is_expandable, self._max_split_bytes = is_expandable, max_split_bytes or ROOM_BYTES
        self._pools: dict[tuple[bool, int], _Pool] = {}
        self._address = 0

    @classmethod
    def as_set(cls) -> CachingAllocator:
        """Return one that works as the variables of the environment say."""
        text = next((os.environ[name] for name in SETTINGS if os.environ.get(name)), "")
        found = settings_of(text)
        most = counted(found.get("max_split_size_mb", ""))
        return cls(
            is_expandable=found.get("expandable_segments") == "true",
            max_split_bytes=most * MIB if most >= 0 else None,
        )

    def allocate(self, n_bytes: int, stream: int) -> Block:
        """Return a block for *n_bytes*, a multiple of 512, of what is issued on *stream*."""
        is_small = n_bytes <= SMALL_BYTES
        pool = self._pools.get((is_small, stream))
        if pool is None:
            pool = self._pools[is_small, stream] = _Pool(is_small=is_small)
        block = self._found(pool, n_bytes)
        if block is None:
            block = self._grown(pool, n_bytes) if self.is_expandable else self._segment(pool, n_bytes)
        block.is_free = False
        rest = block.n_bytes - n_bytes
        if rest >= SPLIT_BYTES and (pool.is_small or self.is_expandable or self._splits(n_bytes, rest)):
            pool.put(_cut(block, n_bytes))
        return block

    def free(self, block: Block) -> None:
        """Keep *block* for later requests."""
        pool = block.pool
        for other in (block.before, block.after):
            if other is not None and other.is_free and other.is_mapped:
                pool.take(other)
                block = _joined(block, other)
        pool.put(block)

    def empty(self) -> None:
        """Give back segments, or pages of those that grow, in which nothing is (``empty_cache``)."""
        for pool in self._pools.values():
            # A copy: blocks leave the list.
            for _, _, block in list(pool.free):
                if self.is_expandable:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    pool.take(block)
                    self.reserved_bytes -= block.n_bytes

    def _splits(self, n_bytes: int, rest_bytes: int) -> bool:
        return n_bytes < self._max_split_bytes and rest_bytes > SMALL_BYTES

    def _found(self, pool: _Pool, n_bytes: int) -> Block | None:
        """Return the free block that fits best, which is free no more; None if none does."""
        free, most = pool.free, self._max_split_bytes
        # No address is below 0: blocks, which have no order, are never compared.
        at = bisect_left(free, (n_bytes, -1))
        if at == len(free):
            return None
        if self.is_expandable:
            # As in ``get_free_block``: what fits best is found by the size to which a block could grow.
            while at + 1 < len(free) and _room(free[at + 1][2]) < _room(free[at][2]):
                at += 1
        # ``max_split_size_mb``: larger blocks are never split, so they serve no request below that size, and
        # none above it that would leave 20 MiB.
        size = free[at][0]
        if (n_bytes < most <= size) or (n_bytes >= most and size >= n_bytes + LARGE_SEGMENT_BYTES):
            return None
        return free.pop(at)[2]

    def _segment(self, pool: _Pool, n_bytes: int) -> Block:
        """Ask the driver for a segment, and return all of it."""
        block = Block(pool, self._address, segment_bytes(n_bytes))
        self._address += block.n_bytes
        self.reserved_bytes += block.n_bytes
        return block

    def _grown(self, pool: _Pool, n_bytes: int) -> Block:
        """Map as much as *n_bytes* take, behind what is free at the lowest address with room."""
        for _, one in pool.unmapped:
            before = one.before
            starts_free = before is not None and before.is_free and before.is_mapped
            first = before if starts_free and before is not None else one
            if _has_room(first, n_bytes):
                break
        else:
            first = Block(pool, self._address, ROOM_BYTES)
            first.is_mapped = False
            self._address += ROOM_BYTES
            insort(pool.unmapped, (first.address, first))
        if first.is_mapped:
            pool.take(first)
        else:
            first = self._map(first, n_bytes)
        # Grows over what is behind it until it is large enough; what is free there is joined anyway.
        while (after := first.after) is not None and after.is_free:
            if after.is_mapped:
                pool.take(after)
            elif first.n_bytes < n_bytes:
                after = self._map(after, n_bytes - first.n_bytes)
            else:
                break
            first = _joined(first, after)
        return first

    def _map(self, block: Block, n_bytes: int) -> Block:
        """Put memory behind the first *n_bytes* of *block*, in whole pages; return what has it."""
        pool = block.pool
        del pool.unmapped[bisect_left(pool.unmapped, (block.address,))]
        size = min(-(-n_bytes // pool.page_bytes) * pool.page_bytes, block.n_bytes)
        if size < block.n_bytes:
            rest = _cut(block, size)
            rest.is_mapped = False
            insort(pool.unmapped, (rest.address, rest))
        block.is_mapped = True
        self.reserved_bytes += size
        return block

    def _unmap(self, block: Block) -> None:
        """Take the memory away that is behind the whole pages of *block*, which is free."""
        pool, page = block.pool, block.pool.page_bytes
        first = -(-block.address // page) * page
        size = (block.address + block.n_bytes) // page * page - first
        if size <= 0:
            return
        pool.take(block)
        # Only whole pages go: what is left at both ends stays mapped and free.
        if first > block.address:
            rest = _cut(block, first - block.address)
            pool.put(block)
            block = rest
        if size < block.n_bytes:
            pool.put(_cut(block, size))
        block.is_mapped, block.is_free = False, True
        self.reserved_bytes -= size
        for other in (block.before, block.after):
            if other is not None and not other.is_mapped:
                del pool.unmapped[bisect_left(pool.unmapped, (other.address,))]
                block = _joined(block, other)
        insort(pool.unmapped, (block.address, block))


def _cut(block: Block, n_bytes: int) -> Block:
    """Leave *block* its first *n_bytes*; return the rest."""
    rest = Block(block.pool, block.address + n_bytes, block.n_bytes - n_bytes)
    rest.before, rest.after = block, block.after
    if rest.after is not None:
        rest.after.before = rest
    block.after, block.n_bytes = rest, n_bytes
    return rest


def _joined(one: Block, other: Block) -> Block:
    """Return two neighbours as one block: the first of them."""
    first, second = (one, other) if one.address < other.address else (other, one)
    first.n_bytes += second.n_bytes
    first.after = second.after
    if first.after is not None:
        first.after.before = first
    return first


def _room(block: Block) -> int:
    """Return the size to which a block of an expandable segment could grow."""
    after = block.after
    return block.n_bytes + (after.n_bytes if after is not None and not after.is_mapped else 0)


def _has_room(block: Block | None, n_bytes: int) -> bool:
    """Whether *block* and the free ones behind it take *n_bytes*."""
    while block is not None and block.is_free and n_bytes > 0:
        n_bytes -= block.n_bytes
        block = block.after
    return n_bytes <= 0
