"""When each communication really began: the arrival of its last participant, found by joining ranks.

A collective is joined on ``(group, sequence)``. A point-to-point transfer is joined on ``(group, sender,
receiver, sequence)``: its two ends are the ``send`` of one rank and the ``recv`` of the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from foretrace.traces.columns import Int64Array, factorized, int64, is_one_of
from foretrace.traces.run import Run

COMMUNICATION = ("collective", "p2p")
"""Categories of spans that several ranks take part in."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The last arrival of every communication span of the stored ranks.

    Attributes:
        last_ns: by rank, for each span in stored order: time of the last arrival, within the span. For a
            span that is not communication, or whose partners are not known, its own start.
        n_joined: number of spans that found at least one partner.
    """

    last_ns: dict[int, Int64Array]
    n_joined: int


def arrivals(run: Run) -> Arrivals:
    """Join the stored ranks of *run*; the result is kept with the run.

    A rank whose span ended before the last arrival did not wait for it, as a buffered send does not: the
    span counts from its own start. Clocks that differ by no more than their stated uncertainty are forgiven.
    """
    return run.derived(_arrivals)


def _arrivals(run: Run) -> Arrivals:
    last = {rank: int64(run.spans([rank], ["start_ns"]), "start_ns").copy() for rank in run.stored_ranks}
    tables = {rank: run.spans([rank]) for rank in run.stored_ranks}
    rows = {
        rank: np.flatnonzero(is_one_of(table, "category", COMMUNICATION)) for rank, table in tables.items()
    }
    known = [_keys(tables[rank], rank, rows[rank]) for rank in run.stored_ranks]
    group, sender, receiver, sequence, start, end = (
        np.concatenate(part) for part in zip(*known, strict=True)
    )
    joinable = sequence >= 0
    joined = start.copy()
    joined[joinable], n_joined = _last_of_key(
        factorized(*(key[joinable] for key in (group, sender, receiver, sequence))), start[joinable]
    )
    slack_ns = 2 * max((clock.uncertainty_ns for clock in run.info.clock.values()), default=0)
    joined = np.where(joined <= end + slack_ns, np.minimum(joined, end), start)
    done = 0
    for rank in run.stored_ranks:
        n_rows = len(rows[rank])
        last[rank][rows[rank]] = joined[done : done + n_rows]
        done += n_rows
    return Arrivals(last, n_joined)


def _keys(table: pa.Table, rank: int, rows: NDArray[np.intp]) -> tuple[Int64Array, ...]:
    """Return group, sender, receiver, sequence, start and end of *rows*; collectives have no sender."""
    picked = table.take(rows)
    peer = int64(picked, "peer")
    own = np.full(len(rows), rank, np.int64)
    is_send = is_one_of(picked, "kind", ("send",))
    is_p2p = is_one_of(picked, "category", ("p2p",)) & (peer >= 0)
    sender = np.where(is_p2p, np.where(is_send, own, peer), -1)
    receiver = np.where(is_p2p, np.where(is_send, peer, own), -1)
    is_lonely = is_one_of(picked, "category", ("p2p",)) & (peer < 0)
    sequence = np.where((int64(picked, "group") < 0) & ~is_p2p | is_lonely, -1, int64(picked, "sequence"))
    start = int64(picked, "start_ns")
    return int64(picked, "group"), sender, receiver, sequence, start, start + int64(picked, "duration_ns")


def _last_of_key(key: Int64Array, start: Int64Array) -> tuple[Int64Array, int]:
    """Return for each row the latest *start* of its *key*, and how many rows share their key."""
    if not len(key):
        return start, 0
    order = np.argsort(key, kind="stable")
    first = np.flatnonzero(np.diff(key[order], prepend=-1))
    count = np.diff(first, append=len(key))
    last = np.empty_like(start)
    last[order] = np.repeat(np.maximum.reduceat(start[order], first), count)
    return last, int(count[count > 1].sum())
