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
from typing import Any, Final, NamedTuple

ROUNDS: Final = 100
"""Ping-pongs per machine. 100 rounds of some 150 µs are 15 ms; the shortest of them has no queueing in it."""

JOIN_TIMEOUT: Final = timedelta(seconds=60)
"""How long to wait for the other ranks to begin recording; they have just met in ``init_process_group``."""

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")

now_ns: Callable[[], int] = time.monotonic_ns
"""Own time of this process."""


class Measurement(NamedTuple):
    """One comparison of a clock with that of rank 0.

    Attributes:
        own_ns: own time at which it was made.
        offset_ns: what to add to own time to get the time of rank 0.
        uncertainty_ns: bound of the error of ``offset_ns``.
    """

    own_ns: int
    offset_ns: int
    uncertainty_ns: int


@dataclass(frozen=True, slots=True)
class CommonClock:
    """Maps own time to the clock of the run, which starts at 0, as it was when the ranks met.

    Attributes:
        epoch_ns: time of rank 0 at the start of the run.
        offset_ns: what to add to own time to get the time of rank 0.
        uncertainty_ns: bound of the error of ``offset_ns``.
        reference_ns: own time at which that was measured.
        machine: what tells the clock of this rank from others.
        is_shared: whether it is the clock of rank 0 itself.
        measures: whether this rank measures for its machine.
        answers: whether this is rank 0 of a run on several machines.
        warning: what a reader should know, empty if nothing.
    """

    epoch_ns: int
    offset_ns: int = 0
    uncertainty_ns: int = 0
    reference_ns: int = 0
    machine: str = ""
    is_shared: bool = True
    measures: bool = False
    answers: bool = False
    warning: str = ""

    @property
    def shift_ns(self) -> int:
        """What to add to own time to get the time of the run, when the ranks met."""
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
        n_machines = store.add("n_machines", 0)
        for number in range(1, n_machines + 1):
            answer(store, store.get(f"machines/{number}").decode(), ROUNDS, now)
        return CommonClock(epoch_ns, machine=machine, answers=n_machines > 0)
    if store.get("machine").decode() == machine:
        return CommonClock(epoch_ns, machine=machine)
    if measures := store.add(f"measuring/{machine}", 1) == 1:
        store.set(f"offset/{machine}", " ".join(map(str, measured(store, machine, ROUNDS, now))))
    store.wait([f"offset/{machine}"], timeout)
    found = Measurement(*map(int, store.get(f"offset/{machine}").split()))
    return CommonClock(
        epoch_ns,
        found.offset_ns,
        found.uncertainty_ns,
        found.own_ns,
        machine=machine,
        is_shared=False,
        measures=measures,
    )


def answer(store: Any, name: str, rounds: int, now: Callable[[], int]) -> None:
    """Answer the pings of whoever measures under *name*."""
    for i in range(rounds):
        store.get(f"{name}/ping/{i}")
        store.set(f"{name}/pong/{i}", str(now()))


def measured(store: Any, name: str, rounds: int, now: Callable[[], int]) -> Measurement:
    """Return what the quickest of several ping-pongs with rank 0 tells, under a *name* of its own."""
    return min((_round(store, name, i, now) for i in range(rounds)), key=lambda one: one.uncertainty_ns)


def _round(store: Any, name: str, i: int, now: Callable[[], int]) -> Measurement:
    """Return what one ping-pong shows: the answer came somewhere between ping and pong."""
    sent = now()
    store.set(f"{name}/ping/{i}", "")
    answered = int(store.get(f"{name}/pong/{i}"))
    received = now()
    middle = (sent + received) // 2
    return Measurement(middle, answered - middle, (received - sent) // 2)
