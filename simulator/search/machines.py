"""Several machines compete: the best of each, and which of them a budget pays for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from foretrace.simulator.errors import JobError
from foretrace.simulator.search.found import Counts, Found, Ranked
from foretrace.simulator.search.space import Space

SearchAll = Callable[[Sequence[Space], int], Found]
"""Searches spaces for so many of their best."""

Described = Mapping[str, Any]


def affordable(
    each: Sequence[Found], n_best: int, budget_usd: float, usd: Callable[[Ranked], float]
) -> Found:
    """Return the fastest layouts of all machines that train for the money there is.

    On one machine the fastest is the cheapest, so the best of each are enough.

    Args:
        each: what was found on each machine.
        n_best: how many to return.
        budget_usd: dollars that there are.
        usd: what a layout takes of them.

    Raises:
        JobError: nothing is cheap enough; the message has what is cheapest.
    """
    costs = [(usd(one), one) for found in each for one in found.best]
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

    Args:
        spaces: one per machine.
        found: the best of all, best first.
        search: finds the best of a machine of which none is among those.
    """
    best: list[Ranked] = []
    for space in spaces:
        place = (space.cluster.name, space.cluster.n_gpus)
        own = [one for one in found if (one.job.cluster.name, one.job.cluster.n_gpus) == place]
        best += (own or search([space], 1).best)[:1]
    return best


def machines(
    spaces: Sequence[Space], best: Sequence[Described], budget_usd: float | None, by: str
) -> list[dict[str, Any]]:
    """Return every machine with its best layout, the best machine first; those on which nothing fits last.

    Args:
        spaces: one per machine.
        best: what is said of the best layout of each, where any fits.
        budget_usd: dollars that there are; None: as many as it takes.
        by: the figure of a layout that they compete by.
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
