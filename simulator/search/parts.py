"""A search in parts, which any number of processes work on: the best of all are among the best of each.

A part is some layouts of a space. Whoever works on it needs nothing but the part, so that it may be done
again elsewhere when a process is lost. Every part starts with what is known by then: layouts that cost more
than the last of the best so far need not be looked at. So the answer is the same whoever works on it, in
whatever order, and equal to that of one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from foretrace.simulator.job import Job
from foretrace.simulator.search.best import Progress, fastest
from foretrace.simulator.search.executors import Executor, Here, cores, open_executor
from foretrace.simulator.search.found import Counts, Found, Ranked, Timed, best_of, summarised
from foretrace.simulator.search.space import Family, Space

PARTS_PER_WORKER: Final = 4
"""Parts for each process: a lost one costs a part, and parts take different times."""

FEW: Final = 20_000
"""Layouts below which one process is done before others have started."""

TWICE_THE_WORK: Final = 2
"""What processes together work for what one alone would: each works out anew what layers take.

Measured on 67,875 layouts of a mixture of experts on 512 GPUs: 16 s of processor time alone, 52 s in two
processes; on 197,511 of a dense model 29 s and 54 s.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some layouts of a space.

    Attributes:
        n_best: how many of the best to return.
        weights: what a nanosecond costs by machine and its GPUs; 1 where it is not listed.
        cutoff: what costs more need not be found.
    """

    spaces: tuple[Space, ...]
    n_best: int
    weights: Mapping[tuple[str, int], float]
    cutoff: float = math.inf

    def families(self) -> Iterator[Family]:
        """Yield the candidates."""
        for space in self.spaces:
            yield from space.families()

    def weight(self, job: Job) -> float:
        """Return what a nanosecond of *job* costs."""
        return self.weights.get((job.cluster.name, job.cluster.n_gpus), 1.0)


def work_on(part: Part) -> tuple[list[Timed], Counts]:
    """Return the best of *part*, and what was looked at. This is what other processes run."""
    return fastest(part.families(), part.n_best, weight=part.weight, cutoff=part.cutoff)


def summarise(timed: Timed) -> Ranked:
    """Return what ``simulate`` says of one of the best. Other processes run this too."""
    return summarised([timed])[0]


@contextmanager
def working(spaces: Sequence[Space], named: str | None = None) -> Iterator[Executor]:
    """Give who searches *spaces*: those *named*, or as many processes of this machine as pay.

    Raises SearchError if nobody answers to that name.
    """
    if named is not None:
        executor = open_executor(named)
    elif cores() > TWICE_THE_WORK and n_layouts(spaces) >= FEW:
        executor = open_executor("local")
    else:
        executor = Here()
    try:
        yield executor
    finally:
        executor.close()


def searched(spaces: Sequence[Space], n_best: int, progress: Progress | None = None) -> Found:
    """Return the *n_best* layouts of *spaces* that fit, found on this machine."""
    with working(spaces) as executor:
        return search_parts(spaces, n_best, executor=executor, progress=progress)


def search_parts(
    spaces: Sequence[Space],
    n_best: int,
    *,
    weights: Mapping[tuple[str, int], float] | None = None,
    executor: Executor | None = None,
    partial: bool = False,
    progress: Progress | None = None,
) -> Found:
    """Return the *n_best* layouts of *spaces* that fit into memory.

    *weights*: what a nanosecond costs by machine and GPUs; by default all cost the same. *executor*: who does
    the work; by default this process. *partial*: as in ``fastest``, where this process does the work. Raises
    EngineError if numba is not installed. Raises SearchError if processes are lost again and again.
    """
    executor = executor or Here()
    whole = Part(spaces=tuple(spaces), n_best=n_best, weights=weights or {})
    if isinstance(executor, Here):
        timed, counts = fastest(
            whole.families(), n_best, weight=whole.weight, partial=partial, progress=progress
        )
        return Found(best=summarised(timed), counts=counts)
    parts = cut(whole, PARTS_PER_WORKER * executor.workers)
    # Not for one part: it would look at the same layouts twice.
    ahead = _pilot(whole) if len(parts) > 1 else math.inf
    best: list[Timed] = []
    counts = Counts()
    # Reversed, because ``pop`` takes from the end.
    waiting, running = list(reversed(parts)), 0
    tasks: set[object] = set()
    while waiting or tasks:
        while waiting and running < executor.workers:
            # What is known by now: anything above the last of the best is not worth finding.
            cutoff = best[n_best - 1].cost if len(best) >= n_best else ahead
            tasks.add(executor.start(work_on, replace(waiting.pop(), cutoff=cutoff)))
            running += 1
        for task, (found, looked_at) in executor.wait(tasks):
            tasks.discard(task)
            running -= 1
            best = best_of([*best, *found], n_best)
            counts += looked_at
        if progress is not None:
            done = len(parts) - len(waiting) - running
            progress(
                f"{done} of {len(parts)} parts, {counts.n_candidates:,} layouts, "
                f"{counts.n_simulated} simulated"
            )
    return Found(best=_all(executor, summarise, best), counts=counts)


def _pilot(whole: Part) -> float:
    """Return a cost that the last of the best is not above: theirs with the first schedule alone.

    With it every part drops most layouts at once, which it could not know to be too slow by itself.
    """
    spaces = tuple(
        replace(space, schedule=space.schedule[:1], offload=space.offload[:1]) for space in whole.spaces
    )
    found, _ = work_on(replace(whole, spaces=spaces))
    return found[-1].cost if len(found) >= whole.n_best else math.inf


def cut(whole: Part, n_parts: int) -> list[Part]:
    """Return *whole* in about so many parts, those with the same layers together and the promising first.

    What a layer takes is worked out once per tensor and context parallel degree, so that these are not cut
    apart before there are enough parts without.
    """
    if n_parts <= 1:
        return [whole]
    pieces = [piece for space in whole.spaces for piece in space.pieces()]
    # Few pipeline stages and much tensor parallelism tend to be fast: their times cut the other parts short.
    pieces.sort(key=lambda piece: (min(piece.pp), max(piece.tp)))
    n_parts = min(n_parts, len(pieces))
    # Dealt out in turns, so that no part has only the slow pieces.
    dealt = [tuple(pieces[at::n_parts]) for at in range(n_parts)]
    return [replace(whole, spaces=spaces) for spaces in dealt if spaces]


def n_layouts(spaces: Sequence[Space], up_to: int = FEW) -> int:
    """Return how many layouts *spaces* have, counted no further than *up_to*."""
    count = 0
    for space in spaces:
        for family in space.families():
            count += len(family.pipelines)
            if count >= up_to:
                return up_to
    return count


def _all(
    executor: Executor, function: Callable[[Timed], Ranked], items: Sequence[Timed]
) -> tuple[Ranked, ...]:
    """Return what *function* says of every one of *items*, in order."""
    place = {executor.start(function, item): at for at, item in enumerate(items)}
    results: dict[int, Ranked] = {}
    tasks = set(place)
    while tasks:
        for task, found in executor.wait(tasks):
            tasks.discard(task)
            results[place[task]] = found
    return tuple(results[at] for at in range(len(items)))
