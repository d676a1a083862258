"""What a search finds: the best layouts, in an order that is always the same, and what it looked at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from foretrace.simulator.job import Job
from foretrace.simulator.program import Program
from foretrace.simulator.search.garbage import few_collections
from foretrace.simulator.simulate import simulate


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
        smallest: of those, the one whose bound on memory is the lowest, and that bound; None if all fit.
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
    """One of the best layouts of a part.

    Attributes:
        job: what to run.
        cost: what candidates were ordered by.
        program: of the job, where it is at hand and small; it is left behind on the way to another process.
    """

    job: Job
    cost: float
    program: Program | None = field(default=None, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what another process makes the same of, without the program."""
        return partial(Timed, job=self.job, cost=self.cost), ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search has found.

    Attributes:
        best: the best layouts that fit, best first.
        counts: what was looked at.
    """

    best: tuple[Ranked, ...]
    counts: Counts


def best_of(timed: Iterable[Timed], n_best: int) -> list[Timed]:
    """Return the *n_best* of those *timed*; equals in an order that no way of searching changes."""
    return sorted(timed, key=lambda one: (one.cost, order_of(one.job)))[:n_best]


@few_collections()
def summarised(timed: Sequence[Timed]) -> tuple[Ranked, ...]:
    """Return what ``simulate`` says of the best."""
    return tuple(
        Ranked(
            job=one.job,
            summary=dict(
                simulate(one.job, engine="compiled", program=one.program, only_figures=True).summary
            ),
            cost=one.cost,
        )
        for one in timed
    )


def order_of(job: Job) -> tuple[Any, ...]:
    """Return what orders jobs that cost the same: the simpler first."""
    layout = job.layout
    return (
        *(job.cluster.name, job.cluster.n_gpus),
        *(layout.pp, layout.tp, layout.cp, layout.ep, layout.expert_tp, layout.dp),
        *(job.schedule, job.virtual_stages or 0, job.micro_batch),
        *(job.sharding, job.recompute, job.offload, job.offload_layers),
    )
