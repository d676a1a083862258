"""A search of some families of jobs, with what ``simulate`` says of the best."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from foretrace.simulator.job import Job
from foretrace.simulator.search.best import fastest
from foretrace.simulator.search.found import Found, summarised
from foretrace.simulator.search.space import Family


def cheapest(
    families: Iterable[Family], n_best: int, *, weight: Callable[[Job], float] = lambda _: 1.0
) -> Found:
    """Return the *n_best* of the jobs of *families* that fit into memory."""
    timed, counts = fastest(families, n_best, weight=weight)
    return Found(best=summarised(timed), counts=counts)
