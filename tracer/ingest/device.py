"""Turns kernels and copies into rows of the timeline: streams apart, passes told."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from foretrace.tracer.ingest.calls import Call, from_arguments, named
from foretrace.tracer.ingest.events import ARGUMENTS, all_to_ns
from foretrace.tracer.ingest.groups import TraceGroups
from foretrace.tracer.ingest.host import Known
from foretrace.tracer.ingest.kernels import UNKNOWN, Kernel, kernel, kernel_dtype
from foretrace.tracer.ingest.recording import Recording, coded, lanes
from foretrace.traces.columns import BoolArray, Int64Array, factorized, labels
from foretrace.traces.layout import Group
from foretrace.traces.timeline import timeline

GRAIN_NS: Final = 1_000
"""Up to torch 2.2, times are whole microseconds: neighbours of a stream may overlap by one."""

MOST_LANES: Final = 32
"""Kernels of one stream that may run at once: graphs and dependent launches overlap few."""

_LONGEST_US: Final = 4e15
"""Times beyond 127 years are not times."""


def device_rows(table: pa.Table, known: Known) -> tuple[pa.Table, NDArray[np.intp]] | None:
    """Return the timeline of the device and the runtime call of each row; None without device events.

    Args:
        table: device events, columns ``tracer.ingest.events.DEVICE``.
        known: what the file holds beside them.
    """
    result, launches, steps = known.result, known.launches, known.steps
    table = _sane(table, result)
    if not table.num_rows:
        return None
    start = known.base_ns + all_to_ns(table["ts"].to_numpy())
    end = start + all_to_ns(table["dur"].to_numpy())
    stream, stream_names = _streams(table)
    order = np.lexsort((-end, start, stream))
    table, start, end, stream = table.take(order), start[order], end[order], stream[order]
    lane, begin = _lanes(stream, start, end)
    kept = lane >= 0
    if not kept.all():
        result.lost["more overlapping kernels of one stream than a device runs"] += int((~kept).sum())
        table, begin, end, stream, lane = (
            table.filter(pa.array(kept)),
            begin[kept],
            end[kept],
            stream[kept],
            lane[kept],
        )
    what, of_event = _kernels(table)
    launch = launches.find(_column(table, "correlation"))
    communication = np.array([k.category == "collective" for k in what], np.bool_)[of_event]
    calls = communication_calls(
        table, communication, launch, known, [what[i] for i in of_event[communication]]
    )
    tell_sources(calls, result)
    columns = _plain(table, what, of_event, begin, end) | {"step": steps.at(begin)}
    columns["stream"] = _stream_labels(stream, lane, stream_names)
    columns |= _pass_kinds(what, of_event, launch, known)
    return with_calls(columns, communication, calls, known), launch


def _sane(table: pa.Table, result: Recording) -> pa.Table:
    """Leave out, and count, events without a usable time."""
    if not table.num_rows:
        return table
    ts, dur = (table[name].to_numpy() for name in ("ts", "dur"))
    good = (np.abs(ts) < _LONGEST_US) & (dur >= 0) & (dur < _LONGEST_US)  # NaN: a null
    if negative := int((dur < 0).sum()):
        result.lost["device event with a negative duration"] += negative
    if missing := int((~good).sum()) - negative:
        result.lost["device event without a usable time"] += missing
    good &= np.asarray(table["name"].is_valid()) & np.asarray(table["cat"].is_valid())
    return table.filter(pa.array(good))


def _column(table: pa.Table, name: str) -> Int64Array:
    """Return an integer column, -1 where it says nothing."""
    values: Int64Array = pc.fill_null(table[name], -1).to_numpy().astype(np.int64)
    return values


def _streams(table: pa.Table) -> tuple[Int64Array, list[str]]:
    """Return a number per row for its (device, stream), and the names of these streams."""
    device, stream = _column(table, "device"), _column(table, "stream")
    number = factorized(device, stream)
    _, first = np.unique(number, return_index=True)
    several = len(np.unique(device)) > 1
    names = [
        f"gpu {device[i]} stream {stream[i]}"
        if several
        else "stream"
        if stream[i] < 0
        else f"stream {stream[i]}"
        for i in first
    ]
    return number, names


def _lanes(stream: Int64Array, start: Int64Array, end: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the lane of each event within its stream, and its start; rows are sorted by stream and start."""
    lane, begin = np.zeros(len(start), np.int64), start.copy()
    edges = [*np.flatnonzero(np.diff(stream, prepend=-1)).tolist(), len(stream)]
    for a, b in pairwise(edges):
        lane[a:b], begin[a:b] = lanes(start[a:b], end[a:b], GRAIN_NS, MOST_LANES)
    return lane, begin


