"""Every communication of a run as one row: who came when, who came last, how fast the data moved.

Bandwidths follow nccl-tests (doc/PERFORMANCE.md): algorithm bandwidth is size over time, bus bandwidth is
that times what each rank must send per byte of the result. The time is that of the transfer: the shortest
duration over ranks, which is that of the last to arrive, so that waiting does not count and clocks need not
agree. Where the times of a member are bounds only, there is none.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from foretrace.traces.analysis.activity import UNNAMED_AXIS
from foretrace.traces.analysis.communications import COMMUNICATION, Part, came_last, communications
from foretrace.traces.analysis.kernels import peaks_of
from foretrace.traces.analysis.metrics import averaged_steps, represented
from foretrace.traces.analysis.windows import windows
from foretrace.traces.columns import (
    BoolArray,
    Int64Array,
    distinct,
    factorized,
    flags,
    int64,
    is_one_of,
    labels,
    summed,
)
from foretrace.traces.errors import RunError
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
    """Communications and who takes part in them."""

    rows: pa.Table  # one row per communication, of the schema ``COLLECTIVES``
    group: Int64Array  # whose links each row uses, -1 where only two unknown members of a group do
    # sender and receiver of each row, -1 where it has none or they are unknown, of shape ``(n, 2)``
    ends: Int64Array
    row: Int64Array  # by number of ``communications``, behind the spans that are joined with no other
    n_alone: int  # how many of these there are

    def parts(self, run: Run) -> Iterator[tuple[Part, Int64Array]]:
        """Yield the communications of each rank, and in which row each of them is."""
        for part, number in _counted(run, self.n_alone):
            yield part, self.row[number]


ABOVE: Final = 1.2
"""A bandwidth so many times what links promise is none. Where switches reduce, bus bandwidth is up to 1.07
times that of a link (nccl-tests on 8 H100s: 480 of 450 GB/s)."""


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
    """Return by kind, axis and size how fast data moved; kept with the run.

    Counts, total times, and the median and best bus bandwidth.

    Sizes are put together by powers of two; rows without a size have ``size_bytes`` 0 and no bandwidth.
    ``n_bounds`` of them have times that are bounds, and are in no other figure than ``count``.
    ``transfer_s`` counts each communication once. ``rank_s`` is how long ranks are busy with them, added up
    over ranks: what a rank transfers at the same time counts once.
    ``limit_bytes_per_s`` is the bus bandwidth that the links of a group allow, or of the two ends of a
    transfer: the middle one of the known ones. ``share_of_limit`` is the median of each over its own; None
    where nobody knows. What is above its links is refused, and in no bandwidth but ``refused_bytes_per_s``:
    the median of what it would be if groups and sizes were as the run says.

    Args:
        run: an open run.
        averaged: leave out what is not in the steps that averages are over.
        limit_bytes_per_s: what the links allow, if the run does not describe them; nothing below is refused.
    """
    kept = run.derived(_known)
    if (asked := (averaged, limit_bytes_per_s)) not in kept:
        kept[asked] = _bandwidths(run, limit_bytes_per_s, averaged=averaged)
    return list(kept[asked])


def lacks_ranks(run: Run, axis: str) -> bool:
    """Whether ranks that communicate along *axis* are not in the run: waiting for them counts as transfer.

    A trace without groups does not tell how many ranks there were.
    """
    return bool(run.missing_ranks) or (run.info.origin == "ingested" and axis == UNNAMED_AXIS)


def _known(_: Run) -> dict[tuple[bool, float | None], list[dict[str, Any]]]:
    return {}


def _bandwidths(run: Run, limit_bytes_per_s: float | None, *, averaged: bool) -> list[dict[str, Any]]:
    joined, peaks = run.derived(_joined), peaks_of(run)
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
    limits = bus_limits(run, joined.group[chosen], joined.ends[chosen])
    bounds = np.where(limits > 0, limits, peaks.link_bytes_per_s if peaks is not None else 0.0)
    if limit_bytes_per_s is not None:
        limits, bounds = np.full(len(chosen), limit_bytes_per_s), bounds.clip(min=limit_bytes_per_s)
    is_refused = (bounds > 0) & (busbw > bounds * ABOVE)
    busy_ns = _busy_ns(run, joined, chosen[~is_bound], key[~is_bound])
    weight, found = len(run.ranks) / max(len(run.stored_ranks), 1), []
    for number in range(int(key.max()) + 1):
        rows = np.flatnonzero(key == number)
        known = rows[(busbw[rows] > 0) & ~is_refused[rows]]
        limited = known[limits[known] > 0]
        allowed = np.sort(limits[rows][limits[rows] > 0])
        found.append(
            {
                "kind": kind_names[kinds[rows[0]]],
                "axis": axis_names[axes[rows[0]]],
                "size_bytes": int(np.median(size[rows])),
                "count": len(rows),
                "n_bounds": int(is_bound[rows].sum()),
                "transfer_s": float(transfer[rows].sum()) / 1e9,
                "waiting_s": float(waiting[rows].sum()) / 1e9,
                "rank_s": busy_ns.get(number, 0) * weight / 1e9,
                "median_busbw_bytes_per_s": _median(busbw[known]),
                "best_busbw_bytes_per_s": float(busbw[known].max()) if len(known) else None,
                "refused_bytes_per_s": _median(busbw[rows[is_refused[rows]]]),
                "limit_bytes_per_s": float(allowed[(len(allowed) - 1) // 2]) if len(allowed) else None,
                "share_of_limit": _median(busbw[limited] / limits[limited]),
            }
        )
    return sorted(found, key=lambda row: -float(row["transfer_s"]))


def _median(values: NDArray[np.float64]) -> float | None:
    return float(np.median(values)) if len(values) else None


def _busy_ns(run: Run, joined: Joined, rows: Int64Array, bucket: Int64Array) -> Mapping[int, int]:
    """Return by *bucket* how long ranks transfer any of its *rows*, added up over ranks, in ns."""
    of_row = np.full(joined.rows.num_rows, -1, np.int64)
    of_row[rows] = bucket
    transfer_ns = int64(joined.rows, "transfer_ns")
    total: Counter[int] = Counter()
    known: dict[tuple[int, bytes], dict[int, int]] = {}
    for part, row in joined.parts(run):
        counts = np.flatnonzero(of_row[row] >= 0)
        lasts, group = transfer_ns[row[counts]], of_row[row[counts]]
        which = run.like(part.rank), blake2b(np.stack([lasts, group, counts]).tobytes()).digest()
        if which not in known:
            known[which] = _covered_ns(part.end_ns[counts] - lasts, part.end_ns[counts], group)
        total.update(known[which])
    return total


def _covered_ns(start: Int64Array, end: Int64Array, bucket: Int64Array) -> dict[int, int]:
    """Return by *bucket* how long any of its spans from *start* to *end* runs."""
    if not len(start):
        return {}
    apart = bucket * (int(end.max()) - int(start.min()) + 1)  # one after another, on one axis
    order = np.argsort(start + apart, kind="stable")
    start, end = (start + apart)[order], (end + apart)[order]
    until = np.maximum.accumulate(end)
    covered = (until - np.maximum(start, np.append(start[0], until[:-1]))).clip(min=0)
    total = np.zeros(int(bucket.max()) + 1, np.int64)
    np.add.at(total, bucket[order], covered)
    return dict(enumerate(total.tolist()))


class _Said(NamedTuple):
    """What the communication spans of a rank say, whoever takes part; labels as codes and their names."""

    numbers: Mapping[str, Int64Array]
    codes: Mapping[str, NDArray[np.int32]]
    names: Mapping[str, list[str]]
    is_bound: BoolArray
    is_p2p: BoolArray


def _said(table: pa.Table) -> _Said:
    rows = np.flatnonzero(is_one_of(table, "category", COMMUNICATION))
    labelled = {name: labels(table, name) for name in ("kind", "axis")}
    return _Said(
        {name: int64(table, name)[rows] for name in ("step", "sequence", "size_bytes")},
        {name: codes[rows] for name, (codes, _) in labelled.items()},
        {name: names for name, (_, names) in labelled.items()},
        flags(table, "is_bound")[rows],
        is_one_of(table, "category", ("p2p",))[rows],
    )


def _counted(run: Run, n_alone: int) -> Iterator[tuple[Part, Int64Array]]:
    """Yield each rank's communications with numbers from 0 on: those of single spans, and then the others."""
    done = 0
    for part in communications(run):
        alone = part.number < 0
        number = part.number + n_alone
        number[alone] = done + np.arange(int(alone.sum()))
        done += int(alone.sum())
        yield part, number


