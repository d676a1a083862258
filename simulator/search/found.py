"""What a search finds: the best layouts, in an order that is always the same, and what it looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from foretrace.simulator.errors import JobError
from foretrace.simulator.garbage import few_collections
from foretrace.simulator.job import Job
from foretrace.simulator.program import Program
from foretrace.simulator.search.space import Space
from foretrace.simulator.simulate import simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """One of the best layouts.

    *summary*: what ``simulate`` says of it. *cost*: what candidates are ordered by.
    """

    job: Job
    summary: dict[str, Any]
    cost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What a search has looked at.

    Attributes:
        n_run: layouts whose pipeline was run.
        n_simulated: layouts whose whole step was run.
        n_too_large: layouts that were looked at closely enough to see that they do not fit.
        smallest: of those, the one whose bound on memory is the lowest, and that bound; None if all fit.
        is_whole: whether the search came to its end; else somebody interrupted it.
    """

    n_candidates: int = 0
    n_run: int = 0
    n_simulated: int = 0
    n_too_large: int = 0
    smallest: tuple[Job, int] | None = None
    is_whole: bool = True

    def __add__(self, other: Counts) -> Counts:
        """Return both together."""
        smallest = [one for one in (self.smallest, other.smallest) if one is not None]
        return Counts(
            n_candidates=self.n_candidates + other.n_candidates,
            n_run=self.n_run + other.n_run,
            n_simulated=self.n_simulated + other.n_simulated,
            n_too_large=self.n_too_large + other.n_too_large,
            # Of equals the simpler, so that the order of parts changes nothing.
            smallest=min(smallest, key=lambda one: (one[1], order_of(one[0]))) if smallest else None,
            is_whole=self.is_whole and other.is_whole,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One of the best layouts of a part.

    *cost*: what candidates are ordered by. *program*: of the job, where it is at hand and small; it is left
    behind on the way to another process.
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

    *best*: the best layouts that fit, best first.
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
                simulate(
                    one.job,
                    engine="compiled",
                    program=one.program,
                    only_figures=True,
                    covers_unsaid=False,
                ).summary
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


# Several machines compete: the best of each, and which of them a budget pays for.

SearchAll = Callable[[Sequence[Space], int], Found]
"""Searches spaces for so many of their best."""

Described = Mapping[str, Any]


def affordable(
    each: Sequence[Found], n_best: int, budget_usd: float, usd: Callable[[Ranked], float]
) -> Found:
    """Return the fastest layouts of all machines that train for the money there is.

    On one machine the fastest is the cheapest, so the best of each are enough. Raises JobError if nothing is
    cheap enough; the message has what is cheapest.
    """
    costs = [(usd(one), one) for found in each for one in found.best]
    # By their places: layouts themselves have no order.
    within = sorted(
        (one.summary["step_time_s"], at) for at, (cost, one) in enumerate(costs) if cost <= budget_usd
    )
    if costs and not within:
        least_usd, one = min(costs, key=lambda cost: cost[0])
        raise JobError(
            f"nothing trains these tokens for {budget_usd:,.0f} USD: the cheapest takes "
            f"{least_usd:,.0f} USD, on {one.job.cluster.n_gpus} {one.job.cluster.name}"
        )
    best = tuple(costs[at][1] for _, at in within[:n_best])
    return Found(best=best, counts=sum((found.counts for found in each), Counts()))


def best_of_each(spaces: Sequence[Space], found: Sequence[Ranked], search: SearchAll) -> list[Ranked]:
    """Return the best layout of every machine on which any fits.

    *spaces*: one per machine. *search*: finds the best of a machine of which none is among those.
    """
    best: list[Ranked] = []
    for space in spaces:
        place = (space.cluster.name, space.cluster.n_gpus)
        own = [one for one in found if (one.job.cluster.name, one.job.cluster.n_gpus) == place]
        # The best of a machine need not be among the best of all.
        best += (own or search([space], 1).best)[:1]
    return best


def machines(
    spaces: Sequence[Space], best: Sequence[Described], budget_usd: float | None, by: str
) -> list[dict[str, Any]]:
    """Return every machine with its best layout, the best machine first; those on which nothing fits last.

    *spaces*: one per machine. *best*: what is said of the best layout of each, where any fits. *budget_usd*:
    dollars that there are; None: as many as it takes.
    """
    at = {(one["cluster"], one["gpus"]): one for one in best}
    found = [
        {
            "cluster": space.cluster.name,
            "gpus": space.cluster.n_gpus,
            "best": (own := at.get((space.cluster.name, space.cluster.n_gpus))),
            "within_budget": None if budget_usd is None or own is None else own["usd"] <= budget_usd,
        }
        for space in spaces
    ]
    return sorted(found, key=lambda one: one["best"][by] if one["best"] else float("inf"))
