"""What the host did: steps, on its clock and on the device's, launches, and traces without a device."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from foretrace.tracer.ingest.chrome import Trace
from foretrace.tracer.ingest.events import LEAST_FRAME_US, LONGEST_US, all_to_ns, text, timed_ns, whole
from foretrace.tracer.ingest.groups import TraceGroups
from foretrace.tracer.ingest.notes import AS, STEP, HostCalls, Notes
from foretrace.tracer.ingest.recording import Recording, innermost, stacked, step_table
from foretrace.tracer.kernels import N_STEPS
from foretrace.traces.columns import BoolArray, Int64Array, labels, lanes
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
    marked_by: str = ""  # annotations that mark them
    is_open: bool = True  # whether what comes after the last belongs to it

    def place(self, t_ns: Int64Array) -> Int64Array:
        """Return which step each moment lies in, counted from 0: -1 before the first, their number behind."""
        index = np.searchsorted(self.start_ns, t_ns, side="right") - 1
        if not self.is_open and len(self.number):
            index = np.where(t_ns >= self.end_ns[-1], len(self.number), index)
        return index.astype(np.int64)

    def numbers(self, place: Int64Array) -> NDArray[np.int32]:
        """Return the numbers of steps from their places, -1 outside."""
        n = len(self.number)
        inside = (place >= 0) & (place < n)
        return np.where(inside, np.append(self.number, -1)[np.where(inside, place, n)], -1).astype(np.int32)

    def at(self, t_ns: Int64Array) -> NDArray[np.int32]:
        """Return the number of the step in which each moment lies, -1 outside."""
        return self.numbers(self.place(t_ns))

    def until(self, t_ns: int) -> Steps:
        """Return them with a last one that ends at *t_ns* or later, if what comes after it belongs to it."""
        if not len(self.number) or not self.is_open:
            return self
        return replace(self, end_ns=np.append(self.end_ns[:-1], max(int(self.end_ns[-1]), t_ns)))

    def in_optimizer(self, t_ns: Int64Array) -> BoolArray:
        """Return which moments lie in an ``Optimizer.step`` annotation."""
        if not len(self.optimizer):
            return np.zeros(len(t_ns), np.bool_)
        index = np.searchsorted(self.optimizer[:, 0], t_ns, side="right") - 1
        inside: BoolArray = (index >= 0) & (t_ns <= self.optimizer[index, 1])
        return inside


def steps_of(notes: Notes, header: Mapping[str, Any], launches: Launches) -> Steps:
    """Return the steps that annotations of the host mark, in a file with that *header*.

    ``ProfilerStep`` annotations, else those of the optimizer, which ends a step. Optimizers between which
    nothing is launched end one step together.
    """
    marks: dict[int, int] = {}
    optimizer: list[int] = []
    for row, note in enumerate(notes.notes):
        if note.name.startswith("ProfilerStep#"):
            if found := STEP.fullmatch(note.name):
                marks.setdefault(int(found[1]), row)
        elif note.name.startswith("Optimizer.step#"):
            optimizer.append(row)
    within = np.stack([notes.start_ns[optimizer], notes.end_ns[optimizer]], axis=1)
    within = within[np.argsort(within[:, 0], kind="stable")]
    if not marks and len(within):
        return _ended_by(within, int(notes.tid[optimizer[0]]), launches)
    rows_ = np.array(list(marks.values()), np.int64)
    number = np.array(list(marks), np.int64)
    order = np.argsort(notes.start_ns[rows_], kind="stable")
    rows_, number = rows_[order], number[order]
    start, end = notes.start_ns[rows_], notes.end_ns[rows_].copy()
    end[:-1] = start[1:]
    tid = int(notes.tid[rows_[0]]) if len(rows_) else -1
    called = sorted({str(notes.notes[row].said.get(AS, "")) for row in marks.values()} - {""})
    marked_by = "ProfilerStep annotations" if marks else ""
    if called:
        marked_by = f"annotations named after steps, as {called[0]!r}"
    return Steps(number, start, end, tid, within, whole(header.get(N_STEPS)), marked_by)


def _ended_by(optimizer: Int64Array, tid: int, launches: Launches) -> Steps:
    """Return the steps that end with *optimizer*, starts and ends of annotations; the first launch begins."""
    at = np.sort(launches.start_ns[launches.named("launch")])
    place = np.searchsorted(at, optimizer)
    last = np.append(place[1:, 0] > place[:-1, 1], True)
    end = optimizer[last, 1]
    first = min(int(at[0]) if len(at) else int(optimizer[0, 0]), int(optimizer[0, 0]))
    start = np.append(first, end[:-1])
    number = np.arange(len(end), dtype=np.int64)
    marked_by = "Optimizer.step annotations, with which a step ends"
    return Steps(number, start, end, tid, optimizer, marked_by=marked_by, is_open=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDevice:
    """What runs on a device, sorted by stream and start; times in ns, arrays of shape ``(n_rows,)``."""

    start_ns: Int64Array
    end_ns: Int64Array
    stream: Int64Array  # number of the stream
    computes: BoolArray  # whether it is a compute kernel
    is_pageable: BoolArray  # whether it copies host memory that is not pinned
    launch: NDArray[np.intp]  # row of the call that launched it, -1 if unknown


BLOCKING: Final = r"Synchronize|Memcpy|Malloc|Free|EventQuery|ModuleLoad"
"""Names of calls of the runtime in which a host may wait."""

LEAST_LAUNCHED: Final = 0.5
"""Share of what runs on a device whose launches are known, below which they tell no steps: a convention."""


def steps_on_device(
    steps: Steps, rows: OnDevice, launches: Launches, device_notes: Notes
) -> tuple[NDArray[np.int32], Steps]:
    """Return the step of each row, and the steps on the device's clock.

    A row belongs to the step in which it was launched; without a launch, to that of the device's own
    annotation of a step, else to that of the row before it on its stream. A host may run steps ahead of its
    device: there a step begins when the stream that computes most is done with the steps before.
    """
    n, launched = len(steps.number), rows.launch >= 0
    latest = int(rows.end_ns.max(initial=0))
    if not n or launched.mean() < LEAST_LAUNCHED:
        return steps.at(rows.start_ns), steps.until(latest)
    place, known = np.full(len(launched), n, np.int64), launched.copy()
    place[launched] = steps.place(launches.start_ns[rows.launch[launched]])
    if any(STEP.fullmatch(note.name) for note in device_notes.notes):
        annotated = _annotated(steps, rows.start_ns, device_notes)
        told = ~known & (annotated >= 0)
        place[told], known = annotated[told], known | told
    # Rows are sorted by stream: where the last known row before is of another stream, it tells nothing.
    previous = np.maximum.accumulate(np.where(known, np.arange(len(known)), -1))
    follows = (previous >= 0) & (rows.stream[previous] == rows.stream)
    has_known = np.isin(rows.stream, np.unique(rows.stream[known]))
    place = np.where(known, place, np.where(follows, place[previous], -1))
    # Time in which a stream computes counts; any other time only decides where none computes.
    busy = np.bincount(rows.stream, (rows.end_ns - rows.start_ns) * (rows.computes + 1e-9))
    ends = np.full(n + 2, np.iinfo(np.int64).min)
    main = has_known & (rows.stream == busy.argmax())
    # Behind each step the end of what ran in it, so that the next begins no earlier.
    np.maximum.at(ends, place[main] + 1, rows.end_ns[main])
    # a lone step is the window in which it was recorded: what ran before it need not have been a step
    start = np.maximum(steps.start_ns, np.maximum.accumulate(ends)[:n]) if n > 1 else steps.start_ns
    inside = has_known & (place >= 0) & (place < n)
    last = max(int(steps.end_ns[-1]), int(rows.end_ns[inside].max(initial=0)))
    found = replace(steps, start_ns=start, end_ns=np.append(start[1:], last))
    # Streams of which no step is known go by time.
    place = np.where(has_known, place, found.place(rows.start_ns))
    return found.numbers(place), found


def launch_figures(rows: OnDevice, launches: Launches) -> dict[str, Any]:
    """Return how the host launches: how many calls, how long each takes, and how many wait to be started."""
    launched = np.flatnonzero(rows.launch >= 0)
    if not len(launched):
        return {}
    call, first = np.unique(rows.launch[launched], return_index=True)
    began, starts = launches.start_ns[rows.launch[launched]], rows.start_ns[launched]
    delay = np.maximum(starts - began, 0)
    # A launch puts something into the queue, its start takes it out.
    moment = np.concatenate([began, np.maximum(starts, began)])
    order = np.argsort(moment, kind="stable")
    queued = np.cumsum(np.repeat([1, -1], len(launched))[order])
    lasts = np.diff(moment[order], append=moment[order][-1:])
    total = int(lasts.sum())
    return {
        "n_launches": len(call),
        "n_kernels": len(launched),
        "mean_call_s": float((launches.end_ns - launches.start_ns)[call].mean()) / 1e9,
        "median_delay_s": float(np.median(delay[first])) / 1e9,
        "mean_queue": float((queued * lasts).sum() / total) if total else 0.0,
        "longest_queue": int(queued.max()),
        "empty_share": float(lasts[queued == 0].sum() / total) if total else 0.0,
    }


def _annotated(steps: Steps, t_ns: Int64Array, notes: Notes) -> Int64Array:
    """Return the place of the step whose annotation on the device each moment lies in, -1 outside."""
    found = np.full(len(t_ns), -1, np.int64)
    for place, number in enumerate(steps.number.tolist()):
        own = np.flatnonzero([note.name == f"ProfilerStep#{number}" for note in notes.notes])
        if len(own):
            inside = (t_ns >= notes.start_ns[own].min()) & (t_ns <= notes.end_ns[own].max())
            found[inside & (found < 0)] = place
    return found


def step_rows(steps: Steps) -> pa.Table:
    """Return the rows that mark the steps that have ended."""
    ended = np.ones(len(steps.number), np.bool_) if steps.n_steps is None else steps.number < steps.n_steps
    number, start = steps.number[ended], steps.start_ns[ended]
    if not len(number):
        return empty()
    return step_table(np.zeros(len(number), np.int32), number, start, steps.end_ns[ended] - start)


@dataclass(frozen=True, slots=True)
class Launches:
    """Runtime calls, sorted by correlation number; times in ns, arrays of shape ``(n_calls,)``."""

    correlation: Int64Array  # number that kernel and launch share
    tid: Int64Array  # thread of the call
    start_ns: Int64Array  # when it began
    end_ns: Int64Array  # when it returned
    code: Int64Array  # index of its name in ``names``
    names: list[str]  # names of runtime functions

    def named(self, pattern: str) -> BoolArray:
        """Return which calls have names in which *pattern*, a regular expression in any case, is found."""
        found = np.array(
            [re.search(pattern, name, re.IGNORECASE) is not None for name in self.names], np.bool_
        )
        return found[self.code] if self.names else np.zeros(0, np.bool_)

    def holding(self) -> NDArray[np.intp]:
        """Return the rows of calls that hold the host up: those that may wait, and all that take long."""
        takes = self.end_ns - self.start_ns
        return np.flatnonzero((self.named(BLOCKING) & (takes > 0)) | (takes >= LEAST_FRAME_US * 1000))

    def find(self, correlation: Int64Array) -> NDArray[np.intp]:
        """Return the row of the call with each correlation number, -1 where there is none."""
        if not len(self.correlation):
            return np.full(len(correlation), -1, np.intp)
        at = np.searchsorted(self.correlation, correlation)
        at[at == len(self.correlation)] = 0
        # Number 0 stands for none.
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


_MOST_LANES: Final = 256

WAITS: Final = frozenset({"_c10d_functional::wait_tensor", "c10d_functional::wait_tensor"})
"""Operators in which a host does nothing but wait for a communication."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What a file holds beside its device events."""

    base_ns: int  # what the file's times count from
    notes: Notes  # annotations of the host
    device_notes: Notes  # annotations of the device, and where its streams wait
    frames: Notes  # operators and Python functions that last long
    calls: HostCalls  # the host's calls of collectives
    launches: Launches  # runtime calls
    steps: Steps  # windows of the steps, on the host's clock until the device's are known
    groups: TraceGroups  # process groups; those found are added
    result: Recording  # gets evidence and counts


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
        if (span := timed_ns(event, known.base_ns)) is not None:
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
