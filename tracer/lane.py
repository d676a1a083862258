"""The computation of a process, flattened: at any moment at most one block owns the time.

A block that is called while another CUDA stream is current owns time of that stream, and the one around it
owns none meanwhile, as nothing is issued to its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import get_ident
from typing import Any, Final

from foretrace.tracer import internals
from foretrace.tracer.clock import now_ns
from foretrace.tracer.records import Block, Position, Segment
from foretrace.tracer.stamps import ComputeStream, ComputeStreams, Stamp

NOBODY: Final = Block("")
"""Owner of time that is not compute, although a block is running: the end of a backward pass."""

COMPUTE: Final = "compute"  # stream of what a processor computes

Owner = tuple[str, Block, ComputeStream | None]
"""Kind, block and stream of what owns the time; no stream on a processor."""

_SEGMENT: Final = functools.partial(tuple.__new__, Segment)
"""Makes a segment in half the time of its constructor."""


class Lane:
    """A stack of what runs now; the top owns the time, and only while nothing waits.

    Every change cuts a segment off for the owner so far. Segments of one stream follow each other without
    overlap, by construction.

    Attributes:
        stamp: returns this moment, as time is told now: on the current stream of a GPU.
        device: the CUDA streams on which the model computes, None on a processor.
    """

    def __init__(self, position: Position, emit: Callable[[Segment], None]) -> None:
        self.stamp: Callable[[], Stamp] = now_ns
        self.device: ComputeStreams | None = None
        self._position = position
        self._emit = emit
        self.stack: list[Owner] = []  # owners; the same list always
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
        stream = None if self.device is None else self.device.current()
        stack, owner = self.stack, (kind, block, stream)
        if not stack or stack[-1] != owner:
            self._cut(stream)
        stack.append(owner)
        return len(stack) - 1

    def pop(self, depth: int) -> None:
        """Give the time back to who owned it before the ``push`` that returned *depth*."""
        stack = self.stack
        if depth < len(stack):
            if not depth:
                self._cut(stack[-1][2])
            elif stack[depth - 1] != stack[-1]:
                self._cut(stack[depth - 1][2])
            del stack[depth:]

    def replace(self, kind: str, block: Block) -> None:
        """Let *block* own the time in place of the present owner."""
        stream = None if self.device is None else self.device.current()
        stack, owner = self.stack, (kind, block, stream)
        if stack and stack[-1] != owner:
            self._cut(stream)
            stack[-1] = owner

    def move_to(self, device: ComputeStreams) -> None:
        """Tell time on CUDA streams from now on, where the model computes."""
        self.device = device
        self.stamp = device.stamp

    def pause(self) -> bool:
        """Time from now on is waiting, not compute, if it is the training that waits, on the owner's stream.

        Returns:
            Whether that is so; ``resume`` takes it.
        """
        if not self.is_own():
            return False
        own = self.stack[-1][2] if self.stack else None
        if own is not None and self.device is not None and own is not self.device.current():
            return False
        return self._paused(own)

    def pause_stream(self, stream: Any) -> bool:
        """Do as ``pause`` does where *stream*, and not the current one, is going to wait."""
        own = self.stack[-1][2] if self.stack else None
        return own is not None and own.is_same(stream) and self._paused(own)

    def _paused(self, own: ComputeStream | None) -> bool:
        if self.stack:
            self._cut(own)
        self._n_waits += 1
        return True

    def resume(self, is_paused: bool | None) -> None:  # noqa: FBT001 - what pause has returned
        """Undo the ``pause`` that returned *is_paused*."""
        # The time since the pause is nobody's: that of the owner begins anew.
        if is_paused:
            self._n_waits -= 1
            if self.stack:
                stream = self.stack[-1][2]
                self._since = now_ns() if stream is None else stream.stamp()

    def _cut(self, then: ComputeStream | None) -> None:
        """End the segment of the present owner; the next begins on the stream *then*."""
        if self.stack:
            kind, block, stream = self.stack[-1]
            now = now_ns() if stream is None else stream.stamp()
            if block is not NOBODY and not self._n_waits:
                at, name = self._position, COMPUTE if stream is None else stream.name
                since = self._since
                self._emit(
                    _SEGMENT(
                        (kind, block, since, now, at.step, at.stage, at.virtual_stage, at.microbatch, name)
                    )
                )
            # On one stream the moment that ends a segment begins the next: nothing lies between them.
            if stream is then:
                self._since = now
                return
        self._since = now_ns() if then is None else then.stamp()
