"""What the host did: windows of steps, causes of an idle device, traces without a device."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from foretrace.tracer.ingest.chrome import Trace
from foretrace.tracer.ingest.events import LONGEST_US, all_to_ns, text, timed, to_ns, whole
from foretrace.tracer.ingest.groups import TraceGroups
from foretrace.tracer.ingest.notes import STEP, HostCalls, Notes, flattened
from foretrace.tracer.ingest.recording import Recording, coded, innermost, lanes, stacked
from foretrace.tracer.kernels import N_STEPS
from foretrace.traces.columns import BoolArray, Int64Array, int64, labels
from foretrace.traces.timeline import empty, timeline


@dataclass(frozen=True, slots=True)
class Steps:
    """Windows of optimizer steps on one rank, one behind the other; times in ns, shape ``(n_steps,)``."""

    number: Int64Array  # number of each step
    start_ns: Int64Array
    end_ns: Int64Array  # where the next begins
    tid: int  # thread that marked them, -1 if there are none
    optimizer: Int64Array  # start and end of ``Optimizer.step`` annotations, shape ``(n, 2)``
    n_steps: int | None = None  # the first that had not ended, None: all had, as far as is known

    def at(self, t_ns: Int64Array) -> NDArray[np.int32]:
        """Return the number of the step in which each moment lies, -1 outside; the last step is open."""
        if not len(self.number):
            return np.full(len(t_ns), -1, np.int32)
        index = np.searchsorted(self.start_ns, t_ns, side="right") - 1
        return np.where(index >= 0, self.number[index], -1).astype(np.int32)

    def in_optimizer(self, t_ns: Int64Array) -> BoolArray:
        """Return which moments lie in an ``Optimizer.step`` annotation."""
        if not len(self.optimizer):
            return np.zeros(len(t_ns), np.bool_)
        index = np.searchsorted(self.optimizer[:, 0], t_ns, side="right") - 1
        inside: BoolArray = (index >= 0) & (t_ns <= self.optimizer[index, 1])
        return inside


def steps_of(notes: Notes, header: Mapping[str, Any]) -> Steps:
    """Return the steps that ``ProfilerStep`` annotations of the host mark, in a file with that *header*."""
    marks: dict[int, int] = {}
    optimizer: list[int] = []
    for row, note in enumerate(notes.notes):
        if note.name.startswith("ProfilerStep#"):
            if found := STEP.fullmatch(note.name):
                marks.setdefault(int(found[1]), row)
        elif note.name.startswith("Optimizer.step#"):
            optimizer.append(row)
    rows_ = np.array(list(marks.values()), np.int64)
    number = np.array(list(marks), np.int64)
    order = np.argsort(notes.start_ns[rows_], kind="stable")
    rows_, number = rows_[order], number[order]
    start, end = notes.start_ns[rows_], notes.end_ns[rows_].copy()
    end[:-1] = start[1:]
    tid = int(notes.tid[rows_[0]]) if len(rows_) else -1
    within = np.stack([notes.start_ns[optimizer], notes.end_ns[optimizer]], axis=1)
    within = within[np.argsort(within[:, 0], kind="stable")]
    return Steps(number, start, end, tid, within, whole(header.get(N_STEPS)))


def step_rows(steps: Steps, spans: pa.Table) -> pa.Table:
    """Return the rows that mark the steps that have ended; the last one marked ends with the last span."""
    if not len(steps.number):
        return empty()
    end = steps.end_ns.copy()
    end[-1] = max(int(end[-1]), int((int64(spans, "start_ns") + int64(spans, "duration_ns")).max(initial=0)))
    if steps.n_steps is not None:
        ended = steps.number < steps.n_steps
        steps = replace(steps, number=steps.number[ended], start_ns=steps.start_ns[ended])
        end = end[ended]
    return timeline(
        {
            "rank": np.zeros(len(end), np.int32),
            "stream": ["step"] * len(end),
            "category": ["step"] * len(end),
            "kind": ["step"] * len(end),
            "name": [f"step {step}" for step in steps.number],
            "start_ns": steps.start_ns,
            "duration_ns": end - steps.start_ns,
            "step": steps.number.astype(np.int32),
        }
    )


@dataclass(frozen=True, slots=True)
class Launches:
    """Runtime calls, sorted by correlation number; times in ns, arrays of shape ``(n_calls,)``."""

    correlation: Int64Array  # number that kernel and launch share
    tid: Int64Array  # thread of the call
    start_ns: Int64Array  # when it began
    end_ns: Int64Array  # when it returned
    code: Int64Array  # index of its name in ``names``
    names: list[str]  # names of runtime functions

    def find(self, correlation: Int64Array) -> NDArray[np.intp]:
        """Return the row of the call with each correlation number, -1 where there is none."""
        if not len(self.correlation):
            return np.full(len(correlation), -1, np.intp)
        at = np.searchsorted(self.correlation, correlation)
        at[at == len(self.correlation)] = 0
        return np.where((self.correlation[at] == correlation) & (correlation > 0), at, -1)


def launches_of(table: pa.Table, base_ns: int) -> Launches:
    """Return the runtime calls in *table* (columns ``tracer.ingest.events.LAUNCH``)."""
    table = table.drop_null().combine_chunks() if table.num_rows else table
    ts, dur = table["ts"].to_numpy(), table["dur"].to_numpy()
    sane = (np.abs(ts) < LONGEST_US) & (dur >= 0) & (dur < LONGEST_US)
    table = table.filter(pa.array(sane)).combine_chunks()
    start = base_ns + all_to_ns(ts[sane])
    correlation = table["correlation"].to_numpy()
    order = np.argsort(correlation, kind="stable")
    codes, names = labels(table, "name") if table.num_rows else (np.zeros(0, np.int32), [])
    return Launches(
        correlation[order].astype(np.int64),
        table["tid"].to_numpy()[order].astype(np.int64),
        start[order],
        (start + all_to_ns(dur[sane]))[order],
        codes[order].astype(np.int64),
        names,
    )


SHORTEST_GAP_NS: Final = 5_000
"""Shorter pauses are the device's own: 1 to 4 µs lie between kernels that depend on each other."""

