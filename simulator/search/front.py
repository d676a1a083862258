"""The fastest layout for every amount of memory: the front that the page of a search draws."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from foretrace.simulator.memory.ranks import rank_memories
from foretrace.simulator.search.best import Progress, Search
from foretrace.simulator.search.found import Ranked, summarised
from foretrace.simulator.search.garbage import few_collections
from foretrace.simulator.search.space import Family

PARTS_OF_MEMORY: Final = 50
"""The next layout of a front needs less memory than the one before, by at least this part of a GPU's."""

TOO_SLOW: Final = 2
"""Times as slow as the fastest: there a front ends."""


@few_collections()
def front(families: Iterable[Family], progress: Progress | None = None) -> tuple[Ranked, ...]:
    """Return the fastest layout of all, the fastest that needs less memory than that, and so on.

    Candidates come out of a search fastest first. Whenever one has, all that do not need less memory by a
    fiftieth of that of a GPU are dropped. So each layout here is the fastest of all that fit where it fits.
    What takes twice as long as the fastest is left out.

    Args:
        families: candidates, all of one machine.
        progress: told how far it is.

    Raises:
        EngineError: numba is not installed.
    """
    search = Search()
    for family in families:
        search.add(family)
    while search.goes_on(search.n_candidates, TOO_SLOW * search.best[0].cost if search.best else math.inf):
        n_before = len(search.best)
        search.look_closer()
        if len(search.best) > n_before:
            job = search.best[-1].job
            peak_bytes = max(rank.peak_bytes for rank in rank_memories(job))
            search.limit_bytes = peak_bytes - job.cluster.device.memory_bytes // PARTS_OF_MEMORY
            if progress is not None:
                progress(f"the front: {len(search.best)} layouts")
    return summarised(search.best)
