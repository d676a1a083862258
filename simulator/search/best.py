"""Finds the best of very many layouts without simulating most of them, and never misses it.

Every candidate has a time that its step cannot be below. Candidates wait in a heap, ordered by the best that
is known of each: first that of all that differ in their schedule only; then the work of its fullest rank and
its optimizer; then that work with what it gathers; then its pipeline, run exactly; at last the whole step.
Whoever comes out of the heap with the time of its step is at least as good as everything that is still
inside, for all their bounds are higher. So the order is that of simulating all of them, and
`tests/simulator/test_search.py` holds it to that. Those that cannot fit are dropped when they come out, by
bounds on their memory that are never above it.

Parts of a space can be searched apart, by any number of processes (``simulator.search.parts``): the best of
all are among the best of each.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Any, Final

from foretrace.simulator.builder.step import build
from foretrace.simulator.compute.timing import ComputeModel
from foretrace.simulator.engine import choose, require_numba
from foretrace.simulator.errors import SimulationError
from foretrace.simulator.job import Job
from foretrace.simulator.memory.ranks import rank_memories
from foretrace.simulator.network.cost import Network, job_network, placed
from foretrace.simulator.program import Program
from foretrace.simulator.search.found import Counts, Found, Timed, best_of, order_of, summarised
from foretrace.simulator.search.garbage import few_collections
from foretrace.simulator.search.layouts import PipelineTimes
from foretrace.simulator.search.least_memory import LeastMemory
from foretrace.simulator.search.space import Family
from foretrace.simulator.simulate import simulate
from foretrace.simulator.variation import Variation

Progress = Callable[[str], None]

KEPT_TASKS: Final = 2_000_000
"""Tasks of all programs that are kept until it is clear whether their layouts are among the best: 200 MB."""


class Stage(IntEnum):
    """How closely a candidate has been looked at; a family is many of them at once."""

    FAMILY = 0
    FLOOR = 1
    UPDATE = 2
    ACTIONS = 3
    PIPELINE = 4
    STEP = 5


def cheapest(
    families: Iterable[Family],
    n_best: int,
    *,
    weight: Callable[[Job], float] = lambda _: 1.0,
    progress: Progress | None = None,
) -> Found:
    """Return the *n_best* of the jobs of *families* that fit into memory.

    Args:
        families: candidates; those that turn out to be impossible are left out.
        n_best: how many to return.
        weight: what a nanosecond of a job costs; 1 orders by step time, dollars per token by price.
        progress: told how far it is.

    Raises:
        EngineError: numba is not installed.
    """
    timed, counts = fastest(families, n_best, weight=weight, progress=progress)
    return Found(best=summarised(timed), counts=counts)


@few_collections()
def fastest(
    families: Iterable[Family],
    n_best: int,
    *,
    weight: Callable[[Job], float] = lambda _: 1.0,
    cutoff: float = math.inf,
    progress: Progress | None = None,
) -> tuple[list[Timed], Counts]:
    """Return the *n_best* of the jobs of *families* that fit, best first, and what was looked at.

    Args:
        families: candidates.
        n_best: how many to return.
        weight: as in ``cheapest``.
        cutoff: what costs more need not be found: so many are known already that cost no more.
        progress: told how far it is.

    Raises:
        EngineError: numba is not installed.
    """
    search = Search(weight)
    for family in families:
        search.add(family)
    while search.goes_on(n_best, cutoff):
        search.look_closer()
        if progress is not None:
            progress(
                f"{search.n_run:,} pipelines run, {search.n_simulated} simulated of {search.n_candidates:,}"
            )
    return best_of(search.best, n_best), search.counts()


class Search:
    """The heap, and what has come out of it.

    Args:
        weight: what a nanosecond of a job costs.

    Attributes:
        best: what has come out, best first.
        limit_bytes: memory that candidates may need from now on, if it is less than a device has.

    Raises:
        EngineError: numba is not installed.
    """

    def __init__(self, weight: Callable[[Job], float] = lambda _: 1.0) -> None:
        require_numba("a search")
        self.limit_bytes: float = math.inf
        self.best: list[Timed] = []
        self.n_candidates = self.n_run = self.n_simulated = self.n_too_large = 0
        self.smallest: tuple[Job, int] | None = None
        self._weight = weight
        self._heap: list[tuple[float, int, int, Job | Family]] = []
        self._programs: dict[Job, Program] = {}
        self._pushed = 0
        self._memory = LeastMemory()
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

    def add(self, family: Family) -> None:
        """Let the jobs of *family* be candidates."""
        try:
            least_ns = self._pipeline(family.job).family_ns(family)
        except SimulationError:  # its parts cannot be built
            return
        self.n_candidates += len(family.pipelines)
        self._push(Stage.FAMILY, family, least_ns)

    def goes_on(self, n_best: int, cutoff: float = math.inf) -> bool:
        """Whether any candidate is left that may be among the best, or equal to the last of them."""
        if not self._heap or self._heap[0][0] > cutoff:
            return False
        return len(self.best) < n_best or self._heap[0][0] <= self.best[n_best - 1].cost

    def look_closer(self) -> None:
        """Take out the candidate that may be the best, and look at it one stage more closely."""
        cost, negative_stage, _, one = heapq.heappop(self._heap)
        if isinstance(one, Family):
            self._expand(one)
        elif self.limit_bytes < math.inf and not self._fits(one, self._known_bytes(one, -negative_stage)):
            self._programs.pop(one, None)
        elif -negative_stage == Stage.STEP:
            self.best.append(Timed(job=one, cost=cost, program=self._programs.pop(one, None)))
        else:
            self._try(Stage(1 - negative_stage), one)

    def _expand(self, family: Family) -> None:
        """Put the jobs of *family* in one by one, unless none of them can fit."""
        if not self._fits(family.job, self._memory.family_bytes(family.job), len(family.pipelines)):
            return
        for job in family.jobs():
            self._try(Stage.FLOOR, job)

    def _try(self, stage: Stage, job: Job) -> None:
        """Look at *job* as closely as *stage* says, and put it back if it fits and is possible."""
        look = {
            Stage.FLOOR: self._floor_ns,
            Stage.UPDATE: self._update_ns,
            Stage.ACTIONS: self._actions_ns,
            Stage.PIPELINE: self._pipeline_ns,
            Stage.STEP: self._step_ns,
        }
        try:
            if (least_ns := look[stage](job)) is not None:
                self._push(stage, job, least_ns)
        except SimulationError:  # its schedule does not allow it
            self.n_candidates -= stage is Stage.FLOOR

    def _known_bytes(self, job: Job, stage: int) -> int:
        """Return the memory that *job* needs at least; all of it where its step has been run."""
        if stage == Stage.STEP:
            return max(rank.peak_bytes for rank in rank_memories(job))
        return self._memory.least_bytes(job)

    def _floor_ns(self, job: Job) -> int:
        times = self._pipeline(job)
        return max(times.floor_ns(job), times.replicas_ns(job))

    def _update_ns(self, job: Job) -> int | None:
        """Return the floor of *job* with its optimizer behind it; None: it does not fit."""
        if not self._fits(job, self._memory.least_bytes(job)):
            return None
        return self._floor_ns(job) + self._pipeline(job).update_ns(job)

    def _actions_ns(self, job: Job) -> int:
        return self._pipeline(job).actions_floor_ns(job)

    def _pipeline_ns(self, job: Job) -> int:
        self.n_run += 1
        return self._pipeline(job).step_floor_ns(job)

    def _fits(self, job: Job, peak_bytes: int, n_jobs: int = 1) -> bool:
        if peak_bytes <= min(job.cluster.device.memory_bytes, self.limit_bytes):
            return True
        self.n_too_large += n_jobs
        if self.smallest is None or (peak_bytes, order_of(job)) < (
            self.smallest[1],
            order_of(self.smallest[0]),
        ):
            self.smallest = (job, peak_bytes)
        return False

    def _step_ns(self, job: Job) -> int | None:
        """Return the time of a step of *job*, as ``simulate`` has it, without the timeline.

        None: it does not fit.
        """
        if not self._fits(job, max(rank.peak_bytes for rank in rank_memories(job))):
            return None
        self.n_simulated += 1
        if job.cluster.others or job.variation.factors:  # ranks differ in speed, which simulate sees to
            return round(float(simulate(job, engine="compiled").summary["step_time_s"]) * 1e9)
        key = (job.cluster.name, job.cluster.n_gpus, *placed(job).items())
        if key not in self._networks:
            self._networks[key] = job_network(job)
        compute = ComputeModel(job.cluster.device, job.precision)
        program = build(job, self._networks[key], compute, groups=self._pipeline(job).units.groups(job))
        if job.variation == Variation():
            self._keep(job, program)
        _, end_ns = choose("compiled", program.n_tasks, queue=program.shares_gpus).times(program)
        return int(end_ns.max())

    def _keep(self, job: Job, program: Program) -> None:
        """Keep *program* for the summary of *job*, if there is room for it."""
        kept = [*self._programs.values(), *(one.program for one in self.best if one.program is not None)]
        if program.n_tasks + sum(one.n_tasks for one in kept) <= KEPT_TASKS:
            self._programs[job] = program

    def _push(self, stage: Stage, one: Job | Family, ns: int) -> None:
        """Put a candidate in; of equals, the one that is known best comes out first."""
        self._pushed += 1
        job = one.job if isinstance(one, Family) else one
        heapq.heappush(self._heap, (ns * self._weight(job), -stage, self._pushed, one))

    def _pipeline(self, job: Job) -> PipelineTimes:
        per_node = job.ranks_per_node or job.filled_per_node
        key = (job.cluster.name, job.cluster.n_gpus, per_node)
        if key not in self._times:
            self._times[key] = PipelineTimes(job.cluster, per_node)
        return self._times[key]
