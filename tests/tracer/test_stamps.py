"""Moments on a device, in host time: per device, and without ever waiting for a device that hangs."""

import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tracer.stamps import CudaStamp, Gate, Resolver

AHEAD_NS = {0: 10**12, 1: -(10**9)}
"""How far the clock of each device is ahead of the host's."""


class Device:
    """The part of ``torch.cuda`` that a resolver uses, for two devices that are not there."""

    def __init__(self) -> None:
        self.current = 0
        self.hangs = False
        self.Event = lambda enable_timing: Event(self)

    @contextmanager
    def device(self, index: int) -> Any:
        """Make *index* the current device."""
        before, self.current = self.current, index
        yield
        self.current = before

    def Stream(self) -> Any:  # noqa: N802 - as torch has it
        """Return a stream of the current device."""
        return SimpleNamespace(index=self.current)


class Event:
    """An event that its device reaches as soon as it is recorded, unless it hangs."""

    def __init__(self, cuda: Device) -> None:
        self._cuda = cuda

    def record(self, stream: Any) -> None:
        """Note the time of the device."""
        self.device = SimpleNamespace(index=stream.index)
        self._never = self._cuda.hangs
        self.own_ns = time.monotonic_ns() + AHEAD_NS[stream.index]

    def query(self) -> bool:
        """Whether it is reached."""
        return not self._never

    def elapsed_time(self, other: Any) -> float:
        """Return milliseconds between two events of one device, as CUDA does."""
        if other.device.index != self.device.index:
            raise RuntimeError("invalid resource handle")
        return float(other.own_ns - self.own_ns) / 1e6


def stamped(cuda: Device, index: int) -> CudaStamp:
    """Return a stamp of this moment on one device."""
    event = Event(cuda)
    event.record(SimpleNamespace(index=index))
    return CudaStamp(event)


def test_each_device_has_its_own_clock() -> None:
    cuda = Device()
    resolver = Resolver(cuda)
    for index in (0, 1, 0, 1):
        before = time.monotonic_ns()
        stamp = stamped(cuda, index)
        after = time.monotonic_ns()
        anchored_from = time.monotonic_ns()
        found = resolver.ns(stamp)
        error_ns = time.monotonic_ns() - anchored_from  # an anchor is in the middle of less than that
        assert before - error_ns <= found <= after + error_ns
    assert cuda.current == 0


def test_a_device_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Device()
    resolver = Resolver(cuda)
    early = stamped(cuda, 1)
    first = resolver.ns(early)
    late = stamped(cuda, 1)
    cuda.hangs = True
    monkeypatch.setattr("tracer.stamps.RENEW_NS", 0)  # every anchor is too old
    assert resolver.ns(late) >= first  # by the old one
    with pytest.raises(TimeoutError, match="cuda:0"):
        Resolver(cuda).ns(stamped(Device(), 0))


def test_nobody_asks_while_a_graph_is_captured() -> None:
    gate = Gate()
    events: list[str] = []

    def capture() -> None:
        gate.capture_begins()
        events.append("began")

    gate.capture_begins()
    with gate.asking() as may_ask:
        assert not may_ask
    gate.capture_ended()
    with gate.asking() as may_ask:
        assert may_ask
        capturing = threading.Thread(target=capture)
        capturing.start()
        time.sleep(0.05)
        assert events == []  # it waits until nobody asks
    capturing.join()
    assert events == ["began"]
