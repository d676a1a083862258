"""What PyTorch's allocator holds for a rehearsal: the block that each thing is in, and the most so far."""

from __future__ import annotations

from collections.abc import Callable

from foretrace.tracer.rehearse.gpu.allocator import Block, CachingAllocator


class Reserved:
    """Finds blocks for what is held.

    Attributes:
        most_bytes: most bytes that the allocator has held since ``start``.
        is_looking: whether ``most_bytes`` may grow.
    """

    def __init__(self) -> None:
        self.most_bytes = 0
        self.is_looking = True
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
        if n_bytes:
            self._blocks[number] = self._allocator.allocate(n_bytes, stream)
        if before is not None:
            self._allocator.free(before)
        if self.is_looking:
            self.most_bytes = max(self.most_bytes, self._allocator.reserved_bytes)

    def keep(self, n_bytes: int, stream: int) -> None:
        """Find a block on *stream* for *n_bytes* that nothing will ever let go."""
        self.place(min(0, min(self._blocks, default=0)) - 1, n_bytes, stream)

    def repeat(self, stays: Callable[[int], bool]) -> None:
        """Ask again for what the first step has asked for, as the second one will.

        What the first has made and left goes before, as gradients and results do; but what *stays*, as the
        states of an optimizer, is not made again.
        """
        asked, self._asked = self._asked or [], None
        left = {number for number, n_bytes, _ in asked if n_bytes and number in self._blocks}
        old = {number for number in left if number < 0 or stays(number)}
        for number in left - old:
            self.place(number)
        for number, n_bytes, stream in asked:
            if number not in old:
                self.place(number, n_bytes, stream)
