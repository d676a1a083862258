"""Finds the best of very many layouts without simulating most of them, and never misses it.

Every candidate has a time that its step cannot be below. Candidates wait in a heap, ordered by the best that
is known of each: first that of all that differ in their schedule only, without and with what they compute
again; then the work of its fullest rank and its optimizer; then that work with what it gathers; then its
pipeline, run exactly; at last the whole step. Whoever comes out of the heap with the time of its step is at
least as good as everything that is still inside, for all their bounds are higher. So the order is that of
simulating all of them, and `tests/simulator/test_search.py` holds it to that. Those that cannot fit are
dropped when they come out, by bounds on their memory that are never above it.

Parts of a space can be searched apart, by any number of processes (``simulator.search.parts``): the best of
all are among the best of each.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any, Final, NamedTuple, Protocol

from foretrace.simulator.builder.step import build
from foretrace.simulator.compute.timing import ComputeModel
from foretrace.simulator.engine import choose, require_numba
from foretrace.simulator.errors import SimulationError
from foretrace.simulator.garbage import few_collections
from foretrace.simulator.job import Job
from foretrace.simulator.memory.ranks import host_holds, peak_bytes, rank_memories
from foretrace.simulator.network.cost import Network, job_network, placed
from foretrace.simulator.program import Program
from foretrace.simulator.search.found import Counts, Ranked, Timed, best_of, order_of, summarised
from foretrace.simulator.search.layouts import LeastMemory, PipelineTimes
from foretrace.simulator.search.space import Family
from foretrace.simulator.simulate import simulate
from foretrace.simulator.variation import Variation
from foretrace.topologies.cluster import Cluster
from foretrace.topologies.units import format_time

KEPT_TASKS: Final = 2_000_000
"""Tasks of all programs that are kept until it is clear whether their layouts are among the best: 200 MB."""


class Stage(IntEnum):
    """How closely a candidate has been looked at; a family is many of them at once."""

    PLAIN = 0
    FAMILY = 1
    FLOOR = 2
    UPDATE = 3
    ACTIONS = 4
    PIPELINE = 5
    STEP = 6


class State(NamedTuple):
    """How far a search is, as numbers that processes tell one another.

    Attributes:
        n_candidates, n_run, n_simulated: as in ``Counts``.
        best_s: the step time of the best that was run so far; infinite if there is none.
        left_s: what no step is below of all that may still be the best.
    """

    n_candidates: float = 0
    n_run: float = 0
    n_simulated: float = 0
    best_s: float = math.inf
    left_s: float = math.inf

    @classmethod
    def together(cls, states: Iterable[Sequence[float]]) -> State:
        """Return how far searches of parts are."""
        candidates, run, simulated, best_s, left_s = zip(*states, strict=True)
        return cls(sum(candidates), sum(run), sum(simulated), min(best_s), min(left_s))

    def words(self) -> str:
        """Return this for people."""
        if not self.n_run:
            return f"{self.n_candidates:,.0f} layouts considered"
        said = (
            f"{self.n_run:,.0f} pipelines run, {self.n_simulated:.0f} simulated of {self.n_candidates:,.0f}"
        )
        if math.isinf(self.best_s):
            return said
        left_s = min(self.left_s, self.best_s)
        return f"{said}; best so far {format_time(self.best_s)}, none below {format_time(left_s)}"


class Others(Protocol):
    """Those who search other layouts of the same space at the same time."""

    def cutoff(self) -> float:
        """Return a cost that the last of the best of all is not above; raises what is to end the search."""

    def ran(self, cost: float) -> None:
        """Take note of what a layout costs that fits."""


class Nobody:
    """Nobody else searches."""

    def cutoff(self) -> float:
        """Return a cost that nothing is above."""
        return math.inf

    def ran(self, cost: float) -> None:
        """Nobody has to know."""


@few_collections()
def fastest(
    families: Iterable[Family],
    n_best: int,
    *,
    weight: Callable[[Job], float] = lambda _: 1.0,
    partial: bool = False,
    progress: Callable[[State], None] = lambda _: None,
) -> tuple[list[Timed], Counts]:
    """Return the *n_best* of the jobs of *families* that fit, best first, and what was looked at.

    *weight*: what a nanosecond of a job costs; 1 orders by step time, dollars per token by price. *partial*:
    return the best of what was simulated by then to whoever interrupts it. Raises EngineError if numba is not
    installed. Raises KeyboardInterrupt if it was interrupted, and nothing was simulated yet, or *partial* is
    not set.
    """
    search = Search(weight)
    for family in families:
        search.add(family)
        progress(search.state())
    return search.run(n_best, partial=partial, progress=progress)


class Search:
    """The heap, and what has come out of it.

    *weight*: what a nanosecond of a job costs. *others*: who else searches.

    *quickest*: what the best step costs that has been run so far, and whose it is. *limit_bytes*: memory that
    candidates may need from now on, if it is less than a device has.

    Raises EngineError if numba is not installed.
    """

    def __init__(
        self,
        weight: Callable[[Job], float] = lambda _: 1.0,
        others: Others | None = None,
    ) -> None:
        require_numba("a search")
        self._others = others or Nobody()
        self._memory = LeastMemory()
        self._times: dict[Any, PipelineTimes] = {}
        self._networks: dict[Any, Network] = {}
        self._sites: dict[tuple[str, int], Cluster] = {}
        self.limit_bytes: float = math.inf
        self.best: list[Timed] = []
        self.n_candidates = self.n_run = self.n_simulated = self.n_too_large = 0
        self.smallest: tuple[Job, int] | None = None
        self.quickest: tuple[float, Job] | None = None
        self._weight = weight
        self._heap: list[tuple[float, int, int, Job | Family]] = []
        self._programs: dict[Job, Program] = {}
        self._pushed = 0

    def counts(self) -> Counts:
        """Return what was looked at so far."""
        return Counts(
            n_candidates=self.n_candidates,
            n_run=self.n_run,
            n_simulated=self.n_simulated,
            n_too_large=self.n_too_large,
            smallest=self.smallest,
        )

    @property
    def least_left(self) -> float:
        """What everything costs at least that has not come out."""
        return self._heap[0][0] if self._heap else math.inf

    def simulated(self) -> list[Timed]:
        """Return all whose step has been run, those that may not be the best as well."""
        inside = [
            Timed(job=one, cost=cost, program=self._programs.get(one))
            for cost, stage, _, one in self._heap
            if -stage == Stage.STEP and not isinstance(one, Family)
        ]
        return [*self.best, *inside]

    def state(self) -> State:
        """Return how far the search is."""
        counts = (self.n_candidates, self.n_run, self.n_simulated)
        if self.quickest is None:
            return State(*counts)
        cost, job = self.quickest
        per_s = self._weight(job) * 1e9
        return State(*counts, best_s=cost / per_s, left_s=self.least_left / per_s)

    def run(
        self, n_best: int, *, partial: bool, progress: Callable[[State], None]
    ) -> tuple[list[Timed], Counts]:
        """Return the *n_best* of what was added, and what was looked at, as ``fastest`` does."""
        try:
            while self.goes_on(n_best, self._others.cutoff()):
                self.look_closer()
                progress(self.state())
        except KeyboardInterrupt:
            known = best_of(self.simulated(), n_best)
            if not known or not partial:
                raise
            return known, replace(self.counts(), is_whole=False)
        return best_of(self.best, n_best), self.counts()

    def add(self, family: Family) -> None:
        """Let the jobs of *family* be candidates."""
        if (least_ns := self.least_ns(family)) is not None:
            self.take(family, least_ns)

    def least_ns(self, family: Family) -> int | None:
        """Return what no job of *family* is below, without what is computed again; None: none is possible."""
        return self._least_ns(family, again=family.job.recompute == "none")

    def take(self, family: Family, least_ns: int) -> None:
        """Let the jobs of *family* be candidates, none below *least_ns*, as ``least_ns`` has it."""
        self._push(Stage.FAMILY if family.job.recompute == "none" else Stage.PLAIN, family, least_ns)
        self.n_candidates += len(family.pipelines)

    def _least_ns(self, family: Family, *, again: bool) -> int | None:
        try:
            site = family._replace(job=self._of_site(family.job))
            return self._pipeline(site.job).family_ns(site, again=again)
        except SimulationError:  # its parts cannot be built
            return None

    def goes_on(self, n_best: int, cutoff: float = math.inf) -> bool:
        """Whether any candidate is left that may be among the best, or equal to the last of them."""
        if not self._heap or self._heap[0][0] > cutoff:
            return False
        return len(self.best) < n_best or self._heap[0][0] <= self.best[n_best - 1].cost

    def look_closer(self) -> None:
        """Take out the candidate that may be the best, and look at it one stage more closely."""
        cost, negative_stage, _, one = heapq.heappop(self._heap)
        if isinstance(one, Family):
            if -negative_stage == Stage.FAMILY:
                self._expand(one)
            elif (least_ns := self._least_ns(one, again=True)) is not None:
                self._push(Stage.FAMILY, one, least_ns)
            else:
                self.n_candidates -= len(one.pipelines)
            return
        is_run = -negative_stage == Stage.STEP
        if self.limit_bytes < math.inf and not self._fits(
            one, peak_bytes(one) if is_run else self._memory.least_bytes(self._of_site(one))
        ):
            self._programs.pop(one, None)
        elif is_run:
            self.best.append(Timed(job=one, cost=cost, program=self._programs.pop(one, None)))
        else:
            self._try(Stage(1 - negative_stage), one)

    def _expand(self, family: Family) -> None:
        """Put the jobs of *family* in one by one, unless none of them can fit."""
        least_bytes = self._memory.family_bytes(self._of_site(family.job))
        if not self._fits(family.job, least_bytes, len(family.pipelines)):
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
                cost = self._push(stage, job, least_ns)
                if stage == Stage.STEP:
                    self._others.ran(cost)
                    if self.quickest is None or cost < self.quickest[0]:
                        self.quickest = (cost, job)
        except SimulationError:  # its schedule does not allow it
            self.n_candidates -= stage is Stage.FLOOR

    def _of_site(self, job: Job) -> Job:
        """Return *job* as one of its sites does it: what it takes there is the least that a step takes.

        Sites of one machine are one object, as whoever remembers expects.
        """
        if job.n_sites == 1:
            return job
        site = job.of_one_site
        return replace(
            site, cluster=self._sites.setdefault((site.cluster.name, job.cluster.n_gpus), site.cluster)
        )

    def _floor_ns(self, job: Job) -> int:
        site = self._of_site(job)
        times = self._pipeline(site)
        return max(times.floor_ns(site), times.replicas_ns(site))

    def _update_ns(self, job: Job) -> int | None:
        """Return the floor of *job* with its optimizer behind it; None: it does not fit."""
        site = self._of_site(job)
        if not self._fits(job, self._memory.least_bytes(site)):
            return None
        return self._floor_ns(job) + self._pipeline(site).update_ns(site)

    def _actions_ns(self, job: Job) -> int:
        site = self._of_site(job)
        return self._pipeline(site).actions_floor_ns(site)

    def _pipeline_ns(self, job: Job) -> int:
        self.n_run += 1
        site = self._of_site(job)
        return self._pipeline(site).step_floor_ns(site)

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
        ranks = rank_memories(job)
        if not self._fits(job, max(rank.peak_bytes for rank in ranks)):
            return None
        if not host_holds(job, ranks):
            self.n_too_large += 1
            return None
        self.n_simulated += 1
        if job.cluster.others or job.variation.factors or job.n_sites > 1:
            # ranks differ in speed, or sites meet, which simulate sees to
            summary = simulate(job, engine="compiled", only_figures=True, covers_unsaid=False).summary
            return round(float(summary["average_step_time_s"]) * 1e9)
        key = (job.cluster.name, job.cluster.n_gpus, *placed(job).items())
        if key not in self._networks:
            self._networks[key] = job_network(job)
        compute = ComputeModel(job.cluster.device, job.precision)
        groups = self._pipeline(job).units.groups(job)
        program = build(job, self._networks[key], compute, groups=groups, merges=True)
        # A summary is made of a program as it was built; with stragglers or jitter simulate changes its
        # durations.
        if job.variation == Variation():
            self._keep(job, program)
        _, end_ns = choose("compiled", program.n_tasks, queue=program.shares_gpus).times(program)
        return int(end_ns.max())

    def _keep(self, job: Job, program: Program) -> None:
        """Keep *program* for the summary of *job*, if there is room for it."""
        kept = [*self._programs.values(), *(one.program for one in self.best if one.program is not None)]
        if program.n_tasks + sum(one.n_tasks for one in kept) <= KEPT_TASKS:
            self._programs[job] = program

    def _push(self, stage: Stage, one: Job | Family, ns: int) -> float:
        """Put a candidate in and return what it costs; of equals, the one known best comes out first."""
        self._pushed += 1
        cost = ns * self._weight(one.job if isinstance(one, Family) else one)
        # Of equals the one that was looked at most closely comes first: a whole step of that cost ends
        # the search there. The running number keeps jobs themselves from ever being compared.
        heapq.heappush(self._heap, (cost, -stage, self._pushed, one))
        return cost

    def _pipeline(self, job: Job) -> PipelineTimes:
        per_node = job.ranks_per_node or job.filled_per_node
        key = (job.cluster.name, job.cluster.n_gpus, per_node)
        if key not in self._times:
            self._times[key] = PipelineTimes(job.cluster, per_node)
        return self._times[key]


# The fastest layout for every amount of memory: the front that the page of a search draws.

PARTS_OF_MEMORY: Final = 50
"""The next layout of a front needs less memory than the one before, by at least this part of a GPU's."""

