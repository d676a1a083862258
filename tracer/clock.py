"""Puts every rank on the clock of rank 0.

Spans are stamped with ``CLOCK_MONOTONIC``, which all processes of one machine share: ranks on the machine of
rank 0 need no correction. Of every other machine one rank measures the offset for all, by a ping-pong
through the store that ``torch.distributed`` was set up with: Cristian's algorithm, the round with the
shortest way there and back counts, half of that way bounds the error (Cristian 1989, doi:10.1007/BF01784024).
The store is used rather than a process group because it needs no device and leaves no collective behind.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from foretrace.traces.info import Clock
from foretrace.traces.writer import write_atomically

ROUNDS: Final = 100
"""Ping-pongs per machine. 100 rounds of some 150 µs are 15 ms; the shortest of them has no queueing in it."""

JOIN_TIMEOUT: Final = timedelta(seconds=60)
"""How long to wait for the other ranks to begin recording; they have just met in ``init_process_group``."""

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")

now_ns: Callable[[], int] = time.monotonic_ns  # own time of this process


class Measurement(NamedTuple):
    """One comparison of a clock with that of rank 0."""

    own_ns: int  # own time at which it was made
    offset_ns: int  # what to add to own time to get the time of rank 0
    uncertainty_ns: int  # bound of the error of ``offset_ns``


@dataclass(frozen=True, slots=True)
class CommonClock:
    """Maps own time to the clock of the run, which starts at 0, as it was when the ranks met."""

    epoch_ns: int  # time of rank 0 at the start of the run
    offset_ns: int = 0  # what to add to own time to get the time of rank 0
    uncertainty_ns: int = 0  # bound of the error of ``offset_ns``
    reference_ns: int = 0  # own time at which that was measured
    machine: str = ""  # what tells the clock of this rank from others
    is_shared: bool = True  # whether it is the clock of rank 0 itself
    measures: bool = False  # whether this rank measures for its machine
    answers: bool = False  # whether this is rank 0 of a run on several machines

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
    # Each other machine enters the list before its rank counts as here: once all are here, the list is whole.
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
        # `get` waits until the key is set, here and in `_round`.
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


# Quartz clocks differ by some 10 ppm: 36 ms in an hour, while offsets are known to some 50 µs. So one rank
# of each other machine measures again 2, 6, 14, ... s after the start, then each ten minutes, by ping-pongs
# with a thread of rank 0, over connections to the store of their own; no rank waits for another in the
# training. The line through the first and the last measurement is what a run stores; the others tell how
# well it fits.

FIRST_S: Final = 2.0  # time from the start of a run to its second measurement; it doubles from then on

MOST_S: Final = 600.0
"""Longest time between two measurements: the rate of a quartz clock changes with temperature, in minutes."""

POLL_S: Final = 0.2  # time between two looks of rank 0 whether somebody asks: one small message each
AGAIN_ROUNDS: Final = 20  # ping-pongs per measurement: some 3 ms of rank 0's interpreter for each machine
PATIENCE: Final = timedelta(seconds=2)  # how long either side waits for the other: rank 0 may have ended


@dataclass(frozen=True, slots=True)
class ClockLine:
    """What to add to own time to get the time of rank 0: a line over own time."""

    reference_ns: int  # own time at which *offset_ns* holds
    offset_ns: int  # what to add then
    drift_ppb: float  # nanoseconds by which that grows per second of own time
    uncertainty_ns: int  # half width of a band around the line that holds everything measured

    @classmethod
    def through(cls, found: Sequence[Measurement], *, tail_ns: int = 0) -> Self:
        """Return the line through the first and the last measurement.

        Between two offsets that are each known to some uncertainty, a line through both is off by no more
        than the larger one wherever the clock runs evenly; where it does not, measurements in between lie off
        the line. After the last one the error grows as the line's slope is uncertain.
        """
        first, last = found[0], found[-1]
        span_ns = last.own_ns - first.own_ns
        drift = (last.offset_ns - first.offset_ns) / span_ns if span_ns > 0 else 0.0
        off = [
            abs(one.offset_ns - first.offset_ns - drift * (one.own_ns - first.own_ns)) + one.uncertainty_ns
            for one in found
        ]
        grown = (first.uncertainty_ns + last.uncertainty_ns) * tail_ns / span_ns if span_ns > 0 else 0.0
        return cls(first.own_ns, first.offset_ns, drift * 1e9, round(max(off) + grown))

    def common_ns(self, own_ns: int) -> int:
        """Return the time of rank 0 at *own_ns*."""
        return own_ns + self.offset_ns + round((own_ns - self.reference_ns) * self.drift_ppb * 1e-9)


class RunClock:
    """The clock of one rank in a run: where its times lie on the clock of the run, and how surely.

    Spans of a rank on the machine of rank 0 are stored on the clock of the run. Those of others are stored on
    the rank's own clock from its first measurement on, because drift is known only later; readers map them.

    Args:
        clock: what the ranks found out when they met.
        store: a store of the run's own, for later measurements; None if there are none.
        folder: where ranks of one machine tell each other; made when needed.
        now: own time in nanoseconds.
    """

    def __init__(
        self,
        clock: CommonClock,
        store: Any = None,
        folder: Path | None = None,
        *,
        now: Callable[[], int] = now_ns,
    ) -> None:
        self.epoch_ns = clock.epoch_ns
        self.is_shared = clock.is_shared
        self.shift_ns = clock.shift_ns
        self._clock, self._now = clock, now
        self._found = [Measurement(clock.reference_ns, clock.offset_ns, clock.uncertainty_ns)]
        self._file = None if folder is None or clock.is_shared else folder / f".clock-{clock.machine}.json"
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._store = _own_connection(store) if clock.answers or clock.measures else None
        if self._store is not None:
            target = self._answer if clock.answers else self._measure
            self._thread = threading.Thread(target=target, name="foretrace-clock", daemon=True)
            self._thread.start()

    @property
    def span_shift_ns(self) -> int:
        """What to add to own time to get what spans store."""
        return self.shift_ns if self.is_shared else -self._found[0].own_ns

    def line(self) -> ClockLine:
        """Return the line that is known by now."""
        if self._file is not None and not self._clock.measures:
            with suppress(OSError, ValueError, TypeError):
                told = json.loads(self._file.read_text(encoding="utf-8"))
                self._found = [Measurement(*one) for one in told]
        found = list(self._found)
        # Waits double: the next measurement comes about as long after the last as that after the first.
        until_next_ns = min(found[-1].own_ns - found[0].own_ns, round(MOST_S * 1e9))
        # A run that has ended has no moments behind its last measurement.
        return ClockLine.through(found, tail_ns=0 if self._stopping.is_set() else until_next_ns)

    def mapping(self) -> Callable[[int], int]:
        """Return what maps own time to that of the run, as well as is known by now."""
        line = self.line()
        return lambda own_ns: line.common_ns(own_ns) - self.epoch_ns

    def shown(self) -> Clock:
        """Return how stored spans map to the clock of the run, as a sidecar says it."""
        if self.is_shared:
            return Clock()
        line = self.line()
        return Clock(
            offset_ns=line.offset_ns + line.reference_ns - self.epoch_ns,
            uncertainty_ns=line.uncertainty_ns,
            drift_ppb=line.drift_ppb,
            applied=False,
        )

    def close(self) -> None:
        """Measure once more if rank 0 still answers, and end."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(2 * PATIENCE.total_seconds() + POLL_S)
            self._thread = None  # as in Sink: it knows the process groups

    def _measure(self) -> None:
        wait_s, is_last = FIRST_S, False
        while not is_last:
            is_last = self._stopping.wait(wait_s)
            with suppress(Exception):  # rank 0 has ended, or the network is gone: what is known stands
                self._found.append(_asked(self._store, self._clock.machine, self._now))
                if self._file is not None:
                    write_atomically(self._file, json.dumps(self._found))
            wait_s = min(2 * wait_s, MOST_S)

    def _answer(self) -> None:
        """Answer whoever asks, in turn; once more when the run ends, as the others end with it."""
        store: Any = self._store
        n_answered, is_last = 0, False
        while not is_last:
            is_last = self._stopping.wait(POLL_S)
            try:
                while store.check([f"ask/{n_answered + 1}"]):
                    n_answered += 1
                    _answered(store, n_answered, self._now)
            except Exception:  # who asked has ended
                continue


def _own_connection(store: Any) -> Any:
    """Return another connection to *store*, so that nobody waits for us there; None before torch 2.11."""
    if store is None or not hasattr(store, "clone"):
        return None
    mine = store.clone()
    mine.set_timeout(PATIENCE)
    return mine


def _asked(store: Any, machine: str, now: Callable[[], int]) -> Measurement:
    """Return one more measurement, made with the thread of rank 0."""
    number = store.add("asks", 1)
    store.set(f"ask/{number}", machine)
    found = measured(store, f"again/{number}", AGAIN_ROUNDS, now)
    # The store would keep these keys for the whole training. Each side deletes those that it has read.
    for i in range(AGAIN_ROUNDS):
        store.delete_key(f"again/{number}/pong/{i}")
    return found


def _answered(store: Any, number: int, now: Callable[[], int]) -> None:
    answer(store, f"again/{number}", AGAIN_ROUNDS, now)
    for i in range(AGAIN_ROUNDS):
        store.delete_key(f"again/{number}/ping/{i}")