def _stream_labels(stream: Int64Array, lane: Int64Array, names: list[str]) -> pa.DictionaryArray:
    """Return the label of each row's stream; further lanes of a stream are numbered."""
    width = int(lane.max(initial=0)) + 1
    used, code = np.unique(stream * width + lane, return_inverse=True)
    said = [f"{names[u // width]}{f' ({u % width + 1})' if u % width else ''}" for u in used.tolist()]
    return coded(code, said)


def _kernels(table: pa.Table) -> tuple[list[Kernel], NDArray[np.intp]]:
    """Return the distinct kinds of events, and which of them each row is."""
    cats, cat_names = labels(table, "cat")
    codes, names = labels(table, "name")
    key = codes.astype(np.int64) * (len(cat_names) + 1) + cats
    used, index = np.unique(key, return_inverse=True)
    width = len(cat_names) + 1
    return [kernel(cat_names[u % width], names[u // width]) for u in used.tolist()], index


def _plain(
    table: pa.Table, what: list[Kernel], of_event: NDArray[np.intp], begin: Int64Array, end: Int64Array
) -> dict[str, Any]:
    """Return the columns that need nothing but the event."""
    is_copy = np.array([k.category == "copy" for k in what], np.bool_)[of_event]
    moved = pc.fill_null(table["bytes"], 0.0).to_numpy()
    sane = is_copy & (moved >= 0) & (moved < 2.0**62)
    return {
        "rank": np.zeros(len(begin), np.int32),
        "category": _labelled([k.category for k in what], of_event),
        "name": _labelled([k.name for k in what], of_event),
        "start_ns": begin,
        "duration_ns": end - begin,
        "bytes_moved": np.where(sane, moved, 0).astype(np.int64),
    }


def _labelled(names: list[str], index: NDArray[np.intp]) -> pa.DictionaryArray:
    """Return a label column: *index* numbers *names*, equal names become one."""
    distinct = sorted(set(names))
    where = {name: i for i, name in enumerate(distinct)}
    return coded(np.array([where[name] for name in names], np.int32)[index], distinct)


def _pass_kinds(
    what: list[Kernel],
    of_event: NDArray[np.intp],
    launch: NDArray[np.intp],
    known: Known,
) -> dict[str, Any]:
    """Return the ``kind`` column; compute is told apart by the thread that launched it.

    torch runs the backward pass on a thread of its own. What the thread of the step marks launches inside an
    ``Optimizer.step`` annotation is the optimizer, the rest is forward.
    """
    launches, steps = known.launches, known.steps
    names = [k.kind for k in what]
    kind = np.array([names.index(name) for name in names], np.int64)[of_event]
    is_compute = np.array([k.category == "compute" for k in what], np.bool_)[of_event] & (launch >= 0)
    thread = np.where(launch >= 0, launches.tid[launch] if len(launches.tid) else -1, -1)
    elsewhere = is_compute & (thread != steps.tid)
    if steps.tid >= 0 and elsewhere.any() and (is_compute & ~elsewhere).any():
        when = launches.start_ns[launch]
        in_optimizer = steps.in_optimizer(when) & ~elsewhere
        names = [*names, "backward", "optimizer", "forward"]
        kind[is_compute] = len(names) - 1
        kind[is_compute & in_optimizer] = len(names) - 2
        kind[elsewhere] = len(names) - 3
        known.result.evidence["kind"] = (
            "thread that launched a kernel: autograd's is backward; Optimizer.step annotations"
        )
    return {"kind": _labelled(names, kind)}


def communication_calls(
    table: pa.Table,
    communication: BoolArray,
    launch: NDArray[np.intp],
    known: Known,
    kernels: list[Kernel],
) -> list[Call]:
    """Return what is known about each communication kernel, in the order of the table.

    Args:
        table: device events, columns ``tracer.ingest.events.DEVICE``.
        communication: which of them communicate.
        launch: the runtime call of each event, -1 if unknown.
        known: what the file holds beside them.
        kernels: what the name of each communication kernel says.
    """
    host, launches = known.calls, known.launches
    picked = table.filter(pa.array(communication)).select(list(ARGUMENTS))
    told = picked.num_rows - picked["Collective name"].null_count
    said_by_kernel = picked.to_pylist() if told else [{}] * picked.num_rows
    at = launch[communication]
    if len(host.calls) and len(launches.tid):
        around = host.around(np.where(at >= 0, launches.tid[at], -1), launches.start_ns[at])
    else:
        around = [None] * picked.num_rows
    found = []
    for said, near, own in zip(said_by_kernel, around, kernels, strict=True):
        call = (
            from_arguments({k: v for k, v in said.items() if v is not None}, known.groups, "kernel")
            or near
            or Call()
        )
        kind = own.kind if call.kind == UNKNOWN else call.kind
        found.append(replace(call, kind=kind, dtype=call.dtype or kernel_dtype(own.name)))
    return found


def tell_sources(calls: list[Call], result: Recording) -> None:
    """Note where kind and size of the communication were taken from, with counts."""
    if not calls:
        return
    told = ", ".join(f"{source} {count}" for source, count in named(calls).most_common())
    untold = sum(not call.source for call in calls)
    parts = [told, f"name of the kernel only {untold}" if untold else ""]
    result.evidence["communication"] = "; ".join(part for part in parts if part)
    if unknown := sum(call.kind == UNKNOWN for call in calls):
        result.lost["communication kernel whose operation is unknown"] += unknown


def with_calls(
    columns: dict[str, Any], communication: BoolArray, calls: list[Call], known: Known
) -> pa.Table:
    """Return the timeline with kind, axis, group, sequence and size of each communication filled in."""
    everyone = _everyone(known.groups, known.result) if any(call.group is None for call in calls) else None
    calls = [_sized(replace(call, group=call.group or everyone)) for call in calls]
    where = np.flatnonzero(communication)
    n = len(communication)
    filled: dict[str, Any] = {
        "axis": _scattered(n, where, [call.group.axis if call.group else "unknown" for call in calls], ""),
        "group": _numbers(n, where, [call.group.id if call.group else -1 for call in calls], -1, np.int32),
        "sequence": _numbers(n, where, [call.sequence for call in calls], -1, np.int64),
        "peer": _numbers(n, where, [call.peer for call in calls], -1, np.int32),
        "size_bytes": _numbers(n, where, [call.size_bytes for call in calls], 0, np.int64),
        "dtype": _scattered(n, where, [call.dtype for call in calls], ""),
    }
    if calls:
        columns |= {
            "kind": _relabelled(columns["kind"], where, [call.kind for call in calls]),
            "category": _relabelled(columns["category"], where, [_category(call) for call in calls]),
        }
    known.result.numbered = bool(calls) and all(
        call.sequence >= 0 for call in calls if call.group is not None
    )
    return timeline(columns | filled)


def _category(call: Call) -> str:
    return "p2p" if call.kind in {"send", "recv"} else "collective"


def _relabelled(column: pa.DictionaryArray, where: NDArray[np.intp], values: list[str]) -> pa.DictionaryArray:
    """Return *column* with other labels at the rows *where*."""
    names = column.dictionary.to_pylist()
    names += sorted(set(values) - set(names))
    number = {name: i for i, name in enumerate(names)}
    codes = column.indices.to_numpy(zero_copy_only=False).copy()
    codes[where] = [number[value] for value in values]
    return coded(codes, names)


def _everyone(groups: TraceGroups, result: Recording) -> Group | None:
    """Return the group of communication that tells none: the only one there is, or the whole world."""
    if len(groups.configured) == 1:
        ((name, (description, ranks)),) = groups.configured.items()
        if ranks:
            result.evidence["group of untold communication"] = "the only process group in the header"
            return groups.add(name, description, ranks)
    if groups.world_size > 1 and not groups.known:
        result.evidence["group"] = (
            "no process group in the file: all communication taken as of the whole world"
        )
        return groups.add("", "", tuple(range(groups.world_size)))
    return None


def _sized(call: Call) -> Call:
    """Return *call* with the size of the whole array; an annotation gives the input, which may be a shard."""
    if call.kind == "all_gather" and call.source.startswith("annotation") and call.group is not None:
        return replace(call, size_bytes=call.size_bytes * len(call.group.ranks))
    return call


def _numbers(n: int, where: NDArray[np.intp], values: list[int], default: int, kind: Any) -> NDArray[Any]:
    column = np.full(n, default, kind)
    column[where] = values
    return column


def _scattered(n: int, where: NDArray[np.intp], values: list[str], default: str) -> pa.DictionaryArray:
    distinct = [default, *sorted(set(values) - {default})]
    code = {name: i for i, name in enumerate(distinct)}
    column = np.zeros(n, np.int32)
    column[where] = [code[value] for value in values]
    return coded(column, distinct)
