"""CUDA streams and events of a rehearsal: nothing runs on them, but their waits are recorded.

FSDP and others take streams from the module of their device. In a rehearsal that is the CPU, so ``torch.cpu``
has the same streams as ``torch.cuda``.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Final

from foretrace.tracer.on_cpu.devices import local_rank
from foretrace.tracer.rehearse.events.tape import HOST_WAIT, WAIT_MARK, Tape

NAMES: Final = ("Stream", "Event", "stream", "current_stream", "default_stream", "set_stream", "synchronize")
"""Names in a device module that this module replaces."""


class Event:
    """A point on a stream."""

    streams: ClassVar[Streams]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs  # timing, blocking, external: there is no clock
        self.mark = -1

    def record(self, stream: Any = None) -> Event:
        """Record the work issued on *stream* so far."""
        self.mark = self.streams.tape.mark(None if stream is None else stream.number)
        return self

    def wait(self, stream: Any = None) -> None:
        """Make *stream* wait for this event."""
        (stream or self.streams.current).wait_event(self)

    def query(self) -> bool:
        """Return that the event is reached."""
        return True

    def synchronize(self) -> None:
        """Let the host wait."""
        self.streams.tape.note(HOST_WAIT)

    def elapsed_time(self, other: Any) -> float:
        """Return the milliseconds between two events: always one, because there is no clock."""
        del other
        return 1.0


class Stream:
    """An in-order queue."""

    streams: ClassVar[Streams]

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        del device, kwargs  # there is one device
        self.number, self.priority = self.streams.next_number(), priority
        self.stream_id = self.cuda_stream = self.number
        self.device_index = local_rank()

    @property
    def device(self) -> Any:
        """The device of this rank."""
        import torch

        return torch.device("cuda", self.device_index)

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the least and the greatest priority of an H100."""
        return 0, -5

    def wait_event(self, event: Any) -> None:
        """Wait for *event*."""
        if getattr(event, "mark", -1) >= 0:
            self.streams.tape.note(WAIT_MARK, event.mark, stream=self.number)

    def wait_stream(self, stream: Any) -> None:
        """Wait for the work issued on *stream* so far."""
        if stream is not None and stream.number != self.number:
            self.wait_event(stream.record_event())

    def record_event(self, event: Any = None) -> Any:
        """Return an event after the work issued so far."""
        return (event or self.streams.Event()).record(self)

    def synchronize(self) -> None:
        """Let the host wait."""
        self.streams.tape.note(HOST_WAIT, stream=self.number)

    def query(self) -> bool:
        """Return that all its work is done."""
        return True

    def is_capturing(self) -> bool:
        """Return that no CUDA graph is captured on it."""
        return False

    def __enter__(self) -> Stream:
        self._before = self.streams.current
        self.streams.switch(self)
        return self

    def __exit__(self, *error: object) -> None:
        self.streams.switch(self._before)


class Context(AbstractContextManager[Any]):
    """Context in which work is issued on a stream."""

    streams: ClassVar[Streams]

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._before: Any = None

    def __enter__(self) -> Any:
        self._before = self.streams.current
        if self._stream is not None:
            self.streams.switch(self._stream)
        return self._stream

    def __exit__(self, *error: object) -> None:
        self.streams.switch(self._before)


class Streams:
    """The streams of one process, and their classes, with the constructors of torch.

    Args:
        tape: where waits are recorded.
    """

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self._n_streams = 0

        self.Event: Any = type("Event", (Event,), {"streams": self})
        self.Stream: Any = type("Stream", (Stream,), {"streams": self})
        self.stream: Any = type("Context", (Context,), {"streams": self})
        self.default: Any = self.Stream()
        self._own = threading.local()

    @property
    def current(self) -> Any:
        """The current stream of this thread; at first the default stream."""
        return getattr(self._own, "stream", self.default)

    def next_number(self) -> int:
        """Return the number of a new stream; that of the default stream is 0."""
        self._n_streams += 1
        return self._n_streams - 1

    def switch(self, stream: Any) -> None:
        """Issue on *stream* from now on."""
        self._own.stream = stream
        self.tape.switch(stream.number)

    def current_stream(self, device: Any = None) -> Any:
        """Return the current stream."""
        del device
        return self.current

    def default_stream(self, device: Any = None) -> Any:
        """Return the default stream."""
        del device
        return self.default

    def set_stream(self, stream: Any) -> None:
        """Issue on *stream* from now on."""
        self.switch(stream)

    def synchronize(self, device: Any = None) -> None:
        """Make the host wait for all streams."""
        del device
        self.tape.note(HOST_WAIT)

    def install(self, *modules: Any) -> None:
        """Replace the streams of *modules* by these, also for ``Tensor.record_stream``."""
        import torch

        anywhere: Any = torch.Tensor
        anywhere.record_stream = lambda tensor, stream: None  # is for the allocator only
        for module in modules:
            for name in NAMES:
                setattr(module, name, getattr(self, name))
        raw: Any = torch._C  # noqa: SLF001 - where libraries with kernels of their own ask
        raw._cuda_getCurrentRawStream = lambda device=None: self.current.cuda_stream  # noqa: SLF001
