"""What communications fill of links, and how full links were: step functions of time, one per link."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretrace.simulator.engine.changes import SWITCHES, WAYS, Above, Change, Throttle, Way, of_gpus, of_links
from foretrace.simulator.network.fluid import Span
from foretrace.simulator.program import Int64Array, Program

Loads = tuple[Int64Array, Int64Array, NDArray[np.float64]]
"""Links of each communication as CSR, and what share of each it fills at full rate."""

UNIT: Final = 2.0**-40
"""Share of a link that is counted as one: sums of whole numbers come back to zero exactly."""

SAME: Final = 2**10
"""Units by which a link's load must change to be noted, one in a thousand million of its width."""


class Filled(NamedTuple):
    """How full links were, each from a change of its load to the next, where it was not idle.

    Attributes:
        way: index into ``ways``; shape ``(n,)``, sorted, by time within one link.
        start_ns, end_ns: when; shape ``(n,)``.
        used: share of the link's nominal capacity in use; shape ``(n,)``.
    """

    ways: tuple[Way, ...]
    way: Int64Array
    start_ns: Int64Array
    end_ns: Int64Array
    used: NDArray[np.float64]


def filled(spans: Sequence[Span]) -> Filled:
    """Return how full links were, of what ``simulator.network.fluid`` noted; links are ``Way``."""
    ways = tuple(sorted({span.link for span in spans}))
    number = {way: at for at, way in enumerate(ways)}
    way = np.array([number[span.link] for span in spans], np.int64)
    start_ns, end_ns = (np.array([span[at] for span in spans], np.int64) for at in (1, 2))
    used = _units(np.array([span.used for span in spans], np.float64))
    # Each span is two changes: its load comes at the start and goes at the end.
    return levels(
        ways, np.concatenate([way, way]), np.concatenate([start_ns, end_ns]), np.concatenate([used, -used])
    )


def of_rates(
    log: tuple[Int64Array, Int64Array, NDArray[np.float64]],
    loads: Loads,
    ways: tuple[Way, ...],
) -> Filled:
    """Return how full links were, of the rates at which communications went.

    *log*: when the rate of a communication changed, of which, and what it was from then on, in the order of
    time; each starts and ends at rate 0. Shape ``(n,)`` each. *loads*: links of each communication as CSR,
    and what share of each it fills at rate 1.
    """
    at_ns, job, rate = log
    first, link, load = loads
    order = np.argsort(job, kind="stable")
    at_ns, job, rate = at_ns[order], job[order], rate[order]
    counts = first[job + 1] - first[job]
    row = np.repeat(np.arange(len(job)), counts)
    # For each change the edges of its communication, one after another.
    edge = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first[job], counts)
    now = _units(load[edge] * rate[row])
    same = np.zeros(len(job), np.bool_)
    same[1:] = job[1:] == job[:-1]
    before = np.zeros(len(edge), np.int64)
    later = np.flatnonzero(same[row])
    # Rows are sorted by communication: the same edge of the change before lies that many places back.
    before[later] = now[later - counts[row[later]]]
    return levels(ways, link[edge], at_ns[row], now - before)


def levels(ways: tuple[Way, ...], way: Int64Array, at_ns: Int64Array, change: Int64Array) -> Filled:
    """Return how full links were, of the *change* of their loads at some times, in ``UNIT``."""
    by_name = sorted(range(len(ways)), key=ways.__getitem__)
    # The inverse of that order: from the old number of a link to its place by name.
    way = np.argsort(np.array(by_name, np.int64))[way]
    order = np.lexsort((at_ns, way))
    # One running sum over all links: the changes of each add up to exactly zero in whole units.
    way, at_ns, total = way[order], at_ns[order], np.cumsum(change[order])
    last = np.ones(len(way), np.bool_)
    # Of several changes at one moment only the sum of all is seen.
    last[:-1] = (way[1:] != way[:-1]) | (at_ns[1:] != at_ns[:-1])
    way, at_ns, total = way[last], at_ns[last], total[last]
    noted = np.ones(len(way), np.bool_)
    noted[1:] = (way[1:] != way[:-1]) | (np.abs(total[1:] - total[:-1]) > SAME)
    way, at_ns, total = way[noted], at_ns[noted], total[noted]
    busy = np.flatnonzero(total > SAME)
    # A link ends at zero, so that what follows something busy is a change of the same link.
    until = np.minimum(busy + 1, len(at_ns) - 1)
    used = total[busy].astype(np.float64) * UNIT
    return Filled(tuple(ways[at] for at in by_name), way[busy], at_ns[busy], at_ns[until], used)


