"""The compute stream of a process, flattened: at any moment at most one block owns the time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import get_ident
from typing import Any, Final

from foretrace.tracer import internals
from foretrace.tracer.clock import now_ns
from foretrace.tracer.records import Block, Position, Segment
from foretrace.tracer.stamps import ComputeStream, Stamp

NOBODY: Final = Block("")
"""Owner of time that is not compute, although a block is running: the end of a backward pass."""

_SEGMENT: Final = functools.partial(tuple.__new__, Segment)


class Lane:
    """A stack of what runs now; the top owns the time, and only while nothing waits.

    Every change cuts a segment off for the owner so far. Segments follow each other without overlap, by
    construction.

    Args:
        position: where the training is; read when a segment is cut.
        emit: takes each finished segment.

    Attributes:
        stamp: returns this moment, as time is told now.
        device: the CUDA stream on which the model computes, None on a processor.
        stack: owners, kind and block; the same list always.
    """

    def __init__(self, position: Position, emit: Callable[[Segment], None]) -> None:
        self.stamp: Callable[[], Stamp] = now_ns
        self.device: ComputeStream | None = None
        self._position = position
        self._emit = emit
        self.stack: list[tuple[str, Block]] = []
        self._thread = 0
        self._is_in_backward = internals.is_in_backward()
        self._n_waits = 0
        self._since: Stamp = 0

    @property
    def depth(self) -> int:
        """How many owners are on the stack."""
        return len(self.stack)

    @property
    def block(self) -> Block:
        """The block that owns the time now."""
        return self.stack[-1][1] if self.stack else NOBODY

    def own(self) -> None:
        """It is this thread that trains: what others do meanwhile, as to save a checkpoint, is beside it."""
        self._thread = get_ident()

    def is_own(self) -> bool:
        """Whether this thread trains, or runs nodes of a backward pass; all do until one is known to."""
        return self._thread in (0, get_ident()) or self._is_in_backward()

    def push(self, kind: str, block: Block) -> int:
        """Let *block* own the time from now on; return what ``pop`` takes to undo it."""
        stack, owner = self.stack, (kind, block)
        if not stack or stack[-1] != owner:
            self._cut()
        stack.append(owner)
        return len(stack) - 1

    def pop(self, depth: int) -> None:
        """Give the time back to who owned it before the ``push`` that returned *depth*."""
        if depth < len(self.stack):
            if not depth or self.stack[depth - 1] != self.stack[-1]:
                self._cut()
            del self.stack[depth:]

    def replace(self, kind: str, block: Block) -> None:
        """Let *block* own the time in place of the present owner."""
        owner = (kind, block)
        if self.stack and self.stack[-1] != owner:
            self._cut()
            self.stack[-1] = owner

    def follow(self) -> None:
        """The model is called from outside: time is told on the stream that is current now."""
        if self.device is not None and not self.device.is_current():
            self.device.follow()

    def move_to(self, device: ComputeStream) -> None:
        """Tell time on a CUDA stream from now on, where the model computes."""
        self.device = device
        self.stamp = device.stamp

    def pause(self) -> bool:
        """Time from now on is waiting, not compute, if it is the training that waits, on its compute stream.

        Returns:
            Whether that is so; ``resume`` takes it.
        """
        if not self.is_own() or (self.device is not None and not self.device.is_current()):
            return False
        self._cut()
        self._n_waits += 1
        return True

    def pause_stream(self, stream: Any) -> bool:
        """Do as ``pause`` does where *stream*, and not the current one, is going to wait."""
        if self.device is None or not self.device.is_same(stream):
            return False
        self._cut()
        self._n_waits += 1
        return True

    def resume(self, is_paused: bool | None) -> None:  # noqa: FBT001 - what pause has returned
        """Undo the ``pause`` that returned *is_paused*."""
        if is_paused:
            self._n_waits -= 1
            self._since = self.stamp()

    def _cut(self) -> None:
        now = self.stamp()
        if self.stack and not self._n_waits:
            kind, block = self.stack[-1]
            if block is not NOBODY:
                at = self._position
                self._emit(
                    _SEGMENT(  # half as long as by the constructor
                        (kind, block, self._since, now, at.step, at.stage, at.virtual_stage, at.microbatch)
                    )
                )
        self._since = now
