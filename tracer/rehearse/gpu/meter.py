"""What a script is told of the memory of its device, and that it is full."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer.rehearse.gpu import allocator

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.device.driver import Driver

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

    def tell(self, driver: Driver) -> None:
        """Have what a script asks *driver* for answered by this meter."""
        driver.memory_of = lambda device: (self.now, self.peak, self.now, 0)
        driver.reserved = lambda device: (self.reserved, self.most_reserved)
        driver.reset_peak, driver.give_back = self.reset, self.empty
        driver.configure = allocator.set_by_script

    def changed(self, n_bytes: int, reserved_bytes: int) -> None:
        """Take note of *n_bytes* in all, and of what the allocator holds for them.

        Once what did not fit is gone, nothing is held for it: it never was allocated.
        """
        if self._is_full and n_bytes <= CAPACITY_BYTES:
            self._is_full, reserved_bytes = False, self._empty_cache()
        self.now, self.reserved = n_bytes, max(n_bytes, min(reserved_bytes, CAPACITY_BYTES))
        self.peak, self.most_reserved = max(self.peak, n_bytes), max(self.most_reserved, self.reserved)

    def reset(self, device: Any = None) -> None:
        """Look for the most from now on."""
        del device
        self.peak, self.most_reserved = self.now, self.reserved

    def empty(self) -> None:
        """Give back what is reserved and not used."""
        self.changed(self.now, self._empty_cache())

    def made(self) -> None:
        """A tensor was made.

        Raises:
            torch.OutOfMemoryError: it does not fit, and the script would do something about that.
        """
        if self.now > CAPACITY_BYTES and _would_catch(sys._getframe(1)):  # noqa: SLF001 - has no other name
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
