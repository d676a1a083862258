"""What the host did: windows of steps, causes of an idle device, traces without a device."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tracer.ingest.calls import HostCalls
from tracer.ingest.events import Trace, number, text, to_ns, whole
from tracer.ingest.groups import TraceGroups
from tracer.ingest.launches import Launches
from tracer.ingest.recording import Recording, innermost, lanes
from tracer.ingest.rows import rows, stacked
from traces.columns import BoolArray, Int64Array, int64
from traces.timeline import empty

SHORTEST_GAP_NS: Final = 5_000
"""Shorter pauses are the device's own: 1 to 4 µs lie between kernels that depend on each other."""

_STEP: Final = re.compile(r"ProfilerStep#(\d{1,9})")
_BLOCKING: Final = re.compile(r"Synchronize|Memcpy|Malloc|Free|EventQuery|ModuleLoad", re.IGNORECASE)
_MOST_LANES: Final = 256


@dataclass(frozen=True, slots=True)
class Steps:
    """Windows of optimizer steps on one rank, one behind the other; times in ns, shape ``(n_steps,)``.

    Attributes:
        number: of each step.
        start_ns, end_ns: bounds; a step ends where the next begins.
        tid: thread that marked them, -1 if there are none.
        optimizer: start and end of ``Optimizer.step`` annotations, shape ``(n, 2)``.
    """

    number: Int64Array
    start_ns: Int64Array
    end_ns: Int64Array
    tid: int
    optimizer: Int64Array

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What a file holds beside its device events.

    Attributes:
        base_ns: what the file's times count from.
        notes: annotations of the host.
        calls: the host's calls of collectives.
        launches: runtime calls.
        steps: windows of the steps.
        groups: process groups; those found are added.
        result: gets evidence and counts.
    """

    base_ns: int
    notes: Sequence[Mapping[str, Any]]
    calls: HostCalls
    launches: Launches
    steps: Steps
    groups: TraceGroups
    result: Recording


@dataclass(frozen=True, slots=True)
class _Annotations:
    """What one thread was doing, innermost first: consecutive pieces; times in ns."""

    start_ns: Int64Array
    end_ns: Int64Array
    names: tuple[str, ...]

    def at(self, t_ns: int) -> str:
        """Return the innermost annotation at *t_ns*, "" if there is none."""
        index = int(np.searchsorted(self.start_ns, t_ns, side="right")) - 1
        return self.names[index] if index >= 0 and t_ns < self.end_ns[index] else ""


def steps_of(notes: Sequence[Mapping[str, Any]], base_ns: int) -> Steps:
    """Return the steps that ``ProfilerStep`` annotations of the host mark."""
    marks: dict[int, tuple[int, int, int]] = {}
    optimizer: list[tuple[int, int]] = []
    for note in notes:
        span = _span(note, base_ns)
        if span is None or note.get("cat") != "user_annotation":
            continue
        name = str(note.get("name", ""))
        if found := _STEP.fullmatch(name):
            marks.setdefault(int(found[1]), span)
        elif name.startswith("Optimizer.step#"):
            optimizer.append(span[:2])
    ordered = sorted((start, end, tid, step) for step, (start, end, tid) in marks.items())
    start = np.array([mark[0] for mark in ordered], np.int64)
    end = np.array([mark[1] for mark in ordered], np.int64)
    end[:-1] = start[1:]
    tid = ordered[0][2] if ordered else -1
    number_ = np.array([mark[3] for mark in ordered], np.int64)
    return Steps(number_, start, end, tid, np.array(sorted(optimizer), np.int64).reshape(-1, 2))


def step_rows(steps: Steps, spans: pa.Table) -> pa.Table:
    """Return the rows that mark the steps; the last one ends with the last span."""
    if not len(steps.number):
        return empty()
    end = steps.end_ns.copy()
    end[-1] = max(int(end[-1]), int((int64(spans, "start_ns") + int64(spans, "duration_ns")).max(initial=0)))
    return rows(
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


def gap_rows(device: pa.Table, launch: NDArray[np.intp], known: Known) -> pa.Table:
    """Return, for every pause in which nothing runs on the device, what it waited for.

    ``host``: what ends the pause had not been launched yet; named after what its thread was doing.
    ``launch``: from that launch to the start of the kernel. ``queued``: it had been launched before the
    pause began.

    Args:
        device: timeline of the device.
        launch: row of the runtime calls that launched each span of *device*, -1 if unknown.
        known: what the file holds beside them.
    """
    launches, steps = known.launches, known.steps
    start = int64(device, "start_ns")
    end = start + int64(device, "duration_ns")
    order = np.lexsort((end, start))
    busy_until = np.maximum.accumulate(end[order])[:-1]
    following = order[1:]
    gap = start[following] - busy_until >= SHORTEST_GAP_NS
    begin, stop, by = busy_until[gap], start[following][gap], launch[following][gap]
    doing = _Doing(launches, _annotations(known.notes, known.base_ns))
    pieces: list[tuple[int, int, str, str]] = []
    for a, b, row in zip(begin.tolist(), stop.tolist(), by.tolist(), strict=True):
        launched = int(launches.start_ns[row]) if row >= 0 else -1
        if row < 0:
            pieces.append((a, b, "unknown", "nothing launched it in the file"))
        elif launched <= a:
            pieces.append((a, b, "queued", "launched, but held back by the device"))
        else:
            late = min(launched, b)
            pieces.append((a, late, "host", doing.named(a, late, int(launches.tid[row]))))
            if b > late:
                pieces.append((late, b, "launch", "from the launch to the start"))
    if not pieces:
        return empty()
    at = np.array([piece[0] for piece in pieces], np.int64)
    return rows(
        {
            "rank": np.zeros(len(at), np.int32),
            "stream": ["idle"] * len(at),
            "category": ["host"] * len(at),
            "kind": [piece[2] for piece in pieces],
            "name": [piece[3] for piece in pieces],
            "start_ns": at,
            "duration_ns": np.array([piece[1] for piece in pieces], np.int64) - at,
            "step": steps.at(at),
        }
    )


def host_only_rows(trace: Trace, known: Known) -> pa.Table:
    """Return the timeline of a file without a device; the innermost operator or annotation owns the time."""
    calls, steps, result = known.calls, known.steps, known.result
    threads: dict[int, list[tuple[int, int, str]]] = {}
    for event in (*trace.operators, *trace.notes):
        span = _span(event, known.base_ns)
        name = text(event.get("name", ""))
        if span is None or _STEP.fullmatch(name) or name.startswith("gloo:"):
            continue
        threads.setdefault(span[2], []).append((span[0], span[1], name))
    on_gloo = np.array([call.source.startswith("annotation") for call in calls.calls], np.bool_)
    is_cpu = "gloo" in str(trace.header.get("distributedInfo") or {}) if trace.header else False
    result.warnings.append("no device in the file: what the host did is shown")
    category = "compute" if is_cpu else "host"
    tables = [_thread_rows(spans, tid, category, steps) for tid, spans in sorted(threads.items())]
    if is_cpu and on_gloo.any():
        tables.append(_gloo_rows(calls, steps, known.groups))
    return stacked(tables)


def _thread_rows(spans: list[tuple[int, int, str]], tid: int, category: str, steps: Steps) -> pa.Table:
    """Return the flattened spans of one thread."""
    ordered = sorted(spans, key=lambda span: (span[0], -span[1]))
    start, end = (np.array([span[i] for span in ordered], np.int64) for i in range(2))
    pieces = innermost(start, end)
    if not pieces:
        return empty()
    at = np.array([piece[1] for piece in pieces], np.int64)
    return rows(
        {
            "rank": np.zeros(len(at), np.int32),
            "stream": [f"thread {tid}"] * len(at),
            "category": [category] * len(at),
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
    return rows(
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


class _Doing:
    """Says what a thread of the host was busy with: a blocking runtime call, else its annotation."""

    def __init__(self, launches: Launches, annotations: Mapping[int, _Annotations]) -> None:
        blocking = np.array([_BLOCKING.search(str(name)) is not None for name in launches.name], np.bool_)
        rows_ = np.flatnonzero(blocking) if len(launches.name) else np.zeros(0, np.intp)
        rows_ = rows_[np.argsort(launches.start_ns[rows_], kind="stable")]
        self._start, self._end = launches.start_ns[rows_], launches.end_ns[rows_]
        self._name = launches.name[rows_]
        self._annotations = annotations

    def named(self, start_ns: int, end_ns: int, tid: int) -> str:
        """Return what the host did from *start_ns* to *end_ns*, on thread *tid* before others."""
        at = int(np.searchsorted(self._start, end_ns)) - 1
        if at >= 0:
            shared = min(end_ns, int(self._end[at])) - max(start_ns, int(self._start[at]))
            if 2 * shared >= end_ns - start_ns:
                return str(self._name[at])
        middle = (start_ns + end_ns) // 2
        if tid in self._annotations and (name := self._annotations[tid].at(middle)):
            return name
        return next((name for thread in self._annotations.values() if (name := thread.at(middle))), "host")


def _annotations(notes: Sequence[Mapping[str, Any]], base_ns: int) -> dict[int, _Annotations]:
    """Return the annotations of each thread, flattened; steps and single collectives are left out."""
    threads: dict[int, list[tuple[int, int, str]]] = {}
    for note in notes:
        span = _span(note, base_ns)
        name = text(note.get("name", ""))
        if span is None or note.get("cat") != "user_annotation" or _STEP.fullmatch(name):
            continue
        threads.setdefault(span[2], []).append((span[0], span[1], name))
    found = {}
    for tid, spans in threads.items():
        spans.sort(key=lambda span: (span[0], -span[1]))
        start, end = (np.array([span[i] for span in spans], np.int64) for i in range(2))
        pieces = innermost(start, end)
        found[tid] = _Annotations(
            np.array([piece[1] for piece in pieces], np.int64),
            np.array([piece[2] for piece in pieces], np.int64),
            tuple(spans[piece[0]][2][:160] for piece in pieces),
        )
    return found


def _span(event: Mapping[str, Any], base_ns: int) -> tuple[int, int, int] | None:
    """Return start, end (ns) and thread of a host event; None if it has no usable time."""
    ts, dur, tid = number(event.get("ts")), number(event.get("dur")), whole(event.get("tid"))
    if ts is None or dur is None or tid is None or dur < 0 or abs(ts) > 4e15 or dur > 4e15:
        return None
    start_ns = base_ns + to_ns(ts)
    return start_ns, start_ns + to_ns(dur), tid
