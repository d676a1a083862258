"""Moments in time, on the host or on a CUDA stream.

A stamp is taken where something happens and understood later. On the host it is an integer, nanoseconds of
``clock.now_ns``. On a CUDA stream it is an event, which the device reaches when the work before it is done;
its time is known once the device has passed it. Stamps are resolved away from the training loop.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, NamedTuple

from foretrace.tracer import internals
from foretrace.tracer.clock import now_ns

RENEW_NS: Final = 1_000_000_000
"""Age at which an anchor is renewed. ``Event.elapsed_time`` is a 32-bit float of milliseconds: over one
second it resolves 60 ns; and the clocks of host and device drift apart by some µs per second."""

OLD_NS: Final = 10_000_000_000  # age from which an anchor is worth some patience

ANCHOR_TRIES: Final = 5
"""Events that are tried for an anchor; the one known best counts, and half of its doubt bounds the error."""

PATIENCE_NS: Final = 20_000_000
"""Longest time that an event on an idle stream is waited for, as a rule: it takes some 10 µs."""

MOST_PATIENCE_NS: Final = 2_000_000_000
"""The same where there is no anchor, or an old one only. With CUDA_DEVICE_MAX_CONNECTIONS=1, as Megatron-LM
wants it, all streams share one queue, and our event comes after all that the host has issued before."""

SPIN_NS: Final = 200_000  # time after which a thread that waits for an event sleeps between two looks at it
NAP_S: Final = 50e-6  # length of such a sleep: twice the error of an anchor on a device that is behind

ANCHORED_NS: Final = 100_000  # error of a host time that comes from an anchor, at most, as a rule


class CudaStamp:
    """A moment on a CUDA stream.

    Attributes:
        ns: own time of the process in nanoseconds, None while the device has not come there.
    """

    __slots__ = ("event", "ns")

    def __init__(self, event: Any) -> None:
        self.event = event  # a ``torch.cuda.Event``
        self.ns: int | None = None


Stamp = int | CudaStamp


class Events:
    """CUDA events with times, used again once they are understood: the driver makes and frees them slowly."""

    def __init__(self) -> None:
        self._spare: defaultdict[int, list[Any]] = defaultdict(list)

    def recorded(self, cuda: Any, stream: Any) -> Any:
        """Return an event that *stream*, of ``torch.cuda`` *cuda*, comes to after what it has been given."""
        spare = self._spare[stream.device_index]
        try:
            event = spare.pop()  # on whatever thread
        except IndexError:
            event = cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def give_back(self, event: Any) -> None:
        """Take an event that nobody looks at any more."""
        self._spare[event.device.index].append(event)


EVENTS: Final = Events()  # those of this process


def _stamp_on(cuda: Any, stream: Any) -> Stamp:
    """Return the moment at which the device reaches this point of *stream*, of ``torch.cuda`` *cuda*.

    While a CUDA graph is being captured nothing runs, and an event would become part of the graph: the moment
    is one of the host.
    """
    return now_ns() if cuda.is_current_stream_capturing() else CudaStamp(EVENTS.recorded(cuda, stream))


def cuda_stamp(device: int) -> Stamp:
    """Return the moment at which the device of that index reaches this point of its current CUDA stream."""
    import torch

    if GATE.device is None:
        GATE.device = device
    return _stamp_on(torch.cuda, torch.cuda.current_stream(device))


class ComputeStream:
    """A CUDA *stream* on which the model computes, and its name in a timeline."""

    def __init__(self, stream: Any, name: str) -> None:
        import torch

        self._cuda: Any = torch.cuda
        self._stream = stream
        self.name = name

    def stamp(self) -> Stamp:
        """Return the moment at which the device reaches this point of the stream."""
        return _stamp_on(self._cuda, self._stream)

    def is_same(self, stream: Any) -> bool:
        """Whether *stream* is this one."""
        return bool(stream == self._stream)


class ComputeStreams:
    """The CUDA streams of *device* on which the model computes: ``compute`` is the default one."""

    def __init__(self, device: int) -> None:
        import torch

        self._cuda: Any = torch.cuda
        self._device = device
        self._handle = internals.stream_handle()
        default = torch.cuda.default_stream(device)
        self._known = {default.cuda_stream: ComputeStream(default, "compute")}
        GATE.device = device

    def current(self) -> ComputeStream:
        """Return the one to which this thread now issues."""
        handle = self._handle(self._device)
        found = self._known.get(handle)
        if found is None:
            stream = self._cuda.current_stream(self._device)
            found = self._known[handle] = ComputeStream(stream, f"compute.{len(self._known)}")
        return found

    def stamp(self) -> Stamp:
        """Return the moment at which the device reaches this point of the current stream."""
        return self.current().stamp()


class Gate:
    """Through which our other threads come to CUDA.

    They stay away while a graph is being captured: then a query of an event on any thread is an error that
    ends the capture, as the CUDA runtime has it for ``cudaStreamCaptureModeGlobal``, torch's default. And
    they go to the device of this process: a thread begins on device 0, and its first query would make a
    context there, half a gigabyte for each process of the machine.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n_captures = 0
        self.device: int | None = None  # index of the device of this process, None while it has not used one

    @contextmanager
    def asking(self) -> Iterator[bool]:
        """Hold captures off meanwhile; yield whether CUDA may be asked: not while one goes on."""
        with self._lock, self._on_device():
            yield not self._n_captures

    def capture_begins(self) -> None:
        """A capture is about to begin; waits until nobody asks any more."""
        with self._lock:
            self._n_captures += 1

    def capture_ended(self) -> None:
        """A capture is over."""
        with self._lock:
            self._n_captures -= 1

    def _on_device(self) -> AbstractContextManager[Any]:
        """Return what makes the device of this process the current one of the thread."""
        if self.device is None:
            return nullcontext()
        import torch

        there: AbstractContextManager[Any] = torch.cuda.device(self.device)
        return there


