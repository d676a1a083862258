"""Finds the best of very many layouts without simulating most of them, and never misses it.

Every candidate has a time that its step cannot be below. Candidates wait in a heap, ordered by the best that
is known of each: first the work of its fullest rank, which costs microseconds; then its pipeline, run exactly
but without data parallelism; at last the whole step. Whoever comes out of the heap with the time of its step
is at least as good as everything that is still inside, for all their bounds are higher. So the order is that
of simulating all of them, and `tests/simulator/test_search.py` holds it to that. Those that cannot fit are
dropped when they first come out, by a bound on their memory that is never above it.

Parts of a space can be searched apart, by any number of processes (``simulator.search.parts``): the best of
all are among the best of each.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from simulator.builder.step import build
from simulator.compute.timing import ComputeModel
from simulator.engine import choose
from simulator.errors import SimulationError
from simulator.job import Job
from simulator.memory.ranks import rank_memories
from simulator.network.cost import Network
from simulator.network.nccl import choice
from simulator.search.layouts import PipelineTimes
from simulator.search.least_memory import least_bytes
from simulator.simulate import simulate
from topologies.placement import place

Progress = Callable[[str], None]


class Stage(IntEnum):
    """How closely a candidate has been looked at."""

    FLOOR = 0
    PIPELINE = 1
    STEP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """One of the best layouts.

    Attributes:
        job: what to run.
        summary: what ``simulate`` says of it.
        cost: what candidates were ordered by.
    """

    job: Job
    summary: dict[str, Any]
    cost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What a search has looked at.

    Attributes:
        n_candidates: layouts that were considered.
        n_run: those whose pipeline was run.
        n_simulated: those whose whole step was run.
        n_too_large: those that were looked at closely enough to see that they do not fit.
        smallest: of those, the one that needs the least memory, and how much; None if all fit.
    """

    n_candidates: int = 0
    n_run: int = 0
    n_simulated: int = 0
    n_too_large: int = 0
    smallest: tuple[Job, int] | None = None

    def __add__(self, other: Counts) -> Counts:
        """Return both together."""
        smallest = [one for one in (self.smallest, other.smallest) if one is not None]
        return Counts(
            n_candidates=self.n_candidates + other.n_candidates,
            n_run=self.n_run + other.n_run,
            n_simulated=self.n_simulated + other.n_simulated,
            n_too_large=self.n_too_large + other.n_too_large,
            smallest=min(smallest, key=lambda one: (one[1], order_of(one[0]))) if smallest else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One of the best layouts of a part: the job, and what candidates were ordered by."""

    job: Job
    cost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search has found.

    Attributes:
        best: the best layouts that fit, best first.
        counts: what was looked at.
    """

    best: tuple[Ranked, ...]
    counts: Counts


def cheapest(
    jobs: Iterable[Job],
    n_best: int,
    *,
    weight: Callable[[Job], float] = lambda _: 1.0,
    progress: Progress | None = None,
) -> Found:
    """Return the *n_best* of *jobs* that fit into memory.

    Args:
        jobs: candidates; those that turn out to be impossible are left out.
        n_best: how many to return.
        weight: what a nanosecond of a job costs; 1 orders by step time, dollars per token by price.
        progress: told how far it is.

    Raises:
        EngineError: numba is not installed.
    """
    timed, counts = fastest(jobs, n_best, weight=weight, progress=progress)
    return Found(best=summarised(timed), counts=counts)


def fastest(
    jobs: Iterable[Job],
    n_best: int,
    *,
    weight: Callable[[Job], float] = lambda _: 1.0,
    cutoff: float = math.inf,
    progress: Progress | None = None,
) -> tuple[list[Timed], Counts]:
    """Return the *n_best* of *jobs* that fit, best first, and what was looked at.

    Args:
        jobs: candidates.
        n_best: how many to return.
        weight: as in ``cheapest``.
        cutoff: what costs more need not be found: so many are known already that cost no more.
        progress: told how far it is.

    Raises:
        EngineError: numba is not installed.
    """
    search = _Search(weight)
    for job in jobs:
        search.add(job)
    while search.goes_on(n_best, cutoff):
        search.look_closer()
        if progress is not None:
            progress(
                f"{search.n_run:,} pipelines run, {search.n_simulated} simulated of {search.n_candidates:,}"
            )
    return best_of(search.best, n_best), search.counts()


def best_of(timed: Iterable[Timed], n_best: int) -> list[Timed]:
    """Return the *n_best* of those *timed*; equals in an order that no way of searching changes."""
    return sorted(timed, key=lambda one: (one.cost, order_of(one.job)))[:n_best]


def summarised(timed: Sequence[Timed]) -> tuple[Ranked, ...]:
    """Return what ``simulate`` says of the best."""
    return tuple(
        Ranked(job=one.job, summary=dict(simulate(one.job, engine="compiled").summary), cost=one.cost)
        for one in timed
    )


def order_of(job: Job) -> tuple[Any, ...]:
    """Return what orders jobs that cost the same: the simpler first."""
    layout = job.layout
    return (
        *(job.cluster.name, job.cluster.n_gpus),
        *(layout.pp, layout.tp, layout.cp, layout.ep, layout.dp),
        *(job.schedule, job.virtual_stages or 0, job.micro_batch),
        *(job.sharding, job.recompute, job.offload),
    )


class _Search:
    """The heap, and what has come out of it."""

    def __init__(self, weight: Callable[[Job], float]) -> None:
        self.best: list[Timed] = []
        self.n_candidates = self.n_run = self.n_simulated = self.n_too_large = 0
        self.smallest: tuple[Job, int] | None = None
        self._weight = weight
        self._heap: list[tuple[float, int, int, Job]] = []
        self._times: dict[Any, PipelineTimes] = {}
        self._networks: dict[Any, Network] = {}

    def counts(self) -> Counts:
        """Return what was looked at so far."""
        return Counts(
            n_candidates=self.n_candidates,
            n_run=self.n_run,
            n_simulated=self.n_simulated,
            n_too_large=self.n_too_large,
            smallest=self.smallest,
        )

    def add(self, job: Job) -> None:
        """Let *job* be a candidate."""
        try:
            times = self._pipeline(job)
            floor_ns = max(times.floor_ns(job), times.replicas_ns(job))
        except SimulationError:  # its parts cannot be built
            return
        self.n_candidates += 1
        self._push(Stage.FLOOR, job, floor_ns, self.n_candidates)

    def goes_on(self, n_best: int, cutoff: float) -> bool:
        """Whether any candidate is left that may be among the best, or equal to the last of them."""
        if not self._heap or self._heap[0][0] > cutoff:
            return False
        return len(self.best) < n_best or self._heap[0][0] <= self.best[n_best - 1].cost

    def look_closer(self) -> None:
        """Take out the candidate that may be the best, and look at it one stage more closely."""
        cost, negative_stage, number, job = heapq.heappop(self._heap)
        stage = Stage(-negative_stage)
        if stage is Stage.STEP:
            self.best.append(Timed(job=job, cost=cost))
            return
        try:
            if stage is Stage.FLOOR:
                if self._fits(job, least_bytes(job)):
                    self.n_run += 1
                    times = self._pipeline(job)
                    least_ns = max(times.pipeline_ns(job), times.replicas_ns(job))
                    self._push(Stage.PIPELINE, job, least_ns, number)
            elif self._fits(job, max(rank.peak_bytes for rank in rank_memories(job))):
                self.n_simulated += 1
                self._push(Stage.STEP, job, self._step_ns(job), number)
        except SimulationError:  # its schedule does not allow it
            return

    def _fits(self, job: Job, peak_bytes: int) -> bool:
        if peak_bytes <= job.cluster.device.memory_bytes:
            return True
        self.n_too_large += 1
        if self.smallest is None or (peak_bytes, order_of(job)) < (
            self.smallest[1],
            order_of(self.smallest[0]),
        ):
            self.smallest = (job, peak_bytes)
        return False

    def _step_ns(self, job: Job) -> int:
        """Return the time of a step of *job*, as ``simulate`` has it, without the timeline."""
        if job.cluster.others or job.variation.factors:  # ranks differ in speed, which simulate sees to
            return round(float(simulate(job, engine="compiled").summary["step_time_s"]) * 1e9)
        key = (job.cluster.name, job.cluster.n_gpus, job.placement, job.nccl_algo, job.nccl_proto)
        if key not in self._networks:
            placed = place(job.layout.world_size, job.cluster, job.placement)
            self._networks[key] = Network(job.cluster, placed, choice(job.nccl_algo, job.nccl_proto))
        program = build(job, self._networks[key], ComputeModel(job.cluster.device, job.precision))
        _, end_ns = choose("compiled", program.n_tasks, queue=program.shares_gpus).times(program)
        return int(end_ns.max())

    def _push(self, stage: Stage, job: Job, ns: int, number: int) -> None:
        """Put a candidate in; of equals, the one that is known best comes out first."""
        heapq.heappush(self._heap, (ns * self._weight(job), -stage, number, job))

    def _pipeline(self, job: Job) -> PipelineTimes:
        key = (job.cluster.name, job.cluster.n_gpus)
        if key not in self._times:
            self._times[key] = PipelineTimes(job.cluster)
        return self._times[key]