def _joined(run: Run) -> Joined:
    n_alone = sum(int((part.number < 0).sum()) for part in communications(run))
    n, most = communications(run).n_numbers + n_alone, np.iinfo(np.int64).max
    first, shortest, end_ns = np.full(n, most), np.full(n, most), np.full(n, -most)
    n_seen, is_bound = np.zeros(n, np.int64), np.zeros(n, np.bool_)
    for part, number in _counted(run, n_alone):
        np.minimum.at(first, number, part.start_ns)
        np.maximum.at(end_ns, number, part.end_ns)
        np.minimum.at(shortest, number, part.end_ns - part.start_ns)
        np.add.at(n_seen, number, 1)
        is_bound[number[run.once(_said, part.rank).is_bound]] = True
    transfer = np.where(is_bound, 0, shortest)
    waiting = _waiting_ns(run, n_alone, transfer)
    last, last_rank = came_last(n, _counted(run, n_alone))
    came, names = _said_last(run, n_alone, last, last_rank)
    columns = came | {
        "last_rank": last_rank,
        "n_seen": n_seen,
        "first_arrival_ns": first,
        "last_arrival_ns": last,
        "end_ns": end_ns,
        "transfer_ns": transfer,
        "waiting_ns": np.where(is_bound, 0, waiting),
        "is_bound": is_bound,
    }
    used = np.flatnonzero(n_seen)
    used = used[np.argsort(last[used], kind="stable")]
    row = np.empty(n, np.int64)
    row[used] = np.arange(len(used))
    columns = {name: values[used] for name, values in columns.items()}
    joined, ends = used >= n_alone, np.full((len(used), 2), -1, np.int64)
    met = communications(run)
    ends[joined] = met.channels[met.channel[used[joined] - n_alone], 1:]
    group = np.where(columns["is_p2p"] & (ends.min(axis=1) < 0), -1, columns["group"])
    table = pa.table(_columns(run, columns, names), schema=COLLECTIVES)
    return Joined(table, group, ends, row, n_alone)


