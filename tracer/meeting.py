"""Ranks that make a process group again at the same address do not meet at the store of the one before.

Rank 0 holds the store of a group. Where another rank has left the group and makes the next one before rank 0
has left, torch connects it to the old store, and the ranks wait for each other for half an hour. Of two
processes that made six groups in a row on torch 2.13 and a busy machine, 3 of 24 trials ended so without a
recording; with one, that each rank writes before it leaves, 8 of 24.
"""

from __future__ import annotations

import inspect
import os
import select
import socket
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlparse

from foretrace.tracer import internals

PATIENCE_S: Final = 60.0
"""How long the old store may stay: rank 0 may have much left to write, or the script holds its store."""

AGENT: Final = "TORCHELASTIC_USE_AGENT_STORE"
"""Set where the store is that of torchrun, which stays."""

OPEN_FILES: Final = Path("/dev/fd")
"""The open files of this process, on Linux and macOS."""

MAPPED: Final = "::ffff:"
"""How an address of IPv4 begins where it is written as one of IPv6."""

Address = tuple[str, int]


class Meeting:
    """Where this process has met the other ranks of its last process group."""

    def __init__(self) -> None:
        self._left: tuple[socket.socket, Address] | None = None

    def leave(self) -> None:
        """Keep a connection to the store of the group that is left; on rank 0 there is none to wait for."""
        import torch.distributed as dist

        with suppress(Exception):  # torch says what is wrong
            store = internals.default_store()
            while isinstance(store, dist.PrefixStore):
                store = store.underlying_store
            if isinstance(store, dist.TCPStore) and dist.get_rank() != 0:
                address = (store.host, store.port)
                if (connection := _connection(address)) is not None:
                    self._left = connection, address

    def join(self, join: Callable[..., None], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Join by *join* with *args* and *kwargs*, once the store of an earlier group there has gone."""
        left, self._left = self._left, None
        if left is not None:
            with left[0] as connection:
                if _address(join, args, kwargs) == left[1]:
                    _wait(connection)
        join(*args, **kwargs)


def _connection(address: Address) -> socket.socket | None:
    """Return a copy of a connection of this process to *address*, None if there is none.

    A question to the store itself would do, but once the store has gone torch prints an error of C++.
    """
    if socket.getdefaulttimeout() is not None:  # Python would set that, for torch as well
        return None
    hosts = {str(one[4][0]) for one in socket.getaddrinfo(*address)}
    for number in (int(file.name) for file in OPEN_FILES.iterdir()):
        host, port = _peer(number)
        if port == address[1] and host in hosts:
            return socket.socket(fileno=os.dup(number))
    return None


def _peer(number: int) -> Address:
    """Return to whom the open file *number* is connected; no host where it is to nobody by TCP."""
    with suppress(OSError):  # closed by now, or connected to nobody
        if stat.S_ISSOCK(os.fstat(number).st_mode):
            with socket.socket(fileno=os.dup(number)) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6):
                    host, port = one.getpeername()[:2]
                    return host.removeprefix(MAPPED), port
    return "", 0


def _wait(connection: socket.socket) -> None:
    """Wait until rank 0 has closed *connection*, because it has given its store up."""
    closed = select.poll()
    closed.register(connection, select.POLLIN)
    closed.poll(PATIENCE_S * 1e3)


def _address(join: Callable[..., None], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Address | None:
    """Return the address of a store that rank 0 makes for a call of *join*; None where it makes none."""
    try:
        told = inspect.signature(join).bind(*args, **kwargs).arguments
        if told.get("store") is not None or os.environ.get(AGENT) == str(True):
            return None
        method = urlparse(told.get("init_method") or "env://")
        if method.scheme == "env":
            return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return (method.hostname, method.port) if method.hostname and method.port else None
    except (TypeError, ValueError, KeyError):  # torch says what is wrong
        return None
