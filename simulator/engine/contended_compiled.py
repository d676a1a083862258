"""The contended engine on numba: links shared max-min fairly, for programs of many transfers.

The same rules as ``simulator/engine/contended.py`` and ``simulator/network/fluid.py``, to the nanosecond.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from foretrace.simulator.engine.changes import SWITCHES, WAYS, Above, Change, Throttle, Way, of_gpus, of_links
from foretrace.simulator.engine.fair import Floats, Ways
from foretrace.simulator.engine.filled import Filled, of_rates
from foretrace.simulator.engine.link_clock import LinkClock
from foretrace.simulator.engine.spans import spans
from foretrace.simulator.engine.together import Together, compiling, numbered
from foretrace.simulator.program import Int64Array, Program, transfer_ns

__all__ = ["NAME", "Clock", "compiling", "loads", "run", "times", "watched"]

NAME = "contended-compiled"
"""Name of this engine in summaries."""


def run(program: Program, changes: Sequence[Change | Throttle] = (), above: Above | None = None) -> pa.Table:
    """Return the timeline of *program*, as ``simulator.engine.contended.run`` does; errors are its errors."""
    return spans(program, *Clock(program, changes, above).times())


def watched(
    program: Program, changes: Sequence[Change | Throttle] = (), above: Above | None = None
) -> tuple[pa.Table, Filled]:
    """Return the timeline and how full links were over time: ``simulator.engine.contended.watched``."""
    ways, names = loads(program, changes, above)
    together = Together(program, _numbered(names, changes), ways, len(names))
    start_ns, end_ns, log = together.watched(program.duration_ns, transfer_ns(program))
    return spans(program, start_ns, end_ns), of_rates(log, ways, names)


def times(program: Program, changes: Sequence[Change | Throttle] = ()) -> tuple[Int64Array, Int64Array]:
    """Return when each task starts and ends, in ns, as ``simulator.engine.contended.times`` does."""
    return Clock(program, changes).times()


class Clock(LinkClock):
    """See ``LinkClock``; on numba."""

    def _prepare(self, program: Program, changes: Sequence[Change | Throttle], above: Above | None) -> None:
        ways, names = loads(program, changes, above)
        self._together = Together(program, _numbered(names, changes), ways, len(names))

    def _run(self, duration_ns: Int64Array, transfer_ns: Int64Array) -> tuple[Int64Array, Int64Array]:
        return self._together.times(duration_ns, transfer_ns)


def loads(
    program: Program, changes: Sequence[Change | Throttle] = (), above: Above | None = None
) -> tuple[Ways, tuple[Way, ...]]:
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
) -> tuple[list[Way], tuple[Int64Array, Int64Array, Floats]]:
    """Return the links between switches, numbered from *first* on, and who fills what share of which."""
    found = Above(({},), np.zeros(program.n_instances, np.int64)) if above is None else above
    loads = [{way: share for way, share in load.items() if share > 0} for load in found.loads]
    changed = [change.way for change in of_links(changes) if change.way.tier in SWITCHES]
    names = sorted({*changed, *(way for load in loads for way in load)})
    number = {way: first + at for at, way in enumerate(names)}
    counts = np.array([len(load) for load in loads], np.int64)
    link = np.array([number[way] for load in loads for way in load], np.int64)
    share = np.array([part for load in loads for part in load.values()], np.float64)
    each = counts[found.kind]
    job = np.repeat(np.arange(program.n_instances), each)
    at = np.arange(len(job)) + np.repeat(
        (np.cumsum(counts) - counts)[found.kind] - (np.cumsum(each) - each), each
    )
    return names, (job, link[at], share[at])


def _changed_ranks(changes: Sequence[Change | Throttle]) -> list[int]:
    ways = [change.way for change in of_links(changes)]
    return [*(way.rank for way in ways if way.tier not in SWITCHES), *(c.rank for c in of_gpus(changes))]


def _numbered(names: Sequence[Way], changes: Sequence[Change | Throttle]) -> list[tuple[int, int, float]]:
    """Return *changes* as ``Together`` takes them."""
    number = {way: at for at, way in enumerate(names)}
    links = [(change.at_ns, number[change.way], change.capacity) for change in of_links(changes)]
    return [*links, *numbered(of_gpus(changes))]