def _units(share: NDArray[np.float64]) -> Int64Array:
    return np.rint(share / UNIT).astype(np.int64)


def loads(
    program: Program, changes: Sequence[Change | Throttle] = (), above: Above | None = None
) -> tuple[Loads, tuple[Way, ...]]:
    """Return what each communication fills of which links, as CSR over communications, and the links.

    Those of ranks come first, in the order of ``WAYS``. Sending uses the ways out, receiving the ways in, a
    collective both.
    """
    kinds = [label.kind for label in program.labels]
    tasks = np.flatnonzero(program.instance >= 0)
    is_in = np.array([kind != "send" for kind in kinds], np.bool_)[program.label[tasks]]
    is_out = np.array([kind != "recv" for kind in kinds], np.bool_)[program.label[tasks]]
    shares = np.array([(t.near, t.far) for t in program.transfers], np.float64).reshape(-1, 2)
    share = shares[program.instance_transfer[program.instance[tasks]]]
    load = np.stack([share[:, 0] * is_in, share[:, 0] * is_out, share[:, 1] * is_in, share[:, 1] * is_out], 1)
    link = program.rank[tasks].astype(np.int64)[:, None] * len(WAYS) + np.arange(len(WAYS))
    used = load > 0
    job = np.broadcast_to(program.instance[tasks].astype(np.int64)[:, None], used.shape)
    ranks = range(1 + max([*np.unique(program.rank).tolist(), *_changed_ranks(changes)], default=-1))
    names = [Way(rank, *way) for rank in ranks for way in WAYS]
    further, extra = _above(program, changes, above, len(names))
    jobs, links, filled = (
        np.concatenate(both) for both in zip((job[used], link[used], load[used]), extra, strict=True)
    )
    order = np.argsort(jobs, kind="stable")
    counts = np.bincount(jobs, minlength=program.n_instances)
    start = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    return (start, links[order], filled[order]), (*names, *further)


def _above(
    program: Program, changes: Sequence[Change | Throttle], above: Above | None, first: int
) -> tuple[list[Way], tuple[Int64Array, Int64Array, NDArray[np.float64]]]:
    """Return the links between switches, numbered from *first* on, and who fills what share of which."""
    found = Above(({},), np.zeros(program.n_instances, np.int64)) if above is None else above
    loads = [{way: share for way, share in load.items() if share > 0} for load in found.loads]
    changed = [change.way for change in of_links(changes) if change.way.tier in SWITCHES]
    # Links that only change, and that nobody uses, have a number, too.
    names = sorted({*changed, *(way for load in loads for way in load)})
    number = {way: first + at for at, way in enumerate(names)}
    counts = np.array([len(load) for load in loads], np.int64)
    link = np.array([number[way] for load in loads for way in load], np.int64)
    share = np.array([part for load in loads for part in load.values()], np.float64)
    each = counts[found.kind]
    job = np.repeat(np.arange(program.n_instances), each)
    # Positions within the loads of each communication's kind, written out for every communication.
    at = np.arange(len(job)) + np.repeat(
        (np.cumsum(counts) - counts)[found.kind] - (np.cumsum(each) - each), each
    )
    return names, (job, link[at], share[at])


def _changed_ranks(changes: Sequence[Change | Throttle]) -> list[int]:
    ways = [change.way for change in of_links(changes)]
    return [*(way.rank for way in ways if way.tier not in SWITCHES), *(c.rank for c in of_gpus(changes))]