_BLOCKING: Final = re.compile(r"Synchronize|Memcpy|Malloc|Free|EventQuery|ModuleLoad", re.IGNORECASE)
_MOST_LANES: Final = 256

WAITS: Final = frozenset({"_c10d_functional::wait_tensor", "c10d_functional::wait_tensor"})
"""Operators in which a host does nothing but wait for a communication."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What a file holds beside its device events."""

    base_ns: int  # what the file's times count from
    notes: Notes  # annotations of the host
    calls: HostCalls  # the host's calls of collectives
    launches: Launches  # runtime calls
    steps: Steps  # windows of the steps
    groups: TraceGroups  # process groups; those found are added
    result: Recording  # gets evidence and counts


def gap_rows(device: pa.Table, launch: NDArray[np.intp], known: Known) -> pa.Table:
    """Return, for every pause in which nothing runs on the device, what it waited for.

    ``host``: what ends the pause had not been launched yet; named after what its thread was doing.
    ``launch``: from that *launch*, a row of the calls or -1 if unknown, to the start of the kernel.
    ``queued``: it had been launched before the pause began.
    """
    launches, steps = known.launches, known.steps
    start = int64(device, "start_ns")
    end = start + int64(device, "duration_ns")
    order = np.lexsort((end, start))
    busy_until = np.maximum.accumulate(end[order])[:-1]
    following = order[1:]
    gap = start[following] - busy_until >= SHORTEST_GAP_NS
    begin, stop, by = busy_until[gap], start[following][gap], launch[following][gap]
    launched = np.where(by >= 0, launches.start_ns[by], 0) if len(launches.tid) else np.zeros_like(begin)
    late = (by >= 0) & (launched > begin)
    until = np.where(late, np.minimum(launched, stop), stop)
    pieces = [
        _Pieces(begin[by < 0], stop[by < 0], "unknown", ["nothing in the file launched it"]),
        _Pieces(begin[~late & (by >= 0)], stop[~late & (by >= 0)], "queued", ["held back on the device"]),
        _Pieces(until[late], stop[late], "launch", ["from the launch to the start"]),
    ]
    tid = launches.tid[by[late]] if len(launches.tid) else np.zeros(0, np.int64)
    code, names = _doing(known, begin[late], until[late], tid)
    pieces.append(_Pieces(begin[late], until[late], "host", names, code))
    return stacked([piece.table(steps) for piece in pieces])


_HostSpan = tuple[int, int, str, str]
"""Start and end in ns, name, and category of what a thread of the host did."""


def host_only_rows(trace: Trace, known: Known) -> pa.Table:
    """Return the timeline of a file without a device; the innermost operator or annotation owns the time.

    Where the host computes, its operators are compute, all but those that wait. What no operator of an
    annotation owns, as of a step of FSDP that waits for what it gathers, is the host's.
    """
    calls, steps, result = known.calls, known.steps, known.result
    is_cpu = "gloo" in str(trace.header.get("distributedInfo") or {}) if trace.header else False
    threads: dict[int, list[_HostSpan]] = {}
    for event in trace.operators:
        if (span := _span(event, known.base_ns)) is not None:
            name = text(event.get("name", ""))
            category = ("wait" if name in WAITS else "compute") if is_cpu else "host"
            threads.setdefault(span[2], []).append((*span[:2], name, category))
    notes = known.notes
    for start, end, tid, note in zip(notes.start_ns, notes.end_ns, notes.tid, notes.notes, strict=True):
        if not STEP.fullmatch(note.name) and not note.name.startswith("gloo:"):
            threads.setdefault(int(tid), []).append((int(start), int(end), note.name, "host"))
    on_gloo = np.array([call.source.startswith("annotation") for call in calls.calls], np.bool_)
    result.warnings.append("no device in the file: what the host did is shown")
    tables = [_thread_rows(spans, tid, steps) for tid, spans in sorted(threads.items())]
    if is_cpu and on_gloo.any():
        tables.append(_gloo_rows(calls, steps, known.groups))
    return stacked(tables)


