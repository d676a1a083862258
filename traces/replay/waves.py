"""A graph of dependencies in waves: what can be worked out at once, for many spans and scenarios together.

A span starts when all that it depends on has ended. Spans that take part in one communication move data from
when the last of them has started, each as long as its own work takes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretrace.traces.columns import Int64Array, distinct, factorized, ranges
from foretrace.traces.errors import RunError

FloatArray = NDArray[np.float64]
_Rows = NDArray[np.intp]


class Edges(NamedTuple):
    """Dependencies: span ``after[i]`` starts when span ``before[i]`` has ended; sorted by ``after``."""

    after: Int64Array
    before: Int64Array

    @classmethod
    def of(cls, after: Int64Array, before: Int64Array) -> Edges:
        """Return the edges between pairs of spans."""
        order = np.argsort(after, kind="stable")
        return cls(after[order], before[order])

    def reduced(self, n: int) -> Edges:
        """Return the edges between *n* spans without those that a way over a span in between implies."""
        count = np.bincount(self.after, minlength=n)
        further = self.before[ranges((np.cumsum(count) - count)[self.before], count[self.before])]
        after, over = (np.repeat(ends, count[self.before]) for ends in self)
        implied = (after * n + further)[(further < over) & (over < after)]  # a circle stays one
        edge = distinct(self.after * n + self.before)
        at = np.searchsorted(edge, implied)
        kept = np.ones(len(edge), np.bool_)
        kept[at[edge[np.minimum(at, len(edge) - 1)] == implied]] = False
        return Edges(*np.divmod(edge[kept], n))

    def latest(self, n: int, end: Int64Array, otherwise: Int64Array) -> Int64Array:
        """Return for each of *n* spans when the last that it depends on ends, *otherwise* without any."""
        found = otherwise.copy()
        if len(self.after):
            first = np.flatnonzero(np.diff(self.after, prepend=-1))
            found[self.after[first]] = np.maximum.reduceat(end[self.before], first)
        return found


class Graph:
    """Spans, and when each can start: as soon as what it depends on, and its mates', has ended.

    What nothing else waits for, and waits for nothing else, is a *chain*: one span with the sum of their
    durations. A *unit* is what starts at once: a chain, or all of a communication. Units are numbered in
    waves, of which each depends on those before; so a wave is one maximum over what its edges bring.

    Args:
        n: how many spans there are.
        edges: what they depend on.
        instance: communication that each takes part in, -1 if in none.
        chains: whether spans may be put together; with delays they may not.
        apart: whether each chain is a unit of its own, behind its mates in no wave: see ``played_apart``.

    Raises:
        RunError: spans wait for one another in a circle.
    """

    def __init__(
        self, n: int, edges: Edges, instance: Int64Array, *, chains: bool = True, apart: bool = False
    ) -> None:
        joins = instance >= 0
        meets = joins.copy()
        if not apart:
            meets[joins] = np.bincount(instance[joins])[instance[joins]] > 1
        is_only = np.full(len(edges.after), chains)
        is_only &= np.bincount(edges.after, minlength=n)[edges.after] == 1
        is_only &= np.bincount(edges.before, minlength=n)[edges.before] == 1
        is_only &= ~meets[edges.after]
        head = np.arange(n)
        head[edges.after[is_only]] = edges.before[is_only]
        for _ in range(n.bit_length()):  # twice as far each time
            further = head[head]
            if np.array_equal(further, head):
                break
            head = further
        self._order = np.argsort(head, kind="stable")
        self._bounds = np.flatnonzero(np.diff(head[self._order], prepend=-1))
        self.head = head[self._order[self._bounds]]  # first span of each chain, ascending
        sizes = np.diff(self._bounds, append=n)
        if is_only.any() and (circle := np.isin(self.head, edges.after[is_only])).any():
            raise _circle(int(sizes[circle].sum()))
        chain = (np.cumsum(head == np.arange(n)) - 1)[head]
        after, before = (chain[ends[~is_only]] for ends in edges)
        shared = np.where(meets, instance, -1)[self.head]
        unit = factorized(np.where(shared >= 0, shared, np.arange(len(shared)) + shared.max(initial=-1) + 1))
        wave = _waves(int(unit.max(initial=-1)) + 1, unit[before], unit[after])
        if (never := wave[unit] < 0).any():
            raise _circle(int(sizes[never].sum()))
        needs = np.bincount(after, minlength=len(self.head))
        if apart:
            unit, wave = np.arange(len(unit)), wave[unit]
        number = np.empty(len(wave), np.int64)
        number[np.lexsort((needs[: len(wave)] == 0, wave) if apart else (wave,))] = np.arange(len(wave))
        self._unit = number[unit]
        self._begins = np.flatnonzero(needs == 0)
        by_unit = np.argsort(self._unit[after], kind="stable")
        self._after, self._before = after[by_unit], before[by_unit]
        self._from = self._unit[self._before]
        units = np.cumsum(np.bincount(wave, minlength=1))
        first = np.cumsum(np.bincount(self._unit[self._after] + 1, minlength=len(wave) + 1))
        self._waves = [
            (slice(a, b), slice(first[a], first[b]), first[a:b] - first[a])
            for a, b in pairwise(units.tolist())
        ]

    def chains(self, spans: slice) -> tuple[slice, _Rows, _Rows]:
        """Return the chains of *spans* that no edge leaves, these in order, and where each chain begins."""
        own = slice(*np.searchsorted(self.head, (spans.start, spans.stop)).tolist())
        bounds = self._bounds[own]
        return own, self._order[spans], bounds - spans.start

    def summed(self, work_ns: FloatArray) -> FloatArray:
        """Return the duration of each chain in each scenario, of those of spans."""
        total: FloatArray = np.add.reduceat(work_ns[self._order], self._bounds, axis=0)
        return total

    def played(
        self,
        chain_ns: FloatArray,
        first_ns: Int64Array,
        step: Int64Array,
        delay_ns: Int64Array | None = None,
    ) -> FloatArray:
        """Return how long each step takes from its first start, shape ``(n_steps, n_scenarios)``.

        Args:
            chain_ns: duration of each chain in each scenario, shape ``(n_chains, n_scenarios)``.
            first_ns: when each step begins.
            step: of each span.
            delay_ns: how long after what it depends on each span starts; None: at once.
        """
        step = step[self.head]
        origin, brings = first_ns[step[self._begins]].astype(np.float64), chain_ns[self._before]
        if delay_ns is not None:
            origin += delay_ns[self.head[self._begins]]
            brings += delay_ns[self.head[self._after], None]
        earliest = np.full(int(self._unit.max(initial=-1)) + 1, -np.inf)
        np.maximum.at(earliest, self._unit[self._begins], origin)
        start = np.repeat(earliest[:, None], chain_ns.shape[1], axis=1)
        for units, own, first in self._waves:
            came = start[self._from[own]]
            came += brings[own]
            np.maximum(start[units], np.maximum.reduceat(came, first, axis=0), out=start[units])
        by_step = np.argsort(step, kind="stable")
        end = start[self._unit[by_step]]
        end += chain_ns[by_step]
        last = np.maximum.reduceat(end, np.searchsorted(step[by_step], np.arange(len(first_ns))), axis=0)
        times: FloatArray = last - first_ns[:, None]
        return times

    def played_apart(
        self,
        chain_ns: FloatArray,
        first_ns: Int64Array,
        key: Int64Array,
        meet: Callable[[int, FloatArray], None],
    ) -> FloatArray:
        """Return when the last span of each key ends in each column, shape ``(n_keys, n_columns)``.

        Args:
            chain_ns: duration of each chain in each column, 0 or more, shape ``(n_chains, n_columns)``.
            first_ns: by key, when those begin that depend on nothing.
            key: of each span.
            meet: is given the number of each wave and when its chains start, in the order of ``wave_of``, and
                makes those wait that meet.
        """
        chain = np.argsort(self._unit)
        key = key[self.head[chain]]
        end = chain_ns[chain]
        begins = np.zeros(len(chain) + 1, np.int64)
        begins[self._unit[self._begins] + 1] = 1
        n_begin = np.cumsum(begins).tolist()
        until = self._waves[0][0].start if self._waves else len(chain)
        for wave, (units, own, first) in enumerate([(slice(0, until), slice(0), chain[:0]), *self._waves]):
            start = np.empty((units.stop - units.start, end.shape[1]))
            n = len(start) - n_begin[units.stop] + n_begin[units.start]
            start[n:] = first_ns[key[units][n:], None]
            if n:
                np.maximum.reduceat(end[self._from[own]], first[:n], axis=0, out=start[:n])
            meet(wave, start)
            end[units] += start
        is_last = np.ones(len(chain), np.bool_)  # nothing depends on it, which would end no earlier
        is_last[self._from] = False
        ends = np.flatnonzero(is_last)
        ends = ends[np.argsort(key[ends], kind="stable")]
        found, first = np.unique(key[ends], return_index=True)
        last = np.full((len(first_ns), end.shape[1]), -np.inf)
        last[found] = np.maximum.reduceat(end[ends], first, axis=0)
        return last

    def wave_of(self) -> tuple[Int64Array, Int64Array]:
        """Return of each chain its wave and its place in it, where chains are apart."""
        bounds = np.array([0, *(units.start for units, _, _ in self._waves)])
        wave = np.searchsorted(bounds, self._unit, side="right") - 1
        return wave, self._unit - bounds[wave]


def _waves(n: int, before: Int64Array, after: Int64Array) -> Int64Array:
    """Return the wave of each of *n* units: after all that it depends on; -1 if that is a circle."""
    before, after = np.divmod(distinct(before * n + after), max(n, 1))
    missing, count = np.bincount(after, minlength=n), np.bincount(before, minlength=n)
    first = np.cumsum(count) - count
    wave, ready, number = np.full(n, -1), np.flatnonzero(missing == 0), 0
    while len(ready):
        wave[ready] = number
        later = after[ranges(first[ready], count[ready])]
        np.subtract.at(missing, later, 1)
        ready, number = distinct(later[missing[later] == 0]), number + 1
    return wave


def _circle(n_spans: int) -> RunError:
    return RunError(f"{n_spans} spans of a step wait for one another in a circle")
