"""Follows the clocks of other machines while a run is recorded: how fast they drift from that of rank 0.

Quartz clocks differ by some 10 ppm: 36 ms in an hour, while offsets are known to some 50 µs. So one rank of
each other machine measures again 2, 6, 14, ... s after the start, then each ten minutes, by ping-pongs with a
thread of rank 0, over connections to the store of their own; no rank waits for another in the training. The
line through the first and the last measurement is what a run stores; the others tell how well it fits.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Self

from foretrace.tracer.clock import CommonClock, Measurement, answer, measured, now_ns
from foretrace.traces.info import Clock
from foretrace.traces.writer import write_atomically

FIRST_S: Final = 2.0
"""Time from the start of a run to its second measurement; it doubles from then on."""

MOST_S: Final = 600.0
"""Longest time between two measurements: the rate of a quartz clock changes with temperature, in minutes."""

POLL_S: Final = 0.2
"""Time between two looks of rank 0 whether somebody asks: one small message each."""

ROUNDS: Final = 20
"""Ping-pongs per measurement: some 3 ms of rank 0's interpreter for each machine."""

PATIENCE: Final = timedelta(seconds=2)
"""How long either side waits for the other: rank 0 may have ended."""


@dataclass(frozen=True, slots=True)
class ClockLine:
    """What to add to own time to get the time of rank 0: a line over own time.

    Attributes:
        reference_ns: own time at which *offset_ns* holds.
        offset_ns: what to add then.
        drift_ppb: nanoseconds by which that grows per second of own time.
        uncertainty_ns: half width of a band around the line that holds everything measured.
    """

    reference_ns: int
    offset_ns: int
    drift_ppb: float
    uncertainty_ns: int

    @classmethod
    def through(cls, found: Sequence[Measurement], *, tail_ns: int = 0) -> Self:
        """Return the line through the first and the last measurement.

        Between two offsets that are each known to some uncertainty, a line through both is off by no more
        than the larger one wherever the clock runs evenly; where it does not, measurements in between lie off
        the line. After the last one the error grows as the line's slope is uncertain.

        Args:
            found: measurements in the order of time.
            tail_ns: for how long after the last of them the line has to hold.
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
        self.epoch_ns, self.warning = clock.epoch_ns, clock.warning
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
        until_next_ns = min(found[-1].own_ns - found[0].own_ns, round(MOST_S * 1e9))
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
    found = measured(store, f"again/{number}", ROUNDS, now)
    for i in range(ROUNDS):
        store.delete_key(f"again/{number}/pong/{i}")
    return found


def _answered(store: Any, number: int, now: Callable[[], int]) -> None:
    answer(store, f"again/{number}", ROUNDS, now)
    for i in range(ROUNDS):
        store.delete_key(f"again/{number}/ping/{i}")