def _thread_rows(spans: list[_HostSpan], tid: int, steps: Steps) -> pa.Table:
    """Return the flattened spans of one thread."""
    ordered = sorted(spans, key=lambda span: (span[0], -span[1]))
    start, end = (np.array([span[i] for span in ordered], np.int64) for i in range(2))
    pieces = innermost(start, end)
    if not pieces:
        return empty()
    at = np.array([piece[1] for piece in pieces], np.int64)
    return timeline(
        {
            "rank": np.zeros(len(at), np.int32),
            "stream": [f"thread {tid}"] * len(at),
            "category": [ordered[piece[0]][3] for piece in pieces],
            "kind": ["operator"] * len(at),
            "name": [ordered[piece[0]][2][:160] for piece in pieces],
            "start_ns": at,
            "duration_ns": np.array([piece[2] for piece in pieces], np.int64) - at,
            "step": steps.at(at),
        }
    )


def _gloo_rows(calls: HostCalls, steps: Steps, groups: TraceGroups) -> pa.Table:
    """Return the collectives that gloo ran on the host."""
    lane, begin = lanes(calls.start_ns, calls.end_ns, 0, _MOST_LANES)
    kept = np.flatnonzero(lane >= 0)
    chosen = [calls.calls[i] for i in kept]
    everyone = groups.add("", "", tuple(range(groups.world_size))) if groups.world_size > 1 else None
    found = [call.group or everyone for call in chosen]
    return timeline(
        {
            "rank": np.zeros(len(kept), np.int32),
            "stream": [f"gloo {number}" if number else "gloo" for number in lane[kept].tolist()],
            "category": ["collective"] * len(kept),
            "kind": [call.kind for call in chosen],
            "name": [call.kind for call in chosen],
            "start_ns": begin[kept],
            "duration_ns": calls.end_ns[kept] - begin[kept],
            "step": steps.at(begin[kept]),
            "axis": [group.axis if group else "unknown" for group in found],
            "group": np.array([group.id if group else -1 for group in found], np.int32),
            "sequence": np.array([call.sequence for call in chosen], np.int64),
            "size_bytes": np.array([call.size_bytes for call in chosen], np.int64),
            "dtype": [call.dtype for call in chosen],
        }
    )


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Parts of pauses with one cause; ``code`` numbers ``names``, all the first if it is None."""

    start_ns: Int64Array
    end_ns: Int64Array
    kind: str
    names: Sequence[str]
    code: Int64Array | None = None

    def table(self, steps: Steps) -> pa.Table:
        """Return the rows of the timeline."""
        some = self.end_ns > self.start_ns
        start, n = self.start_ns[some], int(some.sum())
        code = np.zeros(n, np.int64) if self.code is None else self.code[some]
        one = np.zeros(n, np.int32)
        return timeline(
            {
                "rank": one,
                "stream": coded(one, ["idle"]),
                "category": coded(one, ["host"]),
                "kind": coded(one, [self.kind]),
                "name": coded(code, self.names),
                "start_ns": start,
                "duration_ns": self.end_ns[some] - start,
                "step": steps.at(start),
            }
        )


def _doing(known: Known, start: Int64Array, end: Int64Array, tid: Int64Array) -> tuple[Int64Array, list[str]]:
    """Return what the host was busy with from *start* to *end*: numbers, and the names that they number.

    A blocking runtime call that takes half of it or more; else the annotation of thread *tid* in the middle,
    or of another thread.
    """
    launches = known.launches
    threads, names = flattened(known.notes)
    offset = len(names)
    code = np.full(len(start), -1, np.int64)
    middle = (start + end) // 2
    for thread, flat in threads.items():
        own = tid == thread
        code[own] = flat.at(middle[own])
    for flat in threads.values():
        open_ = code < 0
        code[open_] = flat.at(middle[open_])
    blocking = np.array([_BLOCKING.search(name) is not None for name in launches.names], np.bool_)
    at = np.flatnonzero(blocking[launches.code]) if len(launches.names) else np.zeros(0, np.int64)
    at = at[np.argsort(launches.start_ns[at], kind="stable")]
    if len(at):
        last = at[np.maximum(np.searchsorted(launches.start_ns[at], end) - 1, 0)]
        both = np.minimum(end, launches.end_ns[last]) - np.maximum(start, launches.start_ns[last])
        code = np.where(2 * both >= end - start, offset + launches.code[last], code)
    names = [*names, *launches.names, "host"]
    return np.where(code < 0, len(names) - 1, code), names


def _span(event: Mapping[str, Any], base_ns: int) -> tuple[int, int, int] | None:
    """Return start, end (ns) and thread of a host event; None if it has no usable time."""
    if (found := timed(event)) is None:
        return None
    ts, dur, tid = found
    start_ns = base_ns + to_ns(ts)
    return start_ns, start_ns + to_ns(dur), tid