def _columns(run: Run, found: dict[str, Any], names: Mapping[str, list[str]]) -> list[Any]:
    """Return the columns of ``COLLECTIVES``: what was *found* of each communication, and its speed."""
    members = _members(run, found["group"], found["is_transfer"])
    kinds, kind = found["kind"], names["kind"]
    at = factorized(kinds, members)
    first, _, _ = summed(at, at)
    factor = np.array([bus_factor(kind[kinds[row]], int(members[row])) for row in first], np.float64)[at]
    size, transfer = found["size_bytes"], found["transfer_ns"]
    speed = np.where((transfer > 0) & (size > 0), size / np.maximum(transfer, 1) * 1e9, 0.0)
    found |= {"n_ranks": members, "algbw_bytes_per_s": speed, "busbw_bytes_per_s": speed * factor}
    for name, said in names.items():
        codes = pa.array(found[name].astype(np.int32))
        found[name] = pa.DictionaryArray.from_arrays(codes, pa.array(said, pa.string()))
    return [pa.array(found[field.name]).cast(field.type) for field in COLLECTIVES]


def _waiting_ns(run: Run, n_alone: int, transfer_ns: Int64Array) -> Int64Array:
    """Return by number what the members of each communication wait for the last one, added up."""
    waiting, stands_for = np.zeros(len(transfer_ns), np.int64), represented(run)
    for part, number in _counted(run, n_alone):
        waited = np.maximum(part.end_ns - part.start_ns - transfer_ns[number], 0)
        np.add.at(waiting, number, waited * stands_for[part.rank])
    return waiting


