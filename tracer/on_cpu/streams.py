"""CUDA streams and events where everything has been computed when it is issued: they order nothing.

FSDP and others take streams from the module of their device. That is the CPU, so ``torch.cpu`` has the same
streams as ``torch.cuda``.
"""

from __future__ import annotations

import itertools
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from foretrace.tracer import internals
from foretrace.tracer.rehearse.world.launchers import on_node


class _Reached:
    """What has been reached whenever it is asked, and holds nobody up."""

    def query(self) -> bool:
        """Return that all is done."""
        return True

    def wait(self, *_: Any) -> None:
        """Wait for nothing, whatever waits."""

    synchronize = wait_event = wait_stream = wait


class Event(_Reached):
    """A point on a stream, whatever it is told of timing, blocking and other processes."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> Event:
        """Return the event, which is behind all work."""
        return self

    def elapsed_time(self, _: Any) -> float:
        """Return the milliseconds between two events: always one, because there is no clock."""
        return 1.0


class Stream(_Reached):
    """An in-order queue, and a context in which it is the current one."""

    _numbers = itertools.count()

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.priority, self._before = priority, list[Any]()
        self.stream_id = self.cuda_stream = next(self._numbers)
        self.device_index = on_node()[0]

    @property
    def device(self) -> Any:
        """The device of this rank."""
        import torch

        return torch.device("cuda", self.device_index)

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the least and the greatest priority of an H100."""
        return 0, -5

    def record_event(self, event: Any = None) -> Any:
        """Return an event after the work issued so far."""
        return event or Event()

    def is_capturing(self) -> bool:
        """Return that no CUDA graph is captured on it."""
        return False

    def __enter__(self) -> Stream:
        self._before.append(current_stream())
        set_stream(self)
        return self

    def __exit__(self, *error: object) -> None:
        set_stream(self._before.pop())


_own = threading.local()  # the current stream of each thread
_default = Stream()


def default_stream(device: Any = None) -> Stream:
    """Return the default stream, whose number is 0, of whatever device."""
    return _default


def current_stream(device: Any = None) -> Any:
    """Return the current stream of this thread; at first the default stream."""
    return getattr(_own, "stream", _default)


def set_stream(stream: Any) -> None:
    """Issue on *stream* from now on."""
    _own.stream = stream


def context(stream: Any) -> AbstractContextManager[Any]:
    """Return the context in which work is issued on *stream*; None: on the current one."""
    return nullcontext() if stream is None else stream


def synchronize(device: Any = None) -> None:
    """Let the host wait for nothing."""


def install() -> None:
    """Replace the streams of ``torch.cuda``, ``torch.cpu`` and ``torch.accelerator`` by these."""
    import torch

    anywhere: Any = torch
    anywhere.Tensor.record_stream = lambda tensor, stream: None  # is for the allocator only
    functions = (current_stream, default_stream, set_stream, synchronize)
    for module in (anywhere.cuda, anywhere.cpu):
        module.Stream, module.Event, module.stream = Stream, Event, context
        for function in functions:
            setattr(module, function.__name__, function)
    anywhere.cuda.StreamContext = context
    for function in (current_stream, set_stream, synchronize):
        setattr(anywhere.accelerator, function.__name__, function)
    raw: Any = internals.c_of_torch()  # where libraries with kernels of their own ask
    raw._cuda_getCurrentRawStream = lambda device=None: current_stream().cuda_stream  # noqa: SLF001
