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
    """Return the moment at which the device reaches this point of the current CUDA stream."""
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return CudaStamp(event)


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
