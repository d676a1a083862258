"""Every communication of a run as one row: who came when, who came last, how fast the data moved.

Bandwidths follow nccl-tests (doc/PERFORMANCE.md): algorithm bandwidth is size over time, bus bandwidth is
that times what each rank must send per byte of the result. The time is that of the transfer: the shortest
duration over ranks, which is that of the last to arrive, so that waiting does not count and clocks need not
agree. Where the times of a member are bounds only, there is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from foretrace.traces.analysis.arrivals import COMMUNICATION
from foretrace.traces.analysis.bus_limits import group_limits
from foretrace.traces.analysis.metrics import averaged_steps, breakdown, represented, step_times_ns
from foretrace.traces.analysis.windows import windows
from foretrace.traces.columns import Int64Array, factorized, flags, int64, is_one_of, labels
from foretrace.traces.run import Run

_LABEL: Final = pa.dictionary(pa.int32(), pa.string())

COLLECTIVES: Final = pa.schema(
    [
        ("step", pa.int32()),
        ("kind", _LABEL),
        ("axis", _LABEL),
        ("group", pa.int32()),
        ("sequence", pa.int64()),
        ("n_ranks", pa.int32()),  # members of the group; both ends of a transfer
        ("n_seen", pa.int32()),  # members whose span is in the run
        ("size_bytes", pa.int64()),
        ("first_arrival_ns", pa.int64()),
        ("last_arrival_ns", pa.int64()),
        ("last_rank", pa.int32()),
        ("end_ns", pa.int64()),
        ("transfer_ns", pa.int64()),  # shortest duration of a member, 0 if unknown, as all below
        ("waiting_ns", pa.int64()),  # what the members wait for the last one, added up
        ("algbw_bytes_per_s", pa.float64()),
        ("busbw_bytes_per_s", pa.float64()),
        ("is_bound", pa.bool_()),  # the times of a member are bounds
    ]
)
"""Columns of ``collectives``."""


@dataclass(frozen=True, slots=True)
class Joined:
    """Communications and who takes part in them.

    Attributes:
        rows: one row per communication, of the schema ``COLLECTIVES``.
        row: row of each span, shape ``(n_spans,)``.
        rank: rank of each span.
        end_ns: when each span ends.
    """

    rows: pa.Table
    row: Int64Array
    rank: Int64Array
    end_ns: Int64Array


def bus_factor(kind: str, n_ranks: int) -> float:
    """Return what a rank sends per byte of the whole array.

    >>> bus_factor("all_reduce", 8), bus_factor("all_gather", 8), bus_factor("send", 2)
    (1.75, 0.875, 1.0)
    """
    if kind == "all_reduce":
        return 2 * (n_ranks - 1) / n_ranks
    if kind in {"all_gather", "reduce_scatter", "all_to_all"}:
        return (n_ranks - 1) / n_ranks
    return 1.0


def collectives(run: Run) -> pa.Table:
    """Return one row per communication of the stored ranks, by last arrival; kept with the run.

    Communication that cannot be joined (no number) makes a row of its own for each span.
    """
    return run.derived(_joined).rows


def in_averaged_steps(run: Run) -> pa.Table:
    """Return the rows of ``collectives`` that lie in the steps that averages are over; kept with the run.

    What happens before the first step, between steps (evaluation, checkpoints) and in the warm-up step is in
    no step time, so that it must not be held against one.
    """
    return collectives(run).take(run.derived(_averaged))


def bandwidths(
    run: Run, *, averaged: bool = False, limit_bytes_per_s: float | None = None
) -> list[dict[str, Any]]:
    """Return by kind, axis and size how fast data moved: counts, total times, median and best bus bandwidth.

    Sizes are put together by powers of two; rows without a size have ``size_bytes`` 0 and no bandwidth.
    ``n_bounds`` of them have times that are bounds, and are in no other figure than ``count``.
    ``transfer_s`` counts each communication once. ``rank_s`` is how long ranks are busy with them, added up
    over ranks: what a rank transfers at the same time counts once.
    ``limit_bytes_per_s`` is the bus bandwidth that the links of the slowest of their groups allow, and
    ``share_of_limit`` the median over it; None where nobody knows.

    Args:
        run: an open run.
        averaged: leave out what is not in the steps that averages are over.
        limit_bytes_per_s: what the links allow, if the run does not describe them.
    """
    joined = run.derived(_joined)
    chosen = run.derived(_averaged) if averaged else np.arange(joined.rows.num_rows)
    if not len(chosen):
        return []
    table = joined.rows.take(chosen)
    kinds, kind_names = labels(table, "kind")
    axes, axis_names = labels(table, "axis")
    size = int64(table, "size_bytes")
    bucket = np.where(size > 0, np.floor(np.log2(np.maximum(size, 1))).astype(np.int64), -1)
    key = factorized(kinds, axes, bucket)
    busbw = table["busbw_bytes_per_s"].to_numpy()
    transfer, waiting = int64(table, "transfer_ns"), int64(table, "waiting_ns")
    is_bound = flags(table, "is_bound")
    group, limits = int64(table, "group"), group_limits(run, limit_bytes_per_s)
    weight, found = len(run.ranks) / max(len(run.stored_ranks), 1), []
    for number in range(int(key.max()) + 1):
        rows = np.flatnonzero(key == number)
        known = busbw[rows][busbw[rows] > 0]
        median = float(np.median(known)) if len(known) else None
        of_groups = [limits[one] for one in np.unique(group[rows]).tolist() if one in limits]
        limit = min(of_groups) if of_groups else None
        found.append(
            {
                "kind": kind_names[kinds[rows[0]]],
                "axis": axis_names[axes[rows[0]]],
                "size_bytes": int(np.median(size[rows])),
                "count": len(rows),
                "n_bounds": int(is_bound[rows].sum()),
                "transfer_s": float(transfer[rows].sum()) / 1e9,
                "waiting_s": float(waiting[rows].sum()) / 1e9,
                "rank_s": _busy_ns(joined, chosen[rows[~is_bound[rows]]]) * weight / 1e9,
                "median_busbw_bytes_per_s": median,
                "best_busbw_bytes_per_s": float(known.max()) if len(known) else None,
                "limit_bytes_per_s": limit,
                "share_of_limit": median / limit if median is not None and limit else None,
            }
        )
    return sorted(found, key=lambda row: -float(row["transfer_s"]))


def _busy_ns(joined: Joined, rows: Int64Array) -> int:
    """Return how long ranks transfer any of the communications *rows*, added up over ranks, in ns."""
    spans = np.flatnonzero(np.isin(joined.row, rows))
    if not len(spans):
        return 0
    end = joined.end_ns[spans] - joined.end_ns.min()
    start = end - int64(joined.rows, "transfer_ns")[joined.row[spans]]
    apart = joined.rank[spans] * (
        int(end.max()) - int(start.min()) + 1
    )  # ranks one after another, on one axis
    order = np.argsort(start + apart, kind="stable")
    start, end = (start + apart)[order], (end + apart)[order]
    until = np.maximum.accumulate(end)
    return int((until - np.maximum(start, np.append(start[0], until[:-1]))).clip(min=0).sum())


def _joined(run: Run) -> Joined:
    table = run.spans()
    table = table.take(np.flatnonzero(is_one_of(table, "category", COMMUNICATION)))
    if not table.num_rows:
        none = np.empty(0, np.int64)
        return Joined(COLLECTIVES.empty_table(), none, none, none)
    key, sender = _keys(table)
    order = np.lexsort((int64(table, "start_ns"), key))
    first = np.flatnonzero(np.diff(key[order], prepend=-1))
    columns = _columns(run, table, sender, order, first)
    found = pa.table({name: columns[name] for name in COLLECTIVES.names}).cast(COLLECTIVES)
    by_arrival = np.argsort(columns["last_arrival_ns"], kind="stable")
    place = np.argsort(by_arrival, kind="stable")
    return Joined(
        found.take(by_arrival).combine_chunks(),
        np.repeat(place, columns["n_seen"]),
        int64(table, "rank")[order],
        (int64(table, "start_ns") + int64(table, "duration_ns"))[order],
    )


def _columns(
    run: Run, table: pa.Table, sender: Int64Array, order: Int64Array, first: Int64Array
) -> dict[str, Any]:
    """Return the columns of ``COLLECTIVES`` of the communications in *table*.

    Args:
        run: whose they are.
        table: one span per rank that took part.
        sender: the rank that sends in a transfer, -1 in a collective; by span.
        order: spans by communication, and then by arrival.
        first: where each communication begins in *order*.
    """
    rank, group, start = (int64(table, name) for name in ("rank", "group", "start_ns"))
    duration = int64(table, "duration_ns")
    last = np.append(first[1:], len(order)) - 1
    came, n_seen = order[last], last - first + 1
    is_bound = np.logical_or.reduceat(flags(table, "is_bound")[order], first)
    transfer = np.where(is_bound, 0, np.minimum.reduceat(duration[order], first))
    stands_for = represented(run)
    weight = np.array([stands_for[r] for r in rank.tolist()], np.int64)
    wait = np.maximum(duration - np.repeat(transfer, n_seen)[np.argsort(order, kind="stable")], 0)
    members = _members(run, group[came], sender[came] >= 0)
    size = int64(table, "size_bytes")[came]
    kinds, kind_names = labels(table, "kind")
    factor = [bus_factor(kind_names[k], int(n)) for k, n in zip(kinds[came], members, strict=True)]
    speed = np.where((transfer > 0) & (size > 0), size / np.maximum(transfer, 1) * 1e9, 0.0)
    return {
        "step": int64(table, "step")[came],
        "kind": table["kind"].take(came),
        "axis": table["axis"].take(came),
        "group": group[came],
        "sequence": int64(table, "sequence")[came],
        "n_ranks": members,
        "n_seen": n_seen,
        "size_bytes": size,
        "first_arrival_ns": start[order[first]],
        "last_arrival_ns": start[came],
        "last_rank": rank[came],
        "end_ns": np.maximum.reduceat((start + duration)[order], first),
        "transfer_ns": transfer,
        "waiting_ns": np.where(is_bound, 0, np.add.reduceat((wait * weight)[order], first)),
        "algbw_bytes_per_s": speed,
        "busbw_bytes_per_s": speed * np.array(factor, np.float64),
        "is_bound": is_bound,
    }


def _averaged(run: Run) -> Int64Array:
    averaged = set(averaged_steps(run, step_times_ns(breakdown(run))))
    stretches: list[list[int]] = []  # time without a hole in which some rank is in such a step
    for window in sorted(windows(run), key=lambda window: window.start_ns):
        if window.step not in averaged:
            continue
        if stretches and window.start_ns <= stretches[-1][1]:
            stretches[-1][1] = max(stretches[-1][1], window.end_ns)
        else:
            stretches.append([window.start_ns, window.end_ns])
    table = collectives(run)
    if not stretches:
        return np.empty(0, np.int64)
    starts, ends = np.array(stretches, np.int64).T
    at = np.searchsorted(starts, int64(table, "first_arrival_ns"), side="right") - 1
    return np.flatnonzero((at >= 0) & (int64(table, "end_ns") <= ends[at]))


def _keys(table: pa.Table) -> tuple[Int64Array, Int64Array]:
    """Return a number per communication for each span, and the sender of a transfer, -1 elsewhere."""
    rank, peer, group = (int64(table, name) for name in ("rank", "peer", "group"))
    sequence = int64(table, "sequence")
    p2p = is_one_of(table, "category", ("p2p",)) & (peer >= 0)
    sends = is_one_of(table, "kind", ("send",))
    sender = np.where(p2p, np.where(sends, rank, peer), -1)
    receiver = np.where(p2p, np.where(sends, peer, rank), -1)
    alone = (sequence < 0) | ((group < 0) & ~p2p)
    own = np.where(alone, np.arange(len(rank)), -1)
    return factorized(*(np.where(alone, -1, k) for k in (group, sender, receiver, sequence)), own), sender


def _members(run: Run, group: Int64Array, is_transfer: Any) -> Int64Array:
    """Return how many ranks take part; 1 where that is not known."""
    sizes = {known.id: len(known.ranks) for known in run.info.groups}
    count = np.array([sizes.get(number, 1) for number in group.tolist()], np.int64)
    return np.where(is_transfer, 2, count)
