"""Puts every rank on the clock of rank 0.

Spans are stamped with ``CLOCK_MONOTONIC``, which all processes of one machine share: ranks on the machine of
rank 0 need no correction. Of every other machine one rank measures the offset for all, by a ping-pong
through the store that ``torch.distributed`` was set up with: Cristian's algorithm, the round with the
shortest way there and back counts, half of that way bounds the error (Cristian 1989, doi:10.1007/BF01784024).
The store is used rather than a process group because it needs no device and leaves no collective behind.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

ROUNDS: Final = 100
"""Ping-pongs per machine. 100 rounds of some 150 µs are 15 ms; the shortest of them has no queueing in it."""

JOIN_TIMEOUT: Final = timedelta(seconds=60)
"""How long to wait for the other ranks to begin recording; they have just met in ``init_process_group``."""

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")

now_ns: Callable[[], int] = time.monotonic_ns
"""Own time of this process."""


@dataclass(frozen=True, slots=True)
class CommonClock:
    """Maps own time to the clock of the run, which starts at 0.

    Attributes:
        epoch_ns: time of rank 0 at the start of the run.
        offset_ns: what to add to own time to get the time of rank 0.
        uncertainty_ns: bound of the error of ``offset_ns``.
        warning: what a reader should know, empty if nothing.
    """

    epoch_ns: int
    offset_ns: int = 0
    uncertainty_ns: int = 0
    warning: str = ""

    @property
    def shift_ns(self) -> int:
        """What to add to own time to get the time of the run."""
        return self.offset_ns - self.epoch_ns


def machine_id() -> str:
    """Return what is the same for two processes exactly if they share a monotonic clock."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def synchronise(
    store: Any,
    rank: int,
    world_size: int,
    *,
    machine: str | None = None,
    now: Callable[[], int] = now_ns,
    timeout: timedelta = JOIN_TIMEOUT,
) -> CommonClock:
    """Return the common clock; every rank of the world must call this with a store of the same prefix.

    Args:
        store: a ``torch.distributed.Store`` that is used for nothing else.
        rank: own global rank.
        world_size: number of ranks.
        machine: what tells clocks apart; None: ``machine_id()``.
        now: own time in nanoseconds.
        timeout: how long to wait for the others.

    Raises:
        RuntimeError: what the store raises if the others do not come in time.
    """
    machine = machine_id() if machine is None else machine
    if rank == 0:
        store.set("machine", machine)
        store.set("epoch", str(now()))
    store.wait(["machine", "epoch"], timeout)
    if store.get("machine").decode() != machine and store.add(f"leader/{machine}", 1) == 1:
        store.set(f"machines/{store.add('n_machines', 1)}", machine)
    if store.add("n_here", 1) == world_size:
        store.set("all_here", "1")
    store.wait(["all_here"], timeout)
    epoch_ns = int(store.get("epoch"))
    if rank == 0:
        _answer(store, now)
        return CommonClock(epoch_ns)
    if store.get("machine").decode() == machine:
        return CommonClock(epoch_ns)
    return _measured(store, machine, epoch_ns, now, timeout)


def _answer(store: Any, now: Callable[[], int]) -> None:
    """Answer the pings of the leaders of the other machines, one machine after the other."""
    for number in range(1, store.add("n_machines", 0) + 1):
        leader = store.get(f"machines/{number}").decode()
        for i in range(ROUNDS):
            store.get(f"ping/{leader}/{i}")
            store.set(f"pong/{leader}/{i}", str(now()))


def _measured(
    store: Any, machine: str, epoch_ns: int, now: Callable[[], int], timeout: timedelta
) -> CommonClock:
    """Return the clock of a machine other than that of rank 0: its leader measures, the others read."""
    if store.add(f"measuring/{machine}", 1) == 1:
        best = min(_round(store, machine, i, now) for i in range(ROUNDS))
        store.set(f"offset/{machine}", f"{best[1]} {best[0] // 2}")
    store.wait([f"offset/{machine}"], timeout)
    offset_ns, uncertainty_ns = map(int, store.get(f"offset/{machine}").split())
    return CommonClock(epoch_ns, offset_ns, uncertainty_ns)


def _round(store: Any, machine: str, i: int, now: Callable[[], int]) -> tuple[int, int]:
    """Return the way there and back, and the offset that one ping-pong shows, in nanoseconds."""
    sent = now()
    store.set(f"ping/{machine}/{i}", "")
    answered = int(store.get(f"pong/{machine}/{i}"))
    received = now()
    return received - sent, answered - (sent + received) // 2
