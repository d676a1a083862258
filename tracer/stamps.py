"""Moments in time, on the host or on a CUDA stream.

A stamp is taken where something happens and understood later. On the host it is an integer, nanoseconds of
``clock.now_ns``. On a CUDA stream it is an event, which the device reaches when the work before it is done;
its time is known once the device has passed it. Stamps are resolved away from the training loop.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from tracer.clock import now_ns

RENEW_NS: Final = 1_000_000_000
"""Age at which an anchor is renewed. ``Event.elapsed_time`` is a 32-bit float of milliseconds: over one
second it resolves 60 ns; and the clocks of host and device drift apart by some µs per second."""


ANCHOR_TRIES: Final = 5
"""Events that are tried for an anchor; the quickest counts, and half of its time bounds the error."""

ANCHOR_NS: Final = 20_000_000
"""Longest time that an event on an idle stream is waited for: it takes some 10 µs."""


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


class Gate:
    """Keeps our other threads away from CUDA while a graph is being captured.

    Then a query of an event on any thread is an error that ends the capture, as the CUDA runtime has it for
    ``cudaStreamCaptureModeGlobal``, which is torch's default.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n_captures = 0

    @contextmanager
    def asking(self) -> Iterator[bool]:
        """Hold captures off meanwhile; yield whether CUDA may be asked: not while one goes on."""
        with self._lock:
            yield not self._n_captures

    def capture_begins(self) -> None:
        """A capture is about to begin; waits until nobody asks any more."""
        with self._lock:
            self._n_captures += 1

    def capture_ended(self) -> None:
        """A capture is over."""
        with self._lock:
            self._n_captures -= 1


GATE: Final = Gate()
"""That of this process."""


class Anchor(NamedTuple):
    """An event whose host time is known."""

    event: Any
    host_ns: int
    made_ns: int


class Resolver:
    """Turns stamps into nanoseconds of the process; used by one thread, whichever it is.

    Args:
        cuda: ``torch.cuda``, None to import it when it is needed.
    """

    def __init__(self, cuda: Any = None) -> None:
        self._cuda = cuda
        self._anchors: dict[int, Anchor] = {}
        self._streams: dict[int, Any] = {}

    def ns(self, stamp: Stamp) -> int:
        """Return the time of a stamp that is settled."""
        if isinstance(stamp, int):
            return stamp
        if stamp.ns is None:
            device = stamp.event.device.index
            anchor = self._anchors.get(device)
            if anchor is None or now_ns() - anchor.made_ns > RENEW_NS:
                anchor = self._anchors[device] = self._renewed(device, anchor)
            stamp.ns = anchor.host_ns + round(anchor.event.elapsed_time(stamp.event) * 1e6)
            stamp.event = None
        return stamp.ns

    def _renewed(self, device: int, before: Anchor | None) -> Anchor:
        """Return a fresh anchor on the device of the stamp: events of two devices cannot be compared.

        It is on a stream of our own that has nothing else to do; but torch hands out 32 streams in turn, so
        that it may be one on which a hanging collective waits. Then the old anchor has to do.
        """
        if self._cuda is None:
            import torch

            self._cuda = torch.cuda
        with self._cuda.device(device):  # else a thread of ours would make a context on device 0
            if device not in self._streams:
                self._streams[device] = self._cuda.Stream()
            found = [self._tried(self._streams[device]) for _ in range(ANCHOR_TRIES)]
        best = min((one for one in found if one is not None), default=None, key=lambda one: one[0])
        now = now_ns()
        if best is not None:
            return Anchor(best[1], best[2], now)
        if before is None:
            raise TimeoutError(f"cuda:{device} did not come to an event within {ANCHOR_NS / 1e6:.0f} ms")
        return before._replace(made_ns=now)

    def _tried(self, stream: Any) -> tuple[int, Any, int] | None:
        """Return how long an event took, the event, and the host time in its middle; None: too long."""
        event = self._cuda.Event(enable_timing=True)
        began = now_ns()
        event.record(stream)
        while not event.query():
            if now_ns() - began > ANCHOR_NS:
                return None
        ended = now_ns()
        return ended - began, event, (began + ended) // 2