def _said_last(
    run: Run, n_alone: int, last_ns: Int64Array, last_rank: Int64Array
) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return by number what the span says that began at *last_ns* on *last_rank*.

    Labels are codes; the second mapping names them.
    """
    names = ("step", "sequence", "size_bytes", "kind", "axis", "group", "is_p2p", "is_transfer")
    found = {name: np.zeros(len(last_ns), np.int64) for name in names}
    spelled: dict[str, dict[str, int]] = {"kind": {}, "axis": {}}
    for part, number in _counted(run, n_alone):
        said = run.once(_said, part.rank)
        is_last = np.flatnonzero((last_rank[number] == part.rank) & (part.start_ns == last_ns[number]))
        said_by_rank = {
            **said.numbers,
            "group": int64(run.spans([part.rank], ["group"]), "group")[part.rows],
            "is_p2p": said.is_p2p,
            "is_transfer": said.is_p2p & ~part.is_apart,
        }
        for name, codes in said.codes.items():
            known = spelled[name]
            place = [known.setdefault(one, len(known)) for one in said.names[name]]
            said_by_rank[name] = np.array(place, np.int64)[codes]
        for name, values in said_by_rank.items():
            found[name][number[is_last]] = values[is_last]
    return found, {name: list(known) for name, known in spelled.items()}


def _averaged(run: Run) -> Int64Array:
    averaged = set(averaged_steps(run))
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


def _members(run: Run, group: Int64Array, is_transfer: BoolArray) -> Int64Array:
    """Return how many ranks take part; 1 where that is not known."""
    sizes = {known.id: len(known.ranks) or 1 for known in run.info.groups}
    each, at = np.unique(group, return_inverse=True)
    count = np.array([sizes.get(number, 1) for number in each.tolist()], np.int64)[at]
    return np.where(is_transfer, 2, count)


# Who makes whom wait: the ranks that arrive last at collectives, and what that costs the others.


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """One rank as a cause of waiting, along one axis."""

    rank: int  # which arrives last
    axis: str  # axis of the communication
    n_last: int  # communications at which it was the last to arrive
    n_joined: int  # communications of that axis that it took part in as the last or not, of all ranks
    n_others: int  # most ranks that wait for it at once
    n_steps: int  # steps in which it was the last at least once
    caused_ns: int  # waiting of all other members for it, added up
    longest_ns: int  # longest time between the first arrival and its own
    worst_kind: str  # kind of communication at which it caused most


def stragglers(run: Run) -> list[Straggler]:
    """Return the ranks that others wait for, those that cause most waiting first.

    Only communication of which at least two members are in the run counts: one rank alone waits for nobody
    that can be named. So does only what is in the steps that averages are over.
    """
    table = in_averaged_steps(run)
    table = table.take(np.flatnonzero(int64(table, "n_seen") > 1))
    rank, caused = int64(table, "last_rank"), int64(table, "waiting_ns")
    skew = int64(table, "last_arrival_ns") - int64(table, "first_arrival_ns")
    step, members = int64(table, "step"), int64(table, "n_ranks")
    axes, axis_names = labels(table, "axis")
    kinds, kind_names = labels(table, "kind")
    n_joined, key, found = np.bincount(axes), factorized(axes, rank), []
    order = np.argsort(key, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(key[order])) + 1) if len(order) else ():
        by_kind = np.bincount(kinds[rows], weights=caused[rows].astype(np.float64))
        found.append(
            Straggler(
                rank=int(rank[rows[0]]),
                axis=axis_names[axes[rows[0]]],
                n_last=len(rows),
                n_joined=int(n_joined[axes[rows[0]]]),
                n_others=int(members[rows].max()) - 1,
                n_steps=len(distinct(step[rows])),
                caused_ns=int(caused[rows].sum()),
                longest_ns=int(skew[rows].max()),
                worst_kind=kind_names[int(by_kind.argmax())],
            )
        )
    return sorted(found, key=lambda one: -one.caused_ns)


# The highest bus bandwidth of a group, where the run describes its machine or the user states a limit.
#
# The bus bandwidth of nccl-tests does not depend on the number of ranks, so that it can be held against what
# a rank's link carries inside of a node, and against the NICs that the members of a group in one node share
# between nodes.

_UNITS: Final = {"Gb/s": 1e9 / 8, "GB/s": 1e9, "GiB/s": 2.0**30, "MB/s": 1e6, "TB/s": 1e12}


def parse_limit(text: str) -> float:
    """Return a bandwidth such as ``"400 GB/s"`` in bytes per second; a bare number is refused.

    Raises:
        RunError: it is no bandwidth.

    >>> parse_limit("400 Gb/s")
    50000000000.0
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+/s)\s*", text)
    if found is None or found[2] not in _UNITS or not float(found[1]):
        raise RunError(f"bandwidth {text!r}: write a number and one of {', '.join(_UNITS)}, e.g. '400 GB/s'")
    return float(found[1]) * _UNITS[found[2]]


def bus_limit(run: Run, ranks: Sequence[int]) -> float | None:
    """Return the bus bandwidth that the links of *ranks* allow, in bytes per second; None if not described.

    Ranks are taken to be on GPUs of their own number. Between nodes, the members of a group in one node share
    as large a part of its NICs as they are of its GPUs.
    """
    cluster = run.info.cluster or {}
    per_node = cluster.get("gpus_per_node")
    near = _bandwidth(cluster.get("intra"))
    if not isinstance(per_node, int) or per_node < 1 or near is None:
        return None
    nodes: dict[int, int] = {}
    for rank in ranks:
        nodes[rank // per_node] = nodes.get(rank // per_node, 0) + 1
    if len(nodes) < 2:
        return near
    far, n_nics = _bandwidth(cluster.get("nic")), cluster.get("nics_per_node")
    if far is None or not isinstance(n_nics, int) or n_nics < 1:
        return None
    # Members that are few in a node have one NIC at least.
    return min(near, far * max(n_nics * min(nodes.values()) / per_node, 1.0))


def _bandwidth(link: object) -> float | None:
    value = link.get("bandwidth_bytes_per_s") if isinstance(link, Mapping) else None
    return float(value) if isinstance(value, int | float) and value > 0 else None


def bus_limits(run: Run, group: Int64Array, ends: Int64Array) -> NDArray[np.float64]:
    """Return what the links of each *group* allow, or of the two *ends* where they are known; 0 if unknown.

    Args:
        run: an open run.
        group: numbers of groups.
        ends: sender and receiver, -1 where there are none, of shape ``(n, 2)``.
    """
    members = {known.id: known.ranks for known in run.info.groups}
    key = factorized(group, *ends.T)
    _, first = np.unique(key, return_index=True)
    limits = []
    for row in first.tolist():
        ranks = ends[row].tolist() if ends[row].min() >= 0 else members.get(int(group[row]), ())
        limits.append((bus_limit(run, ranks) if ranks else None) or 0.0)
    return np.array(limits, np.float64)[key]
