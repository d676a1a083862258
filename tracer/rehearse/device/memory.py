"""Memory that the tensors of a rehearsal would take on the device, by what they are for.

The storage of a fake tensor has a size and a life, though no bytes: it counts from its making until nobody
refers to it, or until it is resized, as FSDP does to free gathered parameters. Sizes are rounded up as the
caching allocator does (512 bytes, ``kMinBlockSize`` in c10/cuda/CUDACachingAllocator.h). What that allocator
would have to ask of the driver for them is followed beside it.
"""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

from foretrace.tracer.rehearse.device.allocator import Reserved, set_by_script

# What a script is told of the memory of its device, and that it is full.


CAPACITY_BYTES: Final = 80 * 2**30
"""Memory of the GPU that a script is told of."""

SIGN: Final = "out of memory"
"""What a script that does not name the error looks for in its words."""


class Meter:
    """Follows the bytes that are allocated, and those that the allocator holds.

    Args:
        empty_cache: lets the allocator give back what is not in use; returns the bytes that it holds then.

    Attributes:
        now: bytes that are allocated.
        peak: the most since a script has last reset it.
        reserved: bytes that the allocator holds, at most those of the GPU: it gives back what is not in use
            before there is too little.
        most_reserved: the most since a script has last reset it.
    """

    def __init__(self, empty_cache: Callable[[], int]) -> None:
        self.now = self.peak = self.reserved = self.most_reserved = 0
        self._empty_cache, self._is_full = empty_cache, False

    def told(self) -> Mapping[str, tuple[int, int, int, int]]:
        """Return bytes now, at most, ever taken and ever freed by kind, as ``memory_stats`` names them."""
        used = self.now, self.peak, self.now, 0
        same = dict.fromkeys(("allocated_bytes", "active_bytes", "requested_bytes"), used)
        return {**same, "reserved_bytes": (self.reserved, self.most_reserved, self.reserved, 0)}

    def changed(self, n_bytes: int, reserved_bytes: int) -> None:
        """Take note of *n_bytes* in all, and of what the allocator holds for them.

        Once what did not fit is gone, nothing is held for it: it never was allocated.
        """
        if self._is_full and n_bytes <= CAPACITY_BYTES:
            self._is_full, reserved_bytes = False, self._empty_cache()
        self.now, self.reserved = n_bytes, max(n_bytes, min(reserved_bytes, CAPACITY_BYTES))
        self.peak, self.most_reserved = max(self.peak, n_bytes), max(self.most_reserved, self.reserved)

    configure = staticmethod(set_by_script)  # takes a text as the settings of the allocator

    def reset(self) -> None:
        """Look for the most from now on."""
        self.peak, self.most_reserved = self.now, self.reserved

    def empty(self) -> None:
        """Give back what is reserved and not used."""
        self.changed(self.now, self._empty_cache())

    def made(self) -> None:
        """A tensor was made.

        Raises:
            torch.OutOfMemoryError: it does not fit, and the script would do something about that.
        """
        if self.now > CAPACITY_BYTES and _would_catch(sys._getframe(1)):
            import torch

            self.peak, self._is_full = min(self.peak, CAPACITY_BYTES), True
            self.reserved = self.most_reserved = CAPACITY_BYTES
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. {self.now / 2**30:.2f} GiB are allocated, the GPU has "
                f"{CAPACITY_BYTES / 2**30:.2f} GiB"
            )


def _would_catch(frame: FrameType | None) -> bool:
    """Whether one of the callers, none of them torch's, speaks of running out of memory."""
    while frame is not None:
        code = frame.f_code
        if id(code) not in _SPEAKING:
            _SPEAKING[id(code)] = code, _speaks(code)
        if _SPEAKING[id(code)][1]:
            name = str(frame.f_globals.get("__name__", ""))
            if name.partition(".")[0] not in {"torch", "foretrace"}:
                return True
        frame = frame.f_back
    return False


def _speaks(code: CodeType) -> bool:
    """Whether *code* names running out of memory."""
    words = (one.lower() for one in code.co_consts if isinstance(one, str))
    return "OutOfMemoryError" in code.co_names or any(SIGN in one for one in words)


_SPEAKING: Final[dict[int, tuple[CodeType, bool]]] = {}
"""Whether code speaks of it, by its number, with the code: so nothing else gets that number."""


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
    """Something that happened to a storage."""

    what: str  # ``"add"``, ``"resize"``, ``"move"`` or ``"free"``
    number: int  # of the storage
    n_bytes: int  # its size from now on
    category: str  # what it is for from now on
    stream: int  # on which it was made or resized