GATE: Final = Gate()  # that of this process


class Anchor(NamedTuple):
    """An event whose host time is known."""

    event: Any
    host_ns: int
    made_ns: int


class Resolver:
    """Turns stamps into nanoseconds of the process; used by one thread at a time, behind the gate."""

    def __init__(self, cuda: Any = None) -> None:
        self._cuda = cuda
        self._anchors: dict[int, Anchor] = {}
        self._tried_ns: dict[int, int] = {}
        self._streams: dict[int, Any] = {}

    def knows(self, *stamps: Stamp | None) -> bool:
        """Whether the time of each stamp can be told by now, without waiting for the device to come to it."""
        for stamp in stamps:
            if isinstance(stamp, int):
                continue
            if stamp is None or (stamp.ns is None and not self._can_tell(stamp)):
                return False
        return True

    def ns(self, stamp: Stamp) -> int:
        """Return the time of a stamp that is known."""
        if isinstance(stamp, int):
            return stamp
        if stamp.ns is None:
            anchor = self._anchors[stamp.event.device.index]
            stamp.ns = anchor.host_ns + round(anchor.event.elapsed_time(stamp.event) * 1e6)
            EVENTS.give_back(stamp.event)
            stamp.event = None
        return stamp.ns

    def _can_tell(self, stamp: CudaStamp) -> bool:
        """Whether the device has come to *stamp* and has an anchor; a fresh one if that can be had."""
        if not stamp.event.query():
            return False
        device = stamp.event.device.index
        now, anchor = now_ns(), self._anchors.get(device)
        tried_ns = self._tried_ns.get(device, 0)
        if now - (0 if anchor is None else anchor.made_ns) > RENEW_NS and now - tried_ns > RENEW_NS:
            is_old = anchor is None or now - anchor.made_ns > OLD_NS
            # Seldom the long one: a capture of a graph that is about to begin waits at the gate meanwhile.
            patience_ns = MOST_PATIENCE_NS if is_old and now - tried_ns > OLD_NS else PATIENCE_NS
            self._tried_ns[device] = now
            if (found := self._fresh(device, patience_ns)) is not None:
                self._anchors[device] = found
                self._tried_ns[device] = 0
        return device in self._anchors

    def _fresh(self, device: int, patience_ns: int) -> Anchor | None:
        """Return a fresh anchor on *device*, events of two devices cannot be compared; None: not to be had.

        It is on a stream of our own that has nothing else to do; but torch hands out 32 streams in turn, so
        that it may be one on which a hanging collective waits.
        """
        if self._cuda is None:
            import torch

            self._cuda = torch.cuda
        with self._cuda.device(device):
            if device not in self._streams:
                self._streams[device] = self._cuda.Stream()
            found: list[tuple[int, Any, int]] = []
            for _ in range(ANCHOR_TRIES):
                if (one := self._tried(self._streams[device], patience_ns)) is None:
                    break
                found.append(one)
        best = min(found, default=None, key=lambda one: one[0])
        return None if best is None else Anchor(best[1], best[2], now_ns())

    def _tried(self, stream: Any, patience_ns: int) -> tuple[int, Any, int] | None:
        """Return the doubt about when an event was reached, the event, and the middle; None: too long.

        It was reached between the last look that did not find it and the first that did: known as well on a
        device that is behind as on one that is idle.
        """
        event = self._cuda.Event(enable_timing=True)
        began = missed = now_ns()
        event.record(stream)
        while True:
            looked = now_ns()
            if event.query():
                break
            missed = looked
            if looked - began > patience_ns:
                return None
            if looked - began > SPIN_NS:
                time.sleep(NAP_S)
        found = now_ns()
        return found - missed, event, (missed + found) // 2
