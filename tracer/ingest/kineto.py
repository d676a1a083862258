"""Makes a recording of one Kineto file: device events, steps, and what the host did meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from foretrace.tracer.errors import IngestError
from foretrace.tracer.ingest.chrome import (
    EVENTS_KEY,
    Trace,
    has_kineto_layout,
    read_any_layout,
    read_kineto_layout,
)
from foretrace.tracer.ingest.events import ARGUMENTS, DEVICE, LAUNCH, LONGEST_US, all_to_ns, whole
from foretrace.tracer.ingest.groups import MOST_RANKS, TraceGroups
from foretrace.tracer.ingest.host import (
    Known,
    Steps,
    gap_rows,
    host_only_rows,
    launches_of,
    step_rows,
    steps_of,
)
from foretrace.tracer.ingest.kernels import UNKNOWN, Kernel, kernel, kernel_dtype
from foretrace.tracer.ingest.notes import Call, Notes, from_arguments, host_calls, named
from foretrace.tracer.ingest.recording import Recording, coded, lanes, stacked
from foretrace.tracer.ingest.sources import Progress, Source, head, opened
from foretrace.traces.columns import BoolArray, Int64Array, factorized, labels
from foretrace.traces.errors import reason
from foretrace.traces.layout import Group
from foretrace.traces.timeline import timeline

LATEST_NS: Final = 4 * 10**18
"""Latest base time that is believed, in the year 2096. Times of events may be as large: sums of both fit."""


def read(source: Source, progress: Progress | None = None) -> Recording:
    """Read one Kineto or Chrome trace of a rank.

    Raises:
        IngestError: the file cannot be read, is no trace, or holds nothing that has a duration.
    """
    fast = has_kineto_layout(head(source, until=EVENTS_KEY))
    reader = read_kineto_layout if fast else read_any_layout
    with opened(source, progress) as stream:
        trace = reader(stream)
    if not any(table.num_rows for table in trace.device):
        with opened(source) as stream:
            trace.operators = reader(stream, operators=True).operators
    try:
        return translated(trace, source.name)
    except (OverflowError, pa.ArrowException) as error:
        raise IngestError(f"{source.name} holds numbers that no trace has: {reason(error)}") from error


def translated(trace: Trace, name: str) -> Recording:
    """Return the recording of one rank that *trace* holds.

    Raises:
        IngestError: nothing in it has a duration.
    """
    info = trace.header.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    rank, world_size = _rank(info), _world_size(info)
    base_ns = whole(trace.header.get("baseTimeNanoseconds")) or 0
    if abs(base_ns) > LATEST_NS:
        base_ns = 0
        trace.lost["base time that is no time"] += 1
    groups = TraceGroups.from_header(-1 if rank is None else rank, world_size or 0, info)
    notes = Notes.of(trace.notes, base_ns)
    steps = steps_of(notes, trace.header)
    result = Recording(
        name=name,
        spans=pa.table({}),
        rank=rank,
        world_size=world_size,
        lost=trace.lost,
        facts=_facts(trace.header),
    )
    known = Known(
        base_ns=base_ns,
        notes=notes,
        calls=host_calls(notes, groups),
        launches=launches_of(trace.taken(LAUNCH), base_ns),
        steps=steps,
        groups=groups,
        result=result,
    )
    device = device_rows(trace.taken(DEVICE), known)
    if device is None:
        spans = host_only_rows(trace, known)
    else:
        timeline, launch = device
        spans = stacked([timeline, gap_rows(timeline, launch, known)])
    if not spans.num_rows:
        raise IngestError(f"{name} holds no event with a duration: no kernel, no operator, no annotation")
    result.spans = stacked([spans, step_rows(steps, spans)])
    result.groups = tuple(groups.known.values())
    _note(result, trace, steps, groups, rank)
    return result


def _note(result: Recording, trace: Trace, steps: Steps, groups: TraceGroups, rank: int | None) -> None:
    """Write down where things were taken from, and what is missing."""
    if rank is not None:
        result.evidence["rank"] = "distributedInfo in the file"
    if steps.number.size:
        result.evidence["step"] = "ProfilerStep annotations"
    if groups.sources:
        result.evidence["group"] = "; ".join(sorted(groups.sources))
    if trace.cut:
        result.warnings.append(f"{trace.cut}; what was complete is shown")


def _rank(info: Mapping[str, Any]) -> int | None:
    rank = whole(info.get("rank"))
    return rank if rank is not None and 0 <= rank < MOST_RANKS else None


def _world_size(info: Mapping[str, Any]) -> int | None:
    size = whole(info.get("world_size"))
    return size if size is not None and 1 <= size <= MOST_RANKS else None


def _facts(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the header says about the machine, for ``run.json``."""
    devices = header.get("deviceProperties")
    first = devices[0] if isinstance(devices, list) and devices and isinstance(devices[0], dict) else {}
    facts: dict[str, Any] = {}
    if isinstance(first.get("name"), str):
        facts["device"] = {"name": first["name"]}
        if memory := whole(first.get("totalGlobalMem")):
            facts["device"]["memory_bytes"] = memory
    info = header.get("distributedInfo")
    versions = {"nccl": info.get("nccl_version")} if isinstance(info, dict) else {}
    versions |= {name: header.get(f"{name}_version") for name in ("cupti", "cuda_runtime", "roctracer")}
    facts["versions"] = {
        name: str(value) for name, value in versions.items() if isinstance(value, str | int | float)
    }
    return facts


GRAIN_NS: Final = 1_000
"""Up to torch 2.2, times are whole microseconds: neighbours of a stream may overlap by one."""

MOST_LANES: Final = 32
"""Kernels of one stream that may run at once: graphs and dependent launches overlap few."""


def device_rows(table: pa.Table, known: Known) -> tuple[pa.Table, NDArray[np.intp]] | None:
    """Return the timeline of device events, and the runtime call of each row; None if there are none."""
    result, launches, steps = known.result, known.launches, known.steps
    table = _sane(table, result)
    if not table.num_rows:
        return None
    start = known.base_ns + all_to_ns(table["ts"].to_numpy())
    end = start + all_to_ns(table["dur"].to_numpy())
    stream, stream_names = _streams(table)
    order = np.lexsort((-end, start, stream))
    table, start, end, stream = table.take(order), start[order], end[order], stream[order]
    lane, begin = lanes(start, end, GRAIN_NS, MOST_LANES, stream)
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
    good = (np.abs(ts) < LONGEST_US) & (dur >= 0) & (dur < LONGEST_US)  # NaN: a null
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
    what: list[Kernel], of_event: NDArray[np.intp], launch: NDArray[np.intp], known: Known
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
    table: pa.Table, communication: BoolArray, launch: NDArray[np.intp], known: Known, kernels: list[Kernel]
) -> list[Call]:
    """Return what is known about each communication kernel, in the order of the table of device events.

    Of all events *communication* says whether they communicate, and *launch* which call launched them; of
    those that do, *kernels* says what their names tell.
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