class Memory:
    """Counts the storages that are alive.

    Args:
        changed: told the bytes in all after each change.
        block_bytes: what sizes are rounded up to.
        stream: returns the number of the stream on which things are issued now; None: there are none, as on
            the host, and so no allocator that would keep blocks by stream.
    """

    def __init__(
        self,
        changed: Callable[[int], None],
        block_bytes: int = ROUND_BYTES,
        stream: Callable[[], int] | None = None,
    ) -> None:
        self.held = dict.fromkeys(CATEGORIES, 0)  # bytes by category
        self.total = 0  # bytes in all
        self.peak = 0  # most bytes so far, since ``start_peak``
        self.building: int | None = None  # the peak before the first ``start_peak``, None before it
        self.at_peak = dict(self.held)  # bytes by category then
        self.log: list[Change] | None = None  # where changes are noted, None: nowhere
        self.host: Memory | None = None  # what is held on the host instead, None: nothing can be
        self.unwritten: dict[int, int] = {}  # bytes of what is in no memory yet, by number
        self._before = (0, dict(self.held), 0)
        self._is_looking = True
        self._changed, self._block_bytes, self._stream = changed, block_bytes, stream
        self._reserved = Reserved()
        self._numbers: dict[int, tuple[int, Any]] = {}
        self._sizes: dict[int, tuple[int, str]] = {}
        self.n_held = 0  # storages that have been counted so far

    def start_peak(self) -> None:
        """Look for the most from now on.

        What the allocator holds after a building that no GPU has room for says nothing of a step: it goes.
        """
        is_first = self.building is None
        if is_first:
            self.building = self.peak
            if self.reserved_bytes > CAPACITY_BYTES:
                self.empty_cache()
        self._before = (self.peak, self.at_peak, self._reserved.most_bytes)
        self.peak, self.at_peak = self.total, dict(self.held)
        self._reserved.start(is_first=is_first)
        if self.host is not None:
            self.host.start_peak()

    def begin_device(self) -> None:
        """Forget what was on no device before the script named one: it has moved to the host."""
        if self.building is None:
            self.peak, self.at_peak = self.total, dict(self.held)
            self.empty_cache()
            self._reserved.start(is_first=False)

    def take_back(self) -> None:
        """Have looked for the most since the start before the last one."""
        if self._before[0] > self.peak:
            self.peak, self.at_peak = self._before[:2]
        self._reserved.most_bytes = max(self._reserved.most_bytes, self._before[2])
        if self.host is not None:
            self.host.take_back()

    def look_no_more(self) -> None:
        """Leave the peak as it is: what is made from now on, as where a library cleans up, is in no step."""
        self._is_looking = self._reserved.is_looking = False
        if self.host is not None:
            self.host.look_no_more()

    def count_always(self, category: str) -> None:
        """Let the peak be what it had been, had all that *category* holds now been there from the start.

        What the allocator holds for that shows once the first step is asked for again.
        """
        missing = self.held[category] - self.at_peak[category]
        self.peak += missing
        self.at_peak[category] += missing
        self._reserved.repeat(lambda number: self._sizes[number][1] == category)
        if self.host is not None:
            self.host.count_always(category)

    def described(self, *, has_gpu: bool = False) -> dict[str, Any]:
        """Return the peak as the description of a rehearsal has it; the host's, if it held anything."""
        found: dict[str, Any] = {"peak_bytes": self.peak, "bytes": self.at_peak}
        if has_gpu:
            found |= {"reserved_bytes": self._reserved.most_bytes}
            found |= {"expandable_segments": self._reserved.is_expandable}
            found |= {"building_bytes": self.building or 0}
        return found | ({"host": self.host.described()} if self.host is not None and self.host.peak else {})

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the caching allocator holds now, in use or not."""
        return self._reserved.n_bytes

    def empty_cache(self) -> None:
        """Let the allocator give back what is not in use."""
        self._reserved.empty()

    def reserve(self, n_bytes: int, stream: int) -> None:
        """Let the allocator hold *n_bytes* on *stream* from now on that are of no tensor."""
        if self._stream is not None:
            self._reserved.keep(rounded(n_bytes, self._block_bytes), stream)
            # No tensor is made, so nothing else tells the script that more is reserved.
            self._changed(self.total)

    def add(self, storage: Any, category: str, *, is_written: bool = True) -> bool:
        """Count *storage* from now on, unless it is, here or on the host; return whether it is new.

        One that is not *is_written* takes nothing until it is: by ``write``, or where it changes otherwise.
        """
        key = storage._cdata
        if key in self._numbers or (self.host is not None and self.host.number_of(storage) >= 0):
            return False
        n_bytes = rounded(storage.nbytes(), self._block_bytes)
        number = self.hold(n_bytes if is_written else 0, category)
        if not is_written:
            self.unwritten[number] = n_bytes
        self._numbers[key] = (number, weakref.ref(storage, lambda _: self._gone(key)))
        return True

    def write(self, number: int) -> None:
        """Count what *number* stands for from now on, if it was not written before."""
        n_bytes = self.unwritten.pop(number, None)
        if n_bytes is not None:
            self.change(number, "resize", n_bytes, self._sizes[number][1])

    def category_of(self, storage: Any) -> str:
        """Return what *storage* is for, ``""`` if it is not counted."""
        return self._sizes.get(self.number_of(storage), (0, ""))[1]

    def move(self, storage: Any, category: str) -> None:
        """Count *storage* under another category."""
        number = self.number_of(storage)
        self.write(number)
        if number >= 0:
            self.change(number, "move", self._sizes[number][0], category)

    def resized(self, storage: Any) -> None:
        """Count *storage* as it is now."""
        number = self.number_of(storage)
        self.unwritten.pop(number, None)
        if number >= 0:
            self.change(
                number, "resize", rounded(storage.nbytes(), self._block_bytes), self._sizes[number][1]
            )
        elif self.host is not None:
            self.host.resized(storage)

    def storages(self) -> list[Any]:
        """Return the storages that are counted."""
        # A copy: a storage that dies meanwhile takes itself out of the dictionary.
        return [one for _, kept in list(self._numbers.values()) if (one := kept()) is not None]

    def forget(self, storage: Any) -> str:
        """Count *storage* no more; return what it was for, ``""`` if it was not counted."""
        category = self.category_of(storage)
        self._gone(storage._cdata)
        return category

    def number_of(self, storage: Any) -> int:
        """Return the number of *storage*, -1 if it is not counted."""
        return self._numbers.get(storage._cdata, (-1, None))[0]

    def hold(self, n_bytes: int, category: str, stream: int | None = None) -> int:
        """Count *n_bytes*, made on *stream* (None: the present one); return the number that they have."""
        number, self.n_held = self.n_held, self.n_held + 1
        self.change(number, "add", n_bytes, category, stream)
        return number

    def is_held(self, number: int) -> bool:
        """Whether *number* stands for something that is counted."""
        return number in self._sizes

    def change(self, number: int, what: str, n_bytes: int, category: str, stream: int | None = None) -> None:
        """Count *number* as so many bytes of *category*, made on *stream* (None: the present one)."""
        if stream is None:
            stream = self._stream() if self._stream is not None else 0
        before, of = self._sizes.get(number, (0, category))
        self._sizes[number] = (n_bytes, category)
        if n_bytes != before:
            self._place(number, n_bytes, stream)
        if self.log is not None:
            self.log.append(Change(what, number, n_bytes, category, stream))
        # What was counted moves first, so that only the difference counts as new and can raise the peak.
        self.held[of] -= before
        self.held[category] += before
        self._add(n_bytes - before, category)

    def free(self, number: int) -> None:
        """Count what *number* stands for no more."""
        n_bytes, category = self._sizes.pop(number, (0, ""))
        self.unwritten.pop(number, None)
        if category:
            if self.log is not None:
                self.log.append(Change("free", number, 0, category, 0))
            self._place(number)
            self._add(-n_bytes, category)

    def _place(self, number: int, n_bytes: int = 0, stream: int = 0) -> None:
        """Let the allocator find a block for what *number* stands for, if there is one."""
        if self._stream is not None:
            self._reserved.place(number, n_bytes, stream)

    def _gone(self, key: int) -> None:
        number, _ = self._numbers.pop(key, (-1, None))
        self.free(number)

    def _add(self, n_bytes: int, category: str) -> None:
        self.held[category] += n_bytes
        self.total += n_bytes
        self._changed(self.total)
        if self.total > self.peak and self._is_looking:
            self.peak, self.at_peak = self.total, dict(self.held)
