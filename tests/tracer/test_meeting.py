"""A process joins a group only once the store of the one before has gone, where it would meet that one."""

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from foretrace.tracer import internals
from foretrace.tracer.record import Meeting

HOST = "127.0.0.1"
LONG_S = 5.0


class Old:
    """The store of a group that this process leaves as rank 1, and calls to join the next one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        dist = pytest.importorskip("torch.distributed")
        self._servers = [dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)]
        self.port: int = self._servers[0].port
        self._client = dist.TCPStore(HOST, self.port, is_master=False)
        store = dist.PrefixStore("inner", dist.PrefixStore("outer", self._client))
        monkeypatch.setattr(internals, "default_store", lambda: store)
        monkeypatch.setattr(dist, "get_rank", lambda: 1)
        monkeypatch.setenv("MASTER_ADDR", HOST)
        monkeypatch.setenv("MASTER_PORT", str(self.port))
        self.meeting = Meeting()

    def waits(self, after_s: float = LONG_S, **kwargs: Any) -> bool:
        """Whether a call of torch's with *kwargs* comes behind the end of the store, *after_s* from now."""
        found: list[bool] = []

        def join(backend: str = "", init_method: str = "", store: object = None, rank: int = -1) -> None:
            found.append(not self._servers)

        ending = threading.Timer(after_s, self._servers.clear)
        ending.start()
        self.meeting.join(join, ("gloo",), kwargs)
        ending.cancel()
        ending.join()
        return found == [True]


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> Iterator[Old]:
    made = Old(monkeypatch)
    yield made
    made.waits(0)  # of a connection that is kept still


@pytest.mark.parametrize("by", ["env://", "tcp", None])
def test_it_waits_at_the_address_of_the_old_store(old: Old, by: str | None) -> None:
    old.meeting.leave()
    assert old.waits(0.2, init_method=f"tcp://{HOST}:{old.port}" if by == "tcp" else by)


ELSEWHERE: dict[str, dict[str, Any]] = {
    "port": {"init_method": f"tcp://{HOST}:1"},
    "file": {"init_method": "file:///meeting"},
    "store": {"store": object()},
    "agent": {"TORCHELASTIC_USE_AGENT_STORE": "True"},
    "nowhere": {"MASTER_PORT": None},
    "unknown": {"MASTER_PORT": "any"},
}
"""Arguments of the call; in capitals, what the environment says."""


@pytest.mark.parametrize("where", ELSEWHERE)
def test_it_does_not_wait_where_it_cannot_meet_that_one(
    old: Old, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group has a store of its own, one that stays, or one elsewhere; or torch says what is wrong."""
    old.meeting.leave()
    told = ELSEWHERE[where]
    for name, value in told.items():
        if name.isupper() and value is None:
            monkeypatch.delenv(name)
        elif name.isupper():
            monkeypatch.setenv(name, value)
    assert not old.waits(**{name: value for name, value in told.items() if name.islower()})


def test_it_waits_once_only(old: Old) -> None:
    old.meeting.leave()
    assert not old.waits(store=object())
    assert not old.waits()


def test_who_holds_the_store_does_not_wait_for_itself(old: Old, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    old.meeting.leave()
    assert not old.waits()


def test_timeouts_that_python_gives_to_all_sockets_do_not_matter(old: Old) -> None:
    socket.setdefaulttimeout(1.0)
    try:
        old.meeting.leave()
        assert old.waits(2.0)
    finally:
        socket.setdefaulttimeout(None)
