"""Makes a recording of one Kineto file: device events, steps, and what the host did meanwhile."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

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
from foretrace.tracer.ingest.events import (
    ARGUMENTS,
    DEVICE,
    LAUNCH,
    LONGEST_US,
    MEMORY_INSTANT,
    all_to_ns,
    arguments,
    product_flops,
    text,
    timed_ns,
    whole,
)
from foretrace.tracer.ingest.groups import MOST_RANKS, TraceGroups, whole_bytes
from foretrace.tracer.ingest.host import (
    Known,
    OnDevice,
    Steps,
    host_only_rows,
    launch_figures,
    launches_of,
    step_rows,
    steps_of,
    steps_on_device,
)
from foretrace.tracer.ingest.idle import idle_rows
from foretrace.tracer.ingest.joining import numbered_in_order
from foretrace.tracer.ingest.kernels import PEER, UNKNOWN, Kernel, first_dtype, kernel, kernel_dtype
from foretrace.tracer.ingest.notes import Call, Notes, flattened, from_arguments, host_calls, named
from foretrace.tracer.ingest.recording import Recording, coded, stacked
from foretrace.tracer.ingest.sources import Progress, Source, head, opened
from foretrace.traces.analysis.kernels import OTHER, group_of
from foretrace.traces.columns import BoolArray, Int64Array, factorized, int64, labels, lanes
from foretrace.traces.errors import reason
from foretrace.traces.layout import Group
from foretrace.traces.report.format import format_share, format_time
from foretrace.traces.timeline import MEMORY, timeline

LATEST_NS: Final = 4 * 10**18
"""Latest base time that is believed, in the year 2096. Times of events may be as large: sums of both fit."""

NAMELESS: Final = re.compile(r"(?:^|(?<=::)|(?<=\s))[(<{][^()<>{}]*[)>}]::")
"""A namespace without a name, as compilers spell it, before what is in it."""


def read(
    source: Source,
    progress: Progress | None = None,
    *,
    communicates: re.Pattern[str] | None = None,
    explain: bool = False,
) -> Recording:
    """Read one Kineto or Chrome trace of a rank; kernels whose names fit *communicates* are communication.

    If *explain*, what the rank issued is told from its operators and their shapes, too. Raises IngestError:
    the file cannot be read, is no trace, or holds nothing that has a duration.
    """
    fast = has_kineto_layout(head(source, until=EVENTS_KEY))
    reader = read_kineto_layout if fast else read_any_layout
    with opened(source, progress) as stream:
        trace = reader(stream)
    # Operators are most of a file, and few files need them: they are read in a second look.
    if explain or not any(table.num_rows for table in trace.device):
        with opened(source) as stream:
            trace.operators = reader(stream, operators=True).operators
    try:
        return translated(trace, source.name, communicates, explain=explain)
    except (OverflowError, pa.ArrowException) as error:
        raise IngestError(f"{source.name} holds numbers that no trace has: {reason(error)}") from error


def translated(
    trace: Trace, name: str, communicates: re.Pattern[str] | None = None, *, explain: bool = False
) -> Recording:
    """Return the recording of one rank that *trace* holds; *communicates* and *explain* as for ``read``.

    Raises IngestError: nothing in it has a duration.
    """
    info = trace.header.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    rank, world_size = whole(info.get("rank")), whole(info.get("world_size"))
    rank = rank if rank is not None and 0 <= rank < MOST_RANKS else None
    world_size = world_size if world_size is not None and 1 <= world_size <= MOST_RANKS else None
    base_ns = whole(trace.header.get("baseTimeNanoseconds")) or 0
    if abs(base_ns) > LATEST_NS:
        base_ns = 0
        trace.lost["base time that is no time"] += 1
    groups = TraceGroups.from_header(-1 if rank is None else rank, world_size or 0, info)
    notes = Notes.of(trace.notes, base_ns)
    launches = launches_of(trace.taken(LAUNCH), base_ns)
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
        device_notes=Notes.of(trace.notes, base_ns, on_host=False),
        frames=Notes.of(trace.frames, base_ns),
        calls=host_calls(notes, groups),
        launches=launches,
        steps=steps_of(notes, trace.header, launches),
        groups=groups,
        result=result,
    )
    device = device_rows(trace, known, communicates, explain=explain)
    if device is None:
        spans = host_only_rows(trace, known)
        ends = int64(spans, "start_ns") + int64(spans, "duration_ns")
        steps = known.steps.until(int(ends.max(initial=0)))
    else:
        spans, steps = device
    if not spans.num_rows:
        raise IngestError(f"{name} holds no event with a duration: no kernel, no operator, no annotation")
    result.spans = stacked([spans, step_rows(steps)])
    result.groups = tuple(groups.known.values())
    result.memory = _memory(trace, base_ns)
    _note(result, trace, known.steps, steps, groups)
    return result


def _memory(trace: Trace, base_ns: int) -> pa.Table | None:
    """Return the memory of the device that holds most, over time; None where the file does not say."""
    found = pa.concat_tables(trace.memory) if trace.memory else MEMORY_INSTANT.empty_table()
    ts = pc.fill_null(found["ts"], np.inf).to_numpy()
    device, total, reserved = (_column(found, name) for name in MEMORY_INSTANT.names[2:])
    on_device = _column(found, "Device Type") > 0
    kept = on_device & (np.abs(ts) < LONGEST_US) & (total >= 0) & (reserved >= 0)
    if not kept.any():
        return None
    most = device[kept][total[kept].argmax()]
    own = np.flatnonzero(kept & (device == most))
    own = own[np.lexsort((reserved[own], total[own], ts[own]))]
    t_ns = base_ns + all_to_ns(ts[own])
    return pa.concat_tables(
        pa.table(
            {
                "rank": pa.array(np.zeros(len(own), np.int32)),
                "t_ns": t_ns,
                "category": coded(np.zeros(len(own), np.int32), [name]),
                "bytes": pa.array(values[own]),
            },
            schema=MEMORY,
        )
        for name, values in (("total", total), ("reserved", reserved))
    )


def _note(result: Recording, trace: Trace, on_host: Steps, steps: Steps, groups: TraceGroups) -> None:
    """Write down where things were taken from, and what is missing."""
    if result.rank is not None:
        result.evidence["rank"] = "distributedInfo in the file"
    if steps.number.size:
        ahead_ns = int((steps.start_ns - on_host.start_ns).max())
        result.evidence["step"] = steps.marked_by + (
            f"; the host runs up to {format_time(ahead_ns / 1e9)} ahead, so steps are told by what was "
            "launched in them, and last as long as the device takes"
            if ahead_ns
            else ""
        )
    told = sorted(groups.sources)
    if groups.assumed:
        told += [f"assumed: {'; '.join(sorted(groups.assumed))}"]
        result.facts["assumed"] = {"group": told[-1]}
    if told:
        result.evidence["group"] = "; ".join(told)
    if trace.cut:
        result.warnings.append(f"{trace.cut}; what was complete is shown")


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


ASSUMED_WORLD: Final = "the file names no process group, what tells none is taken as of all ranks"
LIKE_OTHERS: Final = "like all others of its stream"
LEAST_SILENT: Final = 0.01
"""Share of the time from which on a stream of unknown purpose, or work of no step, is worth a warning."""

GRAIN_NS: Final = 1_000
"""Up to torch 2.2, times are whole microseconds: neighbours of a stream may overlap by one."""

MOST_LANES: Final = 32
"""Kernels of one stream that may run at once: graphs and dependent launches overlap few."""


def device_rows(
    trace: Trace, known: Known, communicates: re.Pattern[str] | None, *, explain: bool
) -> tuple[pa.Table, Steps] | None:
    """Return the timeline of device events, and steps on the device's clock; None if there are none.

    Of matrix products, operators of the host, the kernels have FLOPs and data type.
    """
    result, launches = known.result, known.launches
    table = _sane(trace.taken(DEVICE), result)
    if not table.num_rows:
        return None
    start = known.base_ns + all_to_ns(table["ts"].to_numpy())
    end = start + all_to_ns(table["dur"].to_numpy())
    stream, stream_names = _streams(table)
    # Of two that begin at once on a stream the longer one comes first.
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
    what = _kernels(table, communicates)
    launch = launches.find(_column(table, "correlation"))
    rows = OnDevice(
        start_ns=begin,
        end_ns=end,
        stream=stream,
        computes=what.are(lambda one: one.category == "compute"),
        is_pageable=what.are(lambda one: "Pageable" in one.name) & (launch >= 0),
        launch=launch,
    )
    # From here on *steps* are on the device's clock; those of *known* stay on the host's.
    step, steps = steps_on_device(known.steps, rows, launches, known.device_notes)
    _tell_earlier(rows, step, steps, result)
    communication = what.are(lambda one: one.category == "collective")
    kernels = [what.kinds[i] for i in what.of_row[communication]]
    calls = communication_calls(table, communication, launch, known, kernels)
    calls = _like_others(calls, stream[communication])
    tell_sources(calls, result)
    _tell_silent_streams(rows, what, stream_names, result)
    flops, product_dtype = _products(trace.products, rows, known)
    columns = _plain(table, what, begin, end) | {"step": step, "flops": flops}
    columns["dtype"] = _labelled(product_dtype, np.arange(len(begin)))
    result.facts["launches"] = launch_figures(rows, launches)
    columns["stream"] = _stream_labels(stream, lane, stream_names)
    columns |= _pass_kinds(what, rows, known)
    idle = idle_rows(rows, stream_names, replace(known, steps=steps))
    spans = with_calls(columns, communication, calls, stream[communication], known)
    if explain:
        from foretrace.tracer.ingest.operators import issued

        # By these numbers ranks meet, as in the timeline, which is numbered when all ranks are known.
        numbered = spans if result.numbered else numbered_in_order(spans)
        result.issued, counted = issued(trace.operators, rows, numbered, known, steps)
        for name in ("flops", "bytes_moved", "dtype"):
            spans = spans.set_column(spans.column_names.index(name), spans.schema.field(name), counted[name])
    return stacked([spans, idle]), steps


def _sane(table: pa.Table, result: Recording) -> pa.Table:
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


class Kinds(NamedTuple):
    """What the events of a device are: distinct kinds, and which of them each row is."""

    kinds: list[Kernel]
    of_row: NDArray[np.intp]

    def are(self, test: Callable[[Kernel], bool]) -> BoolArray:
        """Return of which rows *test* is true."""
        return np.array([test(one) for one in self.kinds], np.bool_)[self.of_row]


def _kernels(table: pa.Table, communicates: re.Pattern[str] | None) -> Kinds:
    cats, cat_names = labels(table, "cat")
    codes, names = labels(table, "name")
    width = len(cat_names) + 1
    used, index = np.unique(codes.astype(np.int64) * width + cats, return_inverse=True)
    kinds = [kernel(cat_names[one % width], names[one // width], communicates) for one in used.tolist()]
    return Kinds(kinds, index)


def _plain(table: pa.Table, what: Kinds, begin: Int64Array, end: Int64Array) -> dict[str, Any]:
    """Return the columns that need nothing but the event."""
    is_copy = what.are(lambda one: one.category == "copy" or one.kind == PEER)
    moved = pc.fill_null(table["bytes"], 0.0).to_numpy()
    sane = is_copy & (moved >= 0) & (moved < 2.0**62)
    return {
        "rank": np.zeros(len(begin), np.int32),
        "category": _labelled([one.category for one in what.kinds], what.of_row),
        "name": _labelled([one.name for one in what.kinds], what.of_row),
        "start_ns": begin,
        "duration_ns": end - begin,
        "bytes_moved": np.where(sane, moved, 0).astype(np.int64),
    }


def _labelled(names: list[str], index: NDArray[np.intp]) -> pa.DictionaryArray:
    """Return a label column: *index* numbers *names*, equal names become one."""
    distinct = sorted(set(names))
    where = {name: i for i, name in enumerate(distinct)}
    return coded(np.array([where[name] for name in names], np.int32)[index], distinct)


def _products(products: list[dict[str, Any]], rows: OnDevice, known: Known) -> tuple[Int64Array, list[str]]:
    """Return FLOPs and data type of each row: the longest kernel that a matrix product launches has them."""
    flops, dtypes = np.zeros(len(rows.launch), np.int64), [""] * len(rows.launch)
    spans: dict[int, list[tuple[int, int, int, str]]] = {}
    for event in products:
        said = arguments(event)
        count = product_flops(text(event.get("name")), said.get("Input Dims"))
        if count and (found := timed_ns(event, known.base_ns)) is not None:
            label = first_dtype(said.get("Input type"))[0]
            spans.setdefault(found[2], []).append((*found[:2], count, label))
    launches = known.launches
    rows_of = np.flatnonzero((rows.launch >= 0) & rows.computes) if spans else flops[:0]
    tid, when = launches.tid[rows.launch[rows_of]], launches.start_ns[rows.launch[rows_of]]
    length = rows.end_ns - rows.start_ns
    for thread, own in spans.items():
        own.sort()
        starts, ends = (np.array([span[i] for span in own], np.int64) for i in (0, 1))
        mine = np.flatnonzero(tid == thread)
        # The product that began last before each launch.
        at = np.searchsorted(starts, when[mine], side="right") - 1
        inside = (at >= 0) & (when[mine] < ends[at])
        chosen, at = rows_of[mine[inside]], at[inside]
        order = np.lexsort((length[chosen], at))  # of each product the longest is the last
        last = np.append(np.diff(at[order]) != 0, True)[: len(order)]
        for row, which in zip(chosen[order][last].tolist(), at[order][last].tolist(), strict=True):
            flops[row], dtypes[row] = own[which][2:]
    return flops, dtypes


BACKWARD_KERNEL: Final = re.compile(r"bwd|backward|dgrad|wgrad", re.IGNORECASE)
"""Kernels that say themselves that they are of a backward pass."""

PASSES: Final = (
    # Comes before `backward`, which its names hold as well.
    ("backward_weight", re.compile(r"\(W\)|wgrad|backward_weight|weight_backward", re.IGNORECASE)),
    ("backward", re.compile(r"\(B\)|backward|(?<![a-z])bwd(?![a-z])|^autograd::engine", re.IGNORECASE)),
    ("forward", re.compile(r"\(F\)|forward|(?<![a-z])fwd(?![a-z])|^CompiledFunction$", re.IGNORECASE)),
)
"""Passes, and the annotations that name them: of scripts, Megatron, schedules, autograd, compiled graphs."""


def _pass_kinds(what: Kinds, rows: OnDevice, known: Known) -> dict[str, Any]:
    """Return the ``kind`` column; passes are told apart by what was under way when a kernel was launched.

    First an annotation that names a pass, on the thread of the launch or else on another. Then
    ``Optimizer.step``; then the name of the kernel; then the thread: torch runs the backward pass on one of
    its own, and what the thread of the step marks launches is forward, unless it launches kernels of a
    backward pass, too: a backward by hand is not told from a forward.
    """
    launches, steps = known.launches, known.steps
    names = ["optimizer", *(name for name, _ in PASSES), "backward_input", "recompute"]
    names += sorted({one.kind for one in what.kinds} - set(names))
    kind = np.array([names.index(one.kind) for one in what.kinds], np.int64)[what.of_row]
    own = np.flatnonzero(rows.computes & (rows.launch >= 0))
    tid, when = launches.tid[rows.launch[own]], launches.start_ns[rows.launch[own]]
    on_thread, elsewhere, n_weight = _annotated_passes(known, tid, when)
    noted = np.where(on_thread >= 0, on_thread, elsewhere)
    # A forward on a thread of autograd, while another thread is in a backward pass. Numbers are places in
    # PASSES.
    recomputed = (on_thread == 2) & (elsewhere == 1) & (tid != steps.tid)
    by_name = what.are(lambda one: BACKWARD_KERNEL.search(one.name) is not None)[own]
    is_main = tid == steps.tid
    # In *names* the passes stand one place further: the optimizer comes first.
    found = np.where(noted >= 0, noted + 1, np.where(by_name, names.index("backward"), -1))
    by_hand = bool((by_name & is_main & (noted < 0)).any())
    several = steps.tid >= 0 and is_main.any() and (bool((~is_main).any()) or (found >= 0).any())
    if several:
        found = np.where((found < 0) & ~is_main, names.index("backward"), found)
        found = np.where((found < 0) & is_main & (not by_hand), names.index("forward"), found)
    if n_weight:  # where weights have a pass of their own, the other one is of inputs
        found = np.where(found == names.index("backward"), names.index("backward_input"), found)
    found = np.where(recomputed, names.index("recompute"), found)
    found = np.where(steps.in_optimizer(when) & is_main, names.index("optimizer"), found)
    if several or (noted >= 0).any():
        kind[own] = np.where(found >= 0, found, kind[own])
        said = {"annotations": (noted >= 0).any(), "Optimizer.step": len(steps.optimizer)}
        said |= {"names of kernels": by_name.any(), "threads that launch (autograd's is backward)": several}
        known.result.evidence["kind"] = ", ".join(name for name, is_used in said.items() if is_used)
    return {"kind": _labelled(names, kind)}


def _annotated_passes(known: Known, tid: Int64Array, t_ns: Int64Array) -> tuple[Int64Array, Int64Array, int]:
    """Return at each moment the pass that annotations name, an index into ``PASSES``, -1 for none.

    On its thread, and on any other; and how many annotations name the pass of the weights.
    """
    none = np.full(len(t_ns), -1, np.int64)
    parts = []
    for of in (known.notes, known.frames):
        notes = [note.name for note in of.notes]
        by_name = {name: _pass_of(name) for name in set(notes)}
        of_compiler = of is known.frames
        code = np.array(
            [-1 if of_compiler and not _OF_AUTOGRAD.match(name) else by_name[name] for name in notes],
            np.int64,
        )
        parts.append([values[code >= 0] for values in (of.start_ns, of.end_ns, of.tid, code)])
    start, end, thread, code = (np.concatenate(column) for column in zip(*parts, strict=True))
    if not len(code):
        return none, none, 0
    on_thread, elsewhere = none.copy(), none.copy()
    for number, flat in flattened(start, end, thread, code).items():
        at, mine = flat.at(t_ns), tid == number
        on_thread[mine] = at[mine]
        elsewhere[~mine & (at >= 0)] = at[~mine & (at >= 0)]
    return on_thread, elsewhere, int((code == 0).sum())


_OF_AUTOGRAD: Final = re.compile(r"CompiledFunction|autograd::engine")


def _pass_of(annotation: str) -> int:
    """Return which of ``PASSES`` an annotation names, -1 for none.

    >>> [_pass_of(name) for name in ("attn(W)", "## backward ##", "forward-compute", "Optimizer.step#SGD")]
    [0, 1, 2, -1]
    """
    return next((i for i, (_, pattern) in enumerate(PASSES) if pattern.search(annotation)), -1)


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


def _like_others(calls: list[Call], stream: Int64Array) -> list[Call]:
    """Return *calls* with kinds and groups that the file does not tell, if all others of the stream agree.

    A communicator has a stream of its own.
    """
    for number in np.unique(stream).tolist():
        own = np.flatnonzero(stream == number).tolist()
        for name, unknown in (("kind", UNKNOWN), ("group", None)):
            said = {getattr(calls[i], name) for i in own} - {unknown}
            if len(said) == 1:
                (value,) = said
                for i in own:
                    if getattr(calls[i], name) == unknown and calls[i].kind != PEER:
                        calls[i] = replace(calls[i], **{name: value}, source=calls[i].source or LIKE_OTHERS)
    return calls


def _tell_earlier(rows: OnDevice, step: NDArray[np.int32], steps: Steps, result: Recording) -> None:
    """Warn of what was launched before the only step and runs first in it: it is none of its work."""
    if len(steps.number) != 1:
        return
    begin, end = int(steps.start_ns[0]), int(steps.end_ns[0])
    first = int(rows.start_ns[step >= 0].min(initial=end))
    early = (step < 0) & (rows.end_ns > begin) & (rows.start_ns < first)
    until = int(rows.end_ns[early].max(initial=begin))
    if until - begin >= LEAST_SILENT * (end - begin):
        result.warnings.append(
            f"{int(early.sum()):,} kernels and copies launched before the step run until "
            f"{format_time((until - begin) / 1e9)} after its begin: without them it takes the device "
            f"{format_time((end - until) / 1e9)}"
        )


def _tell_silent_streams(rows: OnDevice, what: Kinds, streams: list[str], result: Recording) -> None:
    """Warn of streams on which nothing is known to compute, copy or communicate: they may communicate."""
    purpose = what.are(lambda one: one.category != "compute" or group_of(one.name) != OTHER)
    length = rows.end_ns - rows.start_ns
    window = max(int(rows.end_ns.max() - rows.start_ns.min()), 1)
    communicates = what.are(lambda one: one.category == "collective")
    computes = np.unique(rows.stream[purpose & rows.computes | communicates])
    for number in np.setdiff1d(np.unique(rows.stream[rows.computes]), computes).tolist():
        own = (rows.stream == number) & rows.computes
        share = float(length[own].sum()) / window
        if len(computes) and share >= LEAST_SILENT:
            names = sorted({what.kinds[i].name for i in np.unique(what.of_row[own]).tolist()}, key=len)
            heads = [re.sub(r"[<(…].*", "", NAMELESS.sub("", name)) for name in names]
            words = sorted({word for head in heads for word in re.findall(r"(\w+)\W*$", head)})[:4]
            asked = f"; if they communicate, ingest with --comm-kernels '\\b({'|'.join(words)})\\b'"
            result.warnings.append(
                f"{streams[number]} runs only kernels of unknown purpose, {format_share(share)} of the time "
                f"({', '.join(names[:2])[:120]}): counted as compute" + (asked if words else "")
            )


def with_calls(
    columns: dict[str, Any], communication: BoolArray, calls: list[Call], stream: Int64Array, known: Known
) -> pa.Table:
    """Return the timeline with kind, axis, group, sequence and size of each communication filled in."""
    untold = np.array([call.group is None and call.kind != PEER for call in calls], np.bool_)
    streams = np.unique(stream[untold]).tolist()
    of_stream = {number: _everyone(known, place) for place, number in enumerate(streams)}
    moved = columns["bytes_moved"][communication].tolist()
    calls = [
        replace(call, group=None, size_bytes=size)
        if call.kind == PEER
        else _in_group(call, call.group or of_stream.get(number))
        for call, number, size in zip(calls, stream.tolist(), moved, strict=True)
    ]
    where = np.flatnonzero(communication)
    n = len(communication)
    axes = [call.group.axis if call.group else "unknown" for call in calls]
    filled: dict[str, Any] = {
        "axis": _relabelled(coded(np.zeros(n, np.int32), [""]), where, axes),
        "group": _numbers(n, where, [call.group.id if call.group else -1 for call in calls], -1, np.int32),
        "sequence": _numbers(n, where, [call.sequence for call in calls], -1, np.int64),
        "peer": _numbers(n, where, [call.peer for call in calls], -1, np.int32),
        "size_bytes": _numbers(n, where, [call.size_bytes for call in calls], 0, np.int64),
    }
    if calls:
        columns |= {
            "dtype": _relabelled(columns["dtype"], where, [call.dtype for call in calls]),
            "kind": _relabelled(columns["kind"], where, [call.kind for call in calls]),
            "category": _relabelled(columns["category"], where, [_category(call) for call in calls]),
        }
    known.result.numbered = bool(calls) and all(
        call.sequence >= 0 for call in calls if call.group is not None
    )
    return timeline(columns | filled)


def _category(call: Call) -> str:
    return "p2p" if call.kind in {"send", "recv", PEER} else "collective"


def _relabelled(column: pa.DictionaryArray, where: NDArray[np.intp], values: list[str]) -> pa.DictionaryArray:
    names = column.dictionary.to_pylist()
    names += sorted(set(values) - set(names))
    number = {name: i for i, name in enumerate(names)}
    codes = column.indices.to_numpy(zero_copy_only=False).copy()
    codes[where] = [number[value] for value in values]
    return coded(codes, names)


def _everyone(known: Known, place: int) -> Group | None:
    """Return the group of communication that tells none, on the stream at *place* among those that tell none.

    The only one there is, or the whole world, in which each stream is a communicator.
    """
    groups, result = known.groups, known.result
    if len(groups.configured) == 1:
        ((name, (description, ranks)),) = groups.configured.items()
        if ranks:
            result.evidence["group of untold communication"] = "the only process group in the header"
            return groups.add(name, description, ranks)
    if groups.world_size > 1 and not groups.configured and not groups.sources:
        groups.assumed.add(ASSUMED_WORLD)
        return groups.add(f"stream {place}" if place else "", "world", tuple(range(groups.world_size)))
    return None


def _in_group(call: Call, group: Group | None) -> Call:
    """Return *call* over *group*; the size that an annotation gives is of the input, perhaps a part."""
    is_given = call.source.startswith("annotation")
    size = whole_bytes(call.kind, call.size_bytes, group) if is_given else call.size_bytes
    return replace(call, group=group, size_bytes=size)


def _numbers(n: int, where: NDArray[np.intp], values: list[int], default: int, kind: Any) -> NDArray[Any]:
    column = np.full(n, default, kind)
    column[where] = values
    return column
