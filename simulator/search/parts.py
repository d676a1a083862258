"""A search by several processes of this machine: the best of all are among the best of each.

First each has layouts of its own whose layers are cut alike, and finds what none of them is below, so that
none works out what a layer takes that another does, too. Then they are dealt out in that order: everybody has
promising ones. All know what the best cost that any of them has run, and look at nothing that costs more. So
the answer is that of one process, and so is most of the work.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, Final

from foretrace.simulator.garbage import few_collections
from foretrace.simulator.job import Job
from foretrace.simulator.search.best import Search, State, fastest
from foretrace.simulator.search.found import Counts, Found, Ranked, Timed, best_of, summarised
from foretrace.simulator.search.space import Family, Space
from foretrace.traces.private import SPAWN, Processes, without_this_folder

Progress = Callable[[str], None]

FEW: Final = 50_000
"""Layouts below which one process is done before others have started: dense ones take it 7 s, experts 20."""

LOOK_S: Final = 0.2
"""Time after which it is looked how far the processes are."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is searched for.

    Attributes:
        n_best: how many of the best to return.
        weights: what a nanosecond costs by machine and its GPUs; 1 where it is not listed.
        partial: whether who interrupts the search gets the best of what was simulated by then.
    """

    spaces: tuple[Space, ...]
    n_best: int
    weights: Mapping[tuple[str, int], float]
    partial: bool = False

    @cached_property
    def families(self) -> list[Family]:
        """The candidates, in an order that every process has."""
        return [family for space in self.spaces for family in space.families()]

    def weight(self, job: Job) -> float:
        """Return what a nanosecond of *job* costs."""
        return self.weights.get((job.cluster.name, job.cluster.n_gpus), 1.0)


class Board:
    """What the processes of a search tell one another, in memory that they share."""

    def __init__(self, n_best: int, n_parts: int) -> None:
        with without_this_folder():  # locks have a process that removes them
            self._costs = SPAWN.Array("d", [math.inf] * n_best)
        self._states = SPAWN.Array("d", [*State()] * n_parts, lock=False)
        self._is_over = SPAWN.Value("b", 0, lock=False)
        self._parent = os.getpid()

    def cutoff(self) -> float:
        """Return the last of the lowest costs. Raises KeyboardInterrupt if nobody waits for more."""
        if self._is_over.value or os.getppid() != self._parent:
            raise KeyboardInterrupt
        return float(self._costs.get_obj()[-1])

    def ran(self, cost: float) -> None:
        """Take note of what a layout costs."""
        with self._costs.get_lock():
            if cost < self._costs[-1]:
                self._costs[:] = sorted([*self._costs[:], cost])[:-1]

    def tell(self, at: int, state: State) -> None:
        """Say how far the process is that has number *at*."""
        self._states[at * len(state) : (at + 1) * len(state)] = state

    def state(self) -> State:
        """Return how far all are."""
        told, n = self._states[:], len(State._fields)
        return State.together(told[at : at + n] for at in range(0, len(told), n))

    def end(self) -> None:
        """Let everybody return what is known."""
        self._is_over.value = 1


class Worker:
    """One of *n* processes that search for what is *asked*, and tell each other by a *board*."""

    def __init__(self, asked: Asked, board: Board, n: int) -> None:
        self.asked, self.board, self.n = asked, board, n
        self._search = Search(asked.weight, board)

    def bounded(self, at: int) -> list[tuple[float, int, int]]:
        """Return what families cost at least, the same in ns, and their numbers: of those of part *at*."""
        shares: dict[tuple[Any, ...], int] = {}
        found, n_candidates = list[tuple[float, int, int]](), 0
        for number, family in enumerate(self.asked.families):
            layout, machine = family.job.layout, family.job.cluster
            cut = (machine.name, machine.n_gpus, layout.tp, layout.cp, layout.ep, layout.expert_tp)
            if shares.setdefault(cut, len(shares)) % self.n == at:
                self.board.cutoff()
                if (least_ns := self._search.least_ns(family)) is not None:
                    found.append((least_ns * self.asked.weight(family.job), least_ns, number))
                    n_candidates += len(family.pipelines)
                    self.board.tell(at, State(n_candidates))
        return found

    def best(self, some: Sequence[tuple[float, int, int]], at: int) -> tuple[list[Timed], Counts]:
        """Return the best of *some* families, as ``bounded`` has them, and what was looked at."""
        for _, least_ns, number in some:
            self._search.take(self.asked.families[number], least_ns)
        asked = self.asked
        return self._search.run(asked.n_best, partial=asked.partial, progress=partial(self.board.tell, at))


_worker: list[Worker] = []
"""The worker that this process is, if it is one."""


def _join(asked: Asked, board: Board, n: int) -> None:
    _worker.append(Worker(asked, board, n))


@few_collections()
def _bounded(at: int) -> list[tuple[float, int, int]]:
    return _worker[-1].bounded(at)


@few_collections()
def _best(some: Sequence[tuple[float, int, int]], at: int) -> tuple[list[Timed], Counts]:
    return _worker[-1].best(some, at)


def _summarised(one: Timed) -> Ranked:
    return summarised([one])[0]


def search_parts(
    spaces: Sequence[Space],
    n_best: int,
    *,
    weights: Mapping[tuple[str, int], float] | None = None,
    processes: int | None = None,
    partial: bool = False,
    progress: Progress | None = None,
) -> Found:
    """Return the *n_best* layouts of *spaces* that fit into memory.

    *weights*: what a nanosecond costs by machine and GPUs; by default all cost the same. *processes*: how
    many search; by default one for each core, where it pays. *partial*: as in ``fastest``. Raises EngineError
    if numba is not installed. Raises KeyboardInterrupt as ``fastest`` does.
    """
    tell = progress or (lambda _: None)
    asked = Asked(spaces=tuple(spaces), n_best=n_best, weights=weights or {}, partial=partial)
    if processes is None:
        processes = cores() if sum(len(family.pipelines) for family in asked.families) >= FEW else 1
    if processes > 1:
        with suppress(BrokenProcessPool, OSError):
            return _together(asked, processes, tell)
        tell("a process of the search was lost, perhaps for lack of memory; one searches all")
    timed, counts = fastest(
        asked.families,
        n_best,
        weight=asked.weight,
        partial=partial,
        progress=lambda state: tell(state.words()),
    )
    return Found(best=summarised(timed), counts=counts)


def _together(asked: Asked, n: int, tell: Progress) -> Found:
    """Search in *n* processes. Raises BrokenProcessPool if one is lost."""
    board = Board(asked.n_best, n)

    def awaited(tasks: Sequence[Future[Any]]) -> None:
        while wait(tasks, LOOK_S).not_done:
            tell(board.state().words())

    # Without its families: these are made anew in less time than they travel.
    with Processes(n, partial(_join, replace(asked), board, n)) as pool:
        tasks: list[Future[tuple[list[Timed], Counts]]] = []
        try:
            with _deaf():
                bounding = [pool.submit(_bounded, at) for at in range(n)]
            awaited(bounding)
            # Of equals the first of the space comes first, whoever has looked at it.
            order = sorted(chain.from_iterable(task.result() for task in bounding))
            tasks += [pool.submit(_best, order[at::n], at) for at in range(n)]
            awaited(tasks)
        except KeyboardInterrupt:
            board.end()
            known = [task.result() for task in tasks if task.exception() is None]
            if not asked.partial or not known:
                raise
            best, counts = _of_all(known, asked.n_best)
            return Found(best=summarised(best), counts=replace(counts, is_whole=False))
        best, counts = _of_all([task.result() for task in tasks], asked.n_best)
        return Found(best=tuple(pool.map(_summarised, best)), counts=counts)


def _of_all(found: Iterable[tuple[list[Timed], Counts]], n_best: int) -> tuple[list[Timed], Counts]:
    """Return the best of all, and what was looked at by all."""
    timed, counts = zip(*found, strict=True)
    return best_of(chain(*timed), n_best), sum(counts, Counts())


@contextmanager
def _deaf() -> Iterator[None]:
    """Have processes that are started within not hear Ctrl-C: this one does, and tells them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def cores() -> int:
    """Return the processors that this process may use."""
    # cpu_count knows nothing of containers and of taskset.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
