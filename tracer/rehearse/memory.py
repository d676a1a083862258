"""Memory that the tensors of a rehearsal would take on the device, by what they are for.

The storage of a fake tensor has a size and a life, though no bytes: it counts from its making until nobody
refers to it, or until it is resized, as FSDP does to free gathered parameters. Sizes are rounded up as the
caching allocator does (512 bytes, ``kMinBlockSize`` in c10/cuda/CUDACachingAllocator.h).
"""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final

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


def rounded(n_bytes: int) -> int:
    """Return what the allocator takes for *n_bytes*.

    >>> rounded(0), rounded(1), rounded(1024)
    (0, 512, 1024)
    """
    return -(-n_bytes // ROUND_BYTES) * ROUND_BYTES


class Memory:
    """Counts the storages that are alive.

    Args:
        changed: told the bytes in all after each change.

    Attributes:
        held: bytes by category.
        total: bytes in all.
        peak: most bytes so far, since ``start_peak``.
        at_peak: bytes by category then.
    """

    def __init__(self, changed: Callable[[int], None]) -> None:
        self.held = dict.fromkeys(CATEGORIES, 0)
        self.total = 0
        self.peak = 0
        self.at_peak = dict(self.held)
        self._changed = changed
        self._live: dict[int, tuple[int, str, Any]] = {}

    def start_peak(self) -> None:
        """Look for the most from now on."""
        self.peak, self.at_peak = self.total, dict(self.held)

    def count_always(self, category: str) -> None:
        """Let the peak be what it had been, had all that *category* holds now been there from the start."""
        missing = self.held[category] - self.at_peak[category]
        self.peak += missing
        self.at_peak[category] += missing

    def add(self, storage: Any, category: str) -> None:
        """Count *storage* from now on, unless it is counted already."""
        key = storage._cdata
        if key in self._live:
            return
        n_bytes = rounded(storage.nbytes())
        self._live[key] = (n_bytes, category, weakref.ref(storage, lambda _: self._gone(key)))
        self._change(n_bytes, category)

    def move(self, storage: Any, category: str) -> None:
        """Count *storage* under another category."""
        key = storage._cdata
        if key in self._live:
            n_bytes, before, reference = self._live[key]
            self._live[key] = (n_bytes, category, reference)
            self.held[before] -= n_bytes
            self.held[category] += n_bytes

    def resized(self, storage: Any) -> None:
        """Count *storage* as it is now."""
        key = storage._cdata
        if key in self._live:
            before, category, reference = self._live[key]
            n_bytes = rounded(storage.nbytes())
            self._live[key] = (n_bytes, category, reference)
            self._change(n_bytes - before, category)

    def _gone(self, key: int) -> None:
        n_bytes, category, _ = self._live.pop(key, (0, CATEGORIES[0], None))
        self._change(-n_bytes, category)

    def _change(self, n_bytes: int, category: str) -> None:
        self.held[category] += n_bytes
        self.total += n_bytes
        self._changed(self.total)
        if self.total > self.peak:
            self.peak, self.at_peak = self.total, dict(self.held)
