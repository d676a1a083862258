"""Moments in time, on the host or on a CUDA stream.

A stamp is taken where something happens and understood later. On the host it is an integer, nanoseconds of
``clock.now_ns``. On a CUDA stream it is an event, which the device reaches when the work before it is done;
its time is known once the device has passed it. Stamps are resolved away from the training loop.
"""

from __future__ import annotations

from typing import Any, Final

from tracer.clock import now_ns

RENEW_NS: Final = 1_000_000_000
"""Age at which an anchor is renewed. ``Event.elapsed_time`` is a 32-bit float of milliseconds: over one
second it resolves 60 ns; and the clocks of host and device drift apart by some µs per second."""


class CudaStamp:
    """A moment on the current CUDA stream of the thread that makes it.

    Attributes:
        event: a ``torch.cuda.Event``.
        ns: own time of the process in nanoseconds, None while the device has not come there.
    """

    __slots__ = ("event", "ns")

    def __init__(self, event: Any) -> None:
        self.event = event
        self.ns: int | None = None


Stamp = int | CudaStamp


def host_stamp() -> Stamp:
    """Return this moment on the host."""
    return now_ns()


def cuda_stamp() -> Stamp:
    """Return the moment at which the device reaches this point of the current CUDA stream.

    While a CUDA graph is being captured, nothing runs: the moment is one of the host.
    """
    import torch

    if torch.cuda.is_current_stream_capturing():
        return host_stamp()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return CudaStamp(event)


class ComputeStream:
    """The CUDA stream on which the model computes: the current one when the model is first called.

    A stamp of it says the same whichever stream is current, as inside of a prefetch. While a CUDA graph is
    being captured nothing runs, and an event would become part of the graph: such stamps are of the host.
    """

    def __init__(self) -> None:
        import torch

        self._cuda: Any = torch.cuda
        self._stream = torch.cuda.current_stream()

    def stamp(self) -> Stamp:
        """Return the moment at which the device reaches this point of the stream."""
        if self._cuda.is_current_stream_capturing():
            return host_stamp()
        event = self._cuda.Event(enable_timing=True)
        event.record(self._stream)
        return CudaStamp(event)

    def is_current(self) -> bool:
        """Whether what this thread issues now goes to the stream."""
        return self.is_same(self._cuda.current_stream())

    def is_same(self, stream: Any) -> bool:
        """Whether *stream* is this one."""
        return bool(stream == self._stream)


def settled(*stamps: Stamp | None) -> bool:
    """Whether the time of each stamp is known by now, without waiting for any."""
    return all(stamp is not None and (isinstance(stamp, int) or _passed(stamp)) for stamp in stamps)


def _passed(stamp: CudaStamp) -> bool:
    return stamp.ns is not None or bool(stamp.event.query())


class Resolver:
    """Turns stamps into nanoseconds of the process; used by one thread."""

    def __init__(self) -> None:
        self._anchor: Any = None
        self._anchor_ns = 0
        self._stream: Any = None

    def ns(self, stamp: Stamp) -> int:
        """Return the time of a stamp that is settled."""
        if isinstance(stamp, int):
            return stamp
        if stamp.ns is None:
            if self._anchor is None or now_ns() - self._anchor_ns > RENEW_NS:
                self._renew()
            stamp.ns = self._anchor_ns + round(self._anchor.elapsed_time(stamp.event) * 1e6)
            stamp.event = None
        return stamp.ns

    def _renew(self) -> None:
        """Find the host time of a fresh event, on a stream of our own that has nothing else to do."""
        import torch

        if self._stream is None:
            self._stream = torch.cuda.Stream()
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        event.synchronize()
        self._anchor, self._anchor_ns = event, now_ns()
