"""Several transfers on the same links at once: a fluid that is shared max-min fairly.

A transfer is a job. Alone it takes its work, in nanoseconds; meanwhile it fills some share of each link on
its way, 1 on the narrowest. With others it goes at a rate between 0 and 1. Rates are max-min fair: all rise
together until a link is full, those on it stay, the rest rises on. They are worked out anew whenever a job
starts or ends, or a link changes its capacity. Reference: Bertsekas & Gallager 1992, Data Networks, section
6.5.2; flow-level simulation as in Velho et al. 2013, doi:10.1145/2517448.

Nothing here knows about GPUs, schedules or SimPy: an engine starts jobs, asks when the next one ends, and
moves the clock.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from foretrace.simulator.errors import SimulationError

Link = Any
"""Whatever names a link and can be the key of a mapping."""

FULL: Final = 1e-12
"""A link this close to its capacity, as a share of it, is full."""


@dataclass(slots=True)
class _Flow:
    """A job under way: its loads at full rate, the nanoseconds of work left, and its rate now."""

    loads: Mapping[Link, float]
    left_ns: float
    rate: float = 0.0

    @property
    def is_over(self) -> bool:
        """Whether nothing is left, up to rounding."""
        # ``FULL`` for a rate of 0: what has nothing left is over on a link that is down, too.
        return self.left_ns <= ROUNDING_NS * max(self.rate, FULL)


class Span(NamedTuple):
    """How full a link was for a while.

    *link*: which. *used*: of its nominal capacity, at most 1.
    """

    link: Link
    start_ns: int
    end_ns: int
    used: float


class Fluid:
    """Links with jobs on them, and a clock in whole nanoseconds.

    *capacity*: of links that do not have their full width, as a share of it; all others have 1. *watched*:
    whether to keep how full each link was, see ``spans``.

    Raises SimulationError if a capacity is below zero.
    """

    def __init__(self, capacity: Mapping[Link, float] | None = None, *, watched: bool = False) -> None:
        self.now_ns = 0
        self.spans: list[Span] = []
        self._capacity: dict[Link, float] = {}
        self._flows: dict[Hashable, _Flow] = {}
        self._watched = watched
        self._since_ns = 0
        self._stale = False
        for link, share in (capacity or {}).items():
            self.set_capacity(link, share)

    def start(self, job: Hashable, work_ns: float, loads: Mapping[Link, float]) -> None:
        """Start a job now.

        *job*: its name, of which there must be none under way. *loads*: share of each link that it fills at
        full rate. Raises SimulationError if the job is under way already, or a figure is below zero.
        """
        if job in self._flows:
            raise SimulationError(f"job {job!r} is under way already; give each transfer a name of its own")
        if work_ns < 0 or any(load < 0 for load in loads.values()):
            raise SimulationError(f"job {job!r}: work {work_ns} ns and loads must not be below zero")
        # Before the new job is there: the span that ends now was without it.
        self._note()
        self._flows[job] = _Flow({link: load for link, load in loads.items() if load > 0}, work_ns)
        self._stale = True

    def set_capacity(self, link: Link, share: float) -> None:
        """Give *link* a *share* of its full width from now on. Raises SimulationError below zero."""
        if share < 0:
            raise SimulationError(f"link {link!r}: capacity {share} must not be below zero")
        # As above: until now the link had its old width.
        self._note()
        self._capacity[link] = share
        self._stale = True

    def rate(self, job: Hashable) -> float:
        """Return the rate of a job under way, 1 if nothing holds it up."""
        self._share()
        return self._flows[job].rate

    def next_end_ns(self) -> int | None:
        """Return when the next job ends if nothing else happens; None if none ever does."""
        self._share()
        flows = self._flows.values()
        if any(flow.is_over for flow in flows):  # also on a link that is down
            return self.now_ns
        waits = [flow.left_ns / flow.rate for flow in flows if flow.rate > 0]
        if not waits:
            return None
        # Rounded up to whole nanoseconds, less a hair, so that rounding of floats costs no nanosecond more.
        return self.now_ns + max(0, math.ceil(min(waits) - ROUNDING_NS))

    def advance(self, now_ns: int) -> list[Hashable]:
        """Move the clock to *now_ns*, no later than ``next_end_ns``, and return the jobs that have ended.

        Raises SimulationError if the clock would go back, or past the end of a job.
        """
        # This also works out the rates that are used below, if something has changed.
        end_ns = self.next_end_ns()
        if now_ns < self.now_ns or (end_ns is not None and now_ns > end_ns):
            raise SimulationError(
                f"clock at {self.now_ns} ns cannot move to {now_ns} ns; the next job ends at {end_ns} ns"
            )
        elapsed_ns = now_ns - self.now_ns
        for flow in self._flows.values():
            flow.left_ns -= elapsed_ns * flow.rate
        self.now_ns = now_ns
        done = [job for job, flow in self._flows.items() if flow.is_over]
        if done:
            # Before they are removed: the span that ends now was with them.
            self._note()
            for job in done:
                del self._flows[job]
            self._stale = True
        return done

    def used(self) -> dict[Link, float]:
        """Return how full every link with a job on it is, as a share of its nominal capacity."""
        self._share()
        found: dict[Link, float] = {}
        for flow in self._flows.values():
            for link, load in flow.loads.items():
                found[link] = found.get(link, 0.0) + load * flow.rate
        return found

    def _note(self) -> None:
        """Keep how full the links were since the last change."""
        if self._watched and self.now_ns > self._since_ns and self._flows:
            spans = (Span(link, self._since_ns, self.now_ns, used) for link, used in self.used().items())
            self.spans.extend(spans)
        self._since_ns = self.now_ns

    def _share(self) -> None:
        # Rates are wanted after all that happens at one moment, not after each change: they are lazy.
        if self._stale:
            rates = max_min({job: flow.loads for job, flow in self._flows.items()}, self._capacity)
            for job, flow in self._flows.items():
                flow.rate = rates[job]
            self._stale = False


ROUNDING_NS: Final = 1e-6
"""Work of a job that counts as none; a transfer ends on a whole nanosecond all the same."""


def max_min(
    loads: Mapping[Hashable, Mapping[Link, float]], capacity: Mapping[Link, float] | None = None
) -> dict[Hashable, float]:
    """Return the max-min fair rates of jobs, each between 0 and 1.

    All rates rise together. When a link is full, the rates of the jobs on it are final; a job that reaches 1
    is done as well. What is left of the other links is shared by the rest.

    *loads*: share of each link that each job fills at rate 1. *capacity*: of links that do not have 1.

    >>> max_min({"a": {"x": 1.0}, "b": {"x": 1.0, "y": 0.5}, "c": {"y": 1.0}})
    {'a': 0.5, 'b': 0.5, 'c': 0.75}
    """
    rates: dict[Hashable, float] = dict.fromkeys(loads, 1.0)
    free = {link: 1.0 for flow in loads.values() for link in flow}
    free |= {link: share for link, share in (capacity or {}).items() if link in free}
    rising = dict(loads)
    level = 0.0
    while rising:
        demand: dict[Link, float] = {}
        for flow in rising.values():
            for link, load in flow.items():
                demand[link] = demand.get(link, 0.0) + load
        # With no link left to fill, the jobs that are left go at full rate.
        step = min((free[link] / load for link, load in demand.items()), default=math.inf)
        if level + step >= 1:
            return rates
        level += step
        for link, load in demand.items():
            # Rounding may leave a hair less than nothing.
            free[link] = max(0.0, free[link] - step * load)
        # Relative to the load too: what rounding leaves grows with it.
        full = {link for link, load in demand.items() if free[link] <= FULL * max(load, 1.0)}
        for job in [job for job, flow in rising.items() if full & flow.keys()]:
            rates[job] = level
            del rising[job]
    return rates
