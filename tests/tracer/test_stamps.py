"""Moments on a device, in host time: per device, and without ever waiting for a device that hangs."""

import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from foretrace.tracer.stamps import CudaStamp, Events, Gate, Resolver

AHEAD_NS = {0: 10**12, 1: -(10**9)}
"""How far the clock of each device is ahead of the host's."""


class Device:
    """The part of ``torch.cuda`` that a resolver uses, for two devices that are not there."""

    def __init__(self) -> None:
        self.current = 0
        self.hangs = False
        self.behind_ns = 0
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
    """An event that its device reaches as soon as it has done what it was given before, unless it hangs."""

    def __init__(self, cuda: Device) -> None:
        self._cuda = cuda

    def record(self, stream: Any) -> None:
        """Note when the device will reach it."""
        self.device = SimpleNamespace(index=stream.index)
        self._never = self._cuda.hangs
        self._reached_ns = time.monotonic_ns() + self._cuda.behind_ns
        self.own_ns = self._reached_ns + AHEAD_NS[stream.index]

    def query(self) -> bool:
        """Whether it is reached."""
        return not self._never and time.monotonic_ns() >= self._reached_ns

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
        assert resolver.knows(stamp)
        found = resolver.ns(stamp)
        error_ns = time.monotonic_ns() - anchored_from  # an anchor is in the middle of less than that
        assert before - error_ns <= found <= after + error_ns
        assert resolver.knows(stamp)
        assert resolver.ns(stamp) == found
    assert cuda.current == 0


def test_moments_are_known_if_each_is_and_one_of_the_host_is_its_own_time() -> None:
    cuda = Device()
    resolver, reached = Resolver(cuda), stamped(cuda, 1)
    cuda.hangs = True
    never = stamped(cuda, 1)
    cuda.hangs = False
    assert resolver.knows(7, reached, 8)
    assert not any(resolver.knows(*some) for some in ((7, None), (7, never, reached)))
    assert resolver.ns(7) == 7


def test_a_device_that_is_behind_is_told_as_well_as_one_that_is_idle() -> None:
    """All streams may share one queue: our event then comes after what the host has issued before."""
    cuda = Device()
    cuda.behind_ns = 30_000_000
    stamp = stamped(cuda, 1)
    resolver = Resolver(cuda)
    assert not resolver.knows(stamp)  # nor is it waited for
    time.sleep(0.03)
    looked = time.monotonic_ns()
    assert resolver.knows(stamp)
    reached_ns = stamp.event.own_ns - AHEAD_NS[1]
    assert abs(resolver.ns(stamp) - reached_ns) < (time.monotonic_ns() - looked) / 4  # 5 events, 30 ms each


def test_a_device_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Device()
    resolver = Resolver(cuda)
    early = stamped(cuda, 1)
    assert resolver.knows(early)
    first = resolver.ns(early)
    late = stamped(cuda, 1)
    cuda.hangs = True
    monkeypatch.setattr("foretrace.tracer.stamps.RENEW_NS", 0)  # every anchor is too old
    assert resolver.knows(late)
    assert resolver.ns(late) >= first  # by the old one


def test_without_any_anchor_a_moment_is_unknown_until_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Device()
    stamp = stamped(cuda, 0)
    cuda.hangs = True
    resolver = Resolver(cuda)
    monkeypatch.setattr("foretrace.tracer.stamps.MOST_PATIENCE_NS", 1_000_000)
    monkeypatch.setattr("foretrace.tracer.stamps.RENEW_NS", 0)
    assert not resolver.knows(stamp)
    cuda.hangs = False
    assert resolver.knows(stamp)


def test_events_are_used_again() -> None:
    cuda = Device()
    resolver, events = Resolver(cuda), Events()
    stream = SimpleNamespace(index=1, device_index=1)
    first = events.recorded(cuda, stream)
    second = events.recorded(cuda, stream)
    assert second is not first
    stamp = CudaStamp(first)
    assert resolver.knows(stamp)
    events.give_back(first)
    assert events.recorded(cuda, SimpleNamespace(index=0, device_index=0)) is not first  # of another device
    assert events.recorded(cuda, stream) is first


def test_who_asks_is_on_the_device_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A query of a thread that is on device 0 by default would make a context there."""
    torch = pytest.importorskip("torch")
    cuda = Device()
    monkeypatch.setattr(torch.cuda, "device", cuda.device)
    gate = Gate()
    with gate.asking():
        assert cuda.current == 0
    gate.device = 1
    with gate.asking() as may_ask:
        assert may_ask
        assert cuda.current == 1
    assert cuda.current == 0


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
