"""Memory that the tensors of a rehearsal would take on the device, by what they are for.

The storage of a fake tensor has a size and a life, though no bytes: it counts from its making until nobody
refers to it, or until it is resized, as FSDP does to free gathered parameters. Sizes are rounded up as the
caching allocator does (512 bytes, ``kMinBlockSize`` in c10/cuda/CUDACachingAllocator.h).
"""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final, NamedTuple

ROUND_BYTES: Final = 512
"""Least size of a block of the caching allocator, and what sizes are rounded up to."""

CATEGORIES: Final = ("parameters", "gradients", "optimizer", "activations", "gathered", "buffers")
"""What memory is for, as in a simulated run."""

OF_KIND: Final = {
    "setup": "parameters",
    "forward": "activations",
    "recompute": "activations",
    "backward": "gradients",
    "backward_input": "gradients",
    "backward_weight": "gradients",
    "optimizer": "optimizer",
}
"""What a tensor is for that is made while this kind of work is issued."""


def rounded(n_bytes: int, block_bytes: int = ROUND_BYTES) -> int:
    """Return what the allocator takes for *n_bytes*.

    >>> rounded(0), rounded(1), rounded(1024)
    (0, 512, 1024)
    """
    return -(-n_bytes // block_bytes) * block_bytes


class Change(NamedTuple):
    """Something that happened to a storage.

    Attributes:
        what: ``"add"``, ``"resize"``, ``"move"`` or ``"free"``.
        number: of the storage.
        n_bytes: its size from now on.
        category: what it is for from now on.
    """

    what: str
    number: int
    n_bytes: int
    category: str


class Memory:
    """Counts the storages that are alive.

    Args:
        changed: told the bytes in all after each change.
        block_bytes: what sizes are rounded up to.

    Attributes:
        held: bytes by category.
        total: bytes in all.
        peak: most bytes so far, since ``start_peak``.
        at_peak: bytes by category then.
        log: where changes are noted, None: nowhere.
        host: what is held on the host instead, None: nothing can be.
    """

    def __init__(self, changed: Callable[[int], None], block_bytes: int = ROUND_BYTES) -> None:
        self.held = dict.fromkeys(CATEGORIES, 0)
        self.total = 0
        self.peak = 0
        self.at_peak = dict(self.held)
        self.log: list[Change] | None = None
        self.host: Memory | None = None
        self._before = (0, dict(self.held))
        self._is_looking = True
        self._changed, self._block_bytes = changed, block_bytes
        self._numbers: dict[int, tuple[int, Any]] = {}
        self._sizes: dict[int, tuple[int, str]] = {}
        self._n_held = 0

    def start_peak(self) -> None:
        """Look for the most from now on."""
        self._before = (self.peak, self.at_peak)
        self.peak, self.at_peak = self.total, dict(self.held)
        if self.host is not None:
            self.host.start_peak()

    def take_back(self) -> None:
        """Have looked for the most since the start before the last one."""
        if self._before[0] > self.peak:
            self.peak, self.at_peak = self._before
        if self.host is not None:
            self.host.take_back()

    def look_no_more(self) -> None:
        """Leave the peak as it is: what is made from now on, as where a library cleans up, is in no step."""
        self._is_looking = False
        if self.host is not None:
            self.host.look_no_more()

    def count_always(self, category: str) -> None:
        """Let the peak be what it had been, had all that *category* holds now been there from the start."""
        missing = self.held[category] - self.at_peak[category]
        self.peak += missing
        self.at_peak[category] += missing
        if self.host is not None:
            self.host.count_always(category)

    @property
    def holds_any(self) -> bool:
        """Whether anything is counted."""
        return bool(self._sizes)

    def described(self) -> dict[str, Any]:
        """Return the peak as the description of a rehearsal has it; the host's, if it held anything."""
        found: dict[str, Any] = {"peak_bytes": self.peak, "bytes": self.at_peak}
        return found | ({"host": self.host.described()} if self.host is not None and self.host.peak else {})

    def add(self, storage: Any, category: str) -> bool:
        """Count *storage* from now on, unless it is, here or on the host; return whether it is new."""
        key = storage._cdata
        if key in self._numbers or (self.host is not None and self.host.number_of(storage) >= 0):
            return False
        number = self.hold(rounded(storage.nbytes(), self._block_bytes), category)
        self._numbers[key] = (number, weakref.ref(storage, lambda _: self._gone(key)))
        return True

    def move(self, storage: Any, category: str) -> None:
        """Count *storage* under another category."""
        number = self.number_of(storage)
        if number >= 0:
            self.change(number, "move", self._sizes[number][0], category)

    def resized(self, storage: Any) -> None:
        """Count *storage* as it is now."""
        number = self.number_of(storage)
        if number >= 0:
            self.change(
                number, "resize", rounded(storage.nbytes(), self._block_bytes), self._sizes[number][1]
            )
        elif self.host is not None:
            self.host.resized(storage)

    def forget(self, storage: Any) -> str:
        """Count *storage* no more; return what it was for, ``""`` if it was not counted."""
        category = self._sizes.get(self.number_of(storage), (0, ""))[1]
        self._gone(storage._cdata)
        return category

    def number_of(self, storage: Any) -> int:
        """Return the number of *storage*, -1 if it is not counted."""
        return self._numbers.get(storage._cdata, (-1, None))[0]

    def hold(self, n_bytes: int, category: str) -> int:
        """Count *n_bytes* from now on; return the number by which they are known."""
        number, self._n_held = self._n_held, self._n_held + 1
        self.change(number, "add", n_bytes, category)
        return number

    def is_held(self, number: int) -> bool:
        """Whether *number* stands for something that is counted."""
        return number in self._sizes

    def change(self, number: int, what: str, n_bytes: int, category: str) -> None:
        """Count what *number* stands for as so many bytes of *category*."""
        before, of = self._sizes.get(number, (0, category))
        self._sizes[number] = (n_bytes, category)
        if self.log is not None:
            self.log.append(Change(what, number, n_bytes, category))
        self.held[of] -= before
        self.held[category] += before
        self._add(n_bytes - before, category)

    def free(self, number: int) -> None:
        """Count what *number* stands for no more."""
        n_bytes, category = self._sizes.pop(number, (0, ""))
        if category:
            if self.log is not None:
                self.log.append(Change("free", number, 0, category))
            self._add(-n_bytes, category)

    def _gone(self, key: int) -> None:
        number, _ = self._numbers.pop(key, (-1, None))
        self.free(number)

    def _add(self, n_bytes: int, category: str) -> None:
        self.held[category] += n_bytes
        self.total += n_bytes
        self._changed(self.total)
        if self.total > self.peak and self._is_looking:
            self.peak, self.at_peak = self.total, dict(self.held)