TOO_SLOW: Final = 2
"""Times as slow as the fastest: there a front ends."""


@few_collections()
def front(families: Iterable[Family], progress: Callable[[str], None] | None = None) -> tuple[Ranked, ...]:
    """Return the fastest layout of all, the fastest that needs less memory than that, and so on.

    Of those that take equally long it is the one that needs the least. Candidates come out of a search
    fastest first. Whenever one has, all that do not need less memory by a fiftieth of that of a GPU are
    dropped. So each layout here is the fastest of all that fit where it fits. What takes twice as long as the
    fastest is left out. Raises EngineError if numba is not installed.
    """
    search = Search()
    for family in families:
        search.add(family)
    while search.goes_on(search.n_candidates, TOO_SLOW * search.best[0].cost if search.best else math.inf):
        n_before = len(search.best)
        search.look_closer()
        if len(search.best) > n_before:
            while search.goes_on(search.n_candidates, search.best[-1].cost):  # what takes as long
                search.look_closer()
            leanest = min(search.best[n_before:], key=lambda one: peak_bytes(one.job))
            search.best[n_before:] = [leanest]
            search.limit_bytes = (
                peak_bytes(leanest.job) - leanest.job.cluster.device.memory_bytes // PARTS_OF_MEMORY
            )
            if progress is not None:
                progress(f"the front: {len(search.best)} layouts")
    return summarised(search.best)
