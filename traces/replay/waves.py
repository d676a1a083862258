"""A graph of dependencies in waves: what can be worked out at once, for many spans and scenarios together.

A span starts when all that it depends on has ended. Spans that take part in one communication end together
with it: when the last of them has started and its own work is done. A wave holds the spans whose
dependencies lie in earlier waves, and the communications that these complete.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretrace.traces.columns import Int64Array
from foretrace.traces.errors import RunError

FloatArray = NDArray[np.float64]
_Rows = NDArray[np.intp]


class Edges(NamedTuple):
    """Dependencies: span ``after[i]`` starts when span ``before[i]`` has ended; sorted by ``after``."""

    after: Int64Array
    before: Int64Array

    @classmethod
    def of(cls, after: list[int], before: list[int]) -> Edges:
        """Return the edges between pairs of spans."""
        order = np.argsort(np.array(after, np.int64), kind="stable")
        return cls(np.array(after, np.int64)[order], np.array(before, np.int64)[order])

    def latest(self, n: int, end: Int64Array, otherwise: Int64Array) -> Int64Array:
        """Return for each of *n* spans when the last that it depends on ends, *otherwise* without any."""
        found = otherwise.copy()
        if len(self.after):
            first = np.flatnonzero(np.diff(self.after, prepend=-1))
            found[self.after[first]] = np.maximum.reduceat(end[self.before], first)
        return found


class Wave(NamedTuple):
    """Spans that start, and spans that end.

    Attributes:
        rows: that start, ascending.
        targets: places in ``rows`` that depend on something; ``sources`` are on what, the i-th target's from
            ``offsets[i]`` on.
        singles: those of ``rows`` that take part in no communication.
        members: spans of the communications that are complete, one communication after the other, the i-th
            from ``bounds[i]`` on; ``sizes`` are how many each has.
    """

    rows: _Rows
    targets: _Rows
    sources: Int64Array
    offsets: _Rows
    singles: _Rows
    members: _Rows
    bounds: _Rows
    sizes: _Rows


def waves(n: int, edges: Edges, instance: Int64Array) -> list[Wave]:
    """Return the waves of *n* spans; *instance* is the communication of each, -1 if it takes part in none.

    Raises:
        RunError: spans wait for one another in a circle.
    """
    unit = np.where(instance >= 0, instance, np.arange(n) + int(instance.max(initial=-1)) + 1)
    n_units = int(unit.max(initial=-1)) + 1
    by_unit = _Csr(unit, np.arange(n), n_units)
    followers = _Csr(edges.before, edges.after, n)
    needs = _Csr(edges.after, edges.before, n)
    missing = np.bincount(edges.after, minlength=n)
    left = np.bincount(unit, minlength=n_units)
    found: list[Wave] = []
    ready = np.flatnonzero(missing == 0)
    n_done = 0
    while len(ready):
        n_done += len(ready)
        units, counts = np.unique(unit[ready], return_counts=True)
        left[units] -= counts
        complete = units[left[units] == 0]
        ended, sizes = by_unit.of(complete)
        found.append(_wave(ready, needs, instance, ended, sizes))
        later, _ = followers.of(ended)
        touched, times = np.unique(later, return_counts=True)
        missing[touched] -= times
        ready = touched[missing[touched] == 0]
    if n_done < n:
        raise RunError(f"{n - n_done} spans of a step wait for one another in a circle")
    return found


def _wave(rows: _Rows, needs: _Csr, instance: Int64Array, ended: Int64Array, sizes: Int64Array) -> Wave:
    sources, degree = needs.of(rows)
    targets = np.flatnonzero(degree)
    together = instance[ended] >= 0
    of_unit = sizes[sizes > 0]
    is_shared = together[np.cumsum(of_unit) - of_unit]
    shared = of_unit[is_shared]
    return Wave(
        rows=rows,
        targets=targets,
        sources=sources,
        offsets=np.cumsum(degree[targets]) - degree[targets],
        singles=rows[instance[rows] < 0],
        members=ended[together],
        bounds=np.cumsum(shared) - shared,
        sizes=shared,
    )


class _Csr:
    """Values by key, ``0 .. n - 1``; those of many keys at once."""

    def __init__(self, key: Int64Array, value: Int64Array, n: int) -> None:
        self._value = value[np.argsort(key, kind="stable")]
        self._count = np.bincount(key, minlength=n)
        self._first = np.cumsum(self._count) - self._count

    def of(self, keys: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the values of *keys*, one key after the other, and how many each has."""
        count = self._count[keys]
        begin = np.repeat(self._first[keys] - (np.cumsum(count) - count), count)
        return self._value[begin + np.arange(len(begin))], count
