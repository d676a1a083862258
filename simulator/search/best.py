"""Finds the best of very many layouts without simulating most of them, and never misses it.

Every candidate has a time that its step cannot be below. Candidates wait in a heap, ordered by the best that
is known of each: first the work of its fullest rank, which costs microseconds; then its pipeline, run exactly
but without data parallelism; at last the whole step. Whoever comes out of the heap with the time of its step
is at least as good as everything that is still inside, for all their bounds are higher. So the order is that
of simulating all of them, ties apart, and `tests/simulator/test_search.py` holds it to that.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
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
class Found:
    """What a search has found.

    Attributes:
        best: the best layouts that fit, best first.
        n_candidates: layouts that were considered.
        n_run: those whose pipeline was run.
        n_simulated: those whose whole step was run.
        n_too_large: those that were looked at closely enough to see that they do not fit.
        smallest: of those, the one that needs the least memory, and how much; None if all fit.
    """

    best: tuple[Ranked, ...]
    n_candidates: int
    n_run: int
    n_simulated: int
    n_too_large: int
    smallest: tuple[Job, int] | None


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
    search = _Search(weight)
    for job in jobs:
        search.add(job)
    while len(search.best) < n_best and search.waits():
        search.look_closer()
        if progress is not None:
            progress(
                f"{search.n_run:,} pipelines run, {search.n_simulated} simulated of {search.n_candidates:,}"
            )
    return Found(
        best=tuple(search.best),
        n_candidates=search.n_candidates,
        n_run=search.n_run,
        n_simulated=search.n_simulated,
        n_too_large=search.n_too_large,
        smallest=search.smallest,
    )


class _Search:
    """The heap, and what has come out of it."""

    def __init__(self, weight: Callable[[Job], float]) -> None:
        self.best: list[Ranked] = []
        self.n_candidates = self.n_run = self.n_simulated = self.n_too_large = 0
        self.smallest: tuple[Job, int] | None = None
        self._weight = weight
        self._heap: list[tuple[float, int, int, Job]] = []
        self._times: dict[Any, PipelineTimes] = {}
        self._networks: dict[Any, Network] = {}

    def add(self, job: Job) -> None:
        """Let *job* be a candidate."""
        try:
            floor_ns = self._pipeline(job).floor_ns(job)
        except SimulationError:  # its parts cannot be built
            return
        self.n_candidates += 1
        self._push(Stage.FLOOR, job, floor_ns, self.n_candidates)

    def waits(self) -> bool:
        """Whether any candidate is left."""
        return bool(self._heap)

    def look_closer(self) -> None:
        """Take out the candidate that may be the best, and look at it one stage more closely."""
        cost, negative_stage, number, job = heapq.heappop(self._heap)
        stage = Stage(-negative_stage)
        if stage is Stage.STEP:
            summary = dict(simulate(job, engine="compiled").summary)
            self.best.append(Ranked(job=job, summary=summary, cost=cost))
            return
        try:
            if stage is Stage.FLOOR:
                self.n_run += 1
                self._push(Stage.PIPELINE, job, self._pipeline(job).pipeline_ns(job), number)
            elif self._fits(job):
                self.n_simulated += 1
                self._push(Stage.STEP, job, self._step_ns(job), number)
        except SimulationError:  # its schedule does not allow it
            self.n_candidates -= 1

    def _fits(self, job: Job) -> bool:
        peak_bytes = max(rank.peak_bytes for rank in rank_memories(job))
        if peak_bytes <= job.cluster.device.memory_bytes:
            return True
        self.n_too_large += 1
        if self.smallest is None or peak_bytes < self.smallest[1]:
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
