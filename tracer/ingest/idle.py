"""Why a device was idle: every pause, divided by what its host did and what the device waited for.

The kind of a span of stream ``idle`` is the cause, its name what the host was doing; causes are in
``traces/analysis/causes.toml``. Pauses below ``SHORTEST_NS`` are the device's own and have no span.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from foretrace.tracer.ingest.events import CALL_NAMES, LEAST_FRAME_US, whole
from foretrace.tracer.ingest.host import Known, OnDevice
from foretrace.tracer.ingest.notes import STEP, Flat, flattened
from foretrace.tracer.ingest.recording import coded, stacked
from foretrace.traces.analysis.gaps import HELD_BACK, ON_ITS_WAY, UNNAMED
from foretrace.traces.columns import Int64Array, factorized
from foretrace.traces.timeline import empty, timeline

SHORTEST_NS: Final = 5_000
"""Shorter pauses are the device's own: 1 to 4 µs lie between kernels that depend on each other."""

LATENCY_NS: Final = 20_000
"""What a kernel takes at most to start on an idle device: 3 to 10 µs in traces of an A100 and an H100."""

LEAST_PART: Final = 0.01
"""Shorter parts of a step have no operator or function of their own named: what they are part of is."""

_LOADING: Final = re.compile(
    r"data_?load|load_batch|wait_for_batch|next_batch|fetch_batch|torch/utils/data/", re.IGNORECASE
)
_FUNCTION: Final = re.compile(r"\.py\(\d+\): |^nn\.Module: |^<built-in ")
_LONGEST_NAME: Final = 160


def idle_rows(rows: OnDevice, streams: Sequence[str], known: Known) -> pa.Table:
    """Return spans of stream ``idle``: all pauses of ``SHORTEST_NS`` or more; steps on the device's clock."""
    begin, stop, following, order = _pauses(rows, known)
    if not len(begin):
        return empty()
    launches, steps = known.launches, known.steps
    by = np.append(rows.launch[order], -2)[following]  # -2: nothing follows
    inside = np.maximum(by, 0)
    is_known = by >= 0
    start_ns, end_ns, tids = (
        np.append(values, 0)[inside] if len(values) else np.zeros(len(by), np.int64)
        for values in (launches.start_ns, launches.end_ns, launches.tid)
    )
    # A call that takes long is taken to launch at its end: until then the host is in it.
    takes_long = end_ns - start_ns >= LEAST_FRAME_US * 1000
    late = np.clip(np.where(takes_long, end_ns, start_ns), begin, stop)
    late = np.where(is_known, late, stop)
    # What nothing launched is told by the thread that launches most.
    own = _most_common(launches.tid[rows.launch[rows.launch >= 0]]) if is_known.any() else steps.tid
    doing = _Doing(known, rows)
    pieces = [
        _by_host(
            doing, begin, late, np.where(is_known, tids, own), _causes(by, begin, following, rows, known)
        )
    ]
    soon = np.clip(np.maximum(late, end_ns + LATENCY_NS), late, stop)
    # What the call that launched the row before has launched as well, before the pause, is of one graph.
    before = np.append(-1, rows.launch[order])[following]
    in_graph = is_known & (by == before) & (late == begin)
    soon = np.where(in_graph, late, soon)
    pieces.append(_Pieces.of(late, soon, "launch", ON_ITS_WAY))
    held = np.where(is_known, stop, soon)
    called = np.array([*launches.names, ""])[np.append(launches.code, len(launches.names))[inside]]
    pieces.append(
        _Pieces.of(soon[in_graph], held[in_graph], "graph", [f"in {name}" for name in called[in_graph]])
    )
    # What is left of a pause: something is launched, and held back.
    rest = ~in_graph & (held > soon)
    row = np.append(order, -1)[following[rest]]
    earlier = np.maximum(row - 1, 0)
    follows = (row > 0) & (rows.stream[earlier] == rows.stream[row]) & (rows.launch[earlier] >= 0)
    since = np.append(launches.start_ns, 0)[rows.launch[earlier]]
    since = np.where(follows, since, np.iinfo(np.int64).min)
    waited = _waited(rows.stream[row], since, start_ns[rest], streams, known)
    pieces.append(
        _Pieces.of(
            soon[rest], held[rest], ["event" if name else "queued" for name in waited],
            [name or HELD_BACK for name in waited],
        )
    )  # fmt: skip
    return stacked([piece.table(known) for piece in pieces])


class _Pieces(NamedTuple):
    """Parts of pauses, each with its cause and what the host was doing."""

    start_ns: Int64Array
    end_ns: Int64Array
    kind: Sequence[str]
    name: Sequence[str]

    @classmethod
    def of(
        cls, start_ns: Int64Array, end_ns: Int64Array, kind: str | Sequence[str], name: str | Sequence[str]
    ) -> _Pieces:
        """Return pieces; one kind or name stands for all."""
        n = len(start_ns)
        return cls(
            start_ns,
            end_ns,
            [kind] * n if isinstance(kind, str) else kind,
            [name] * n if isinstance(name, str) else name,
        )

    def table(self, known: Known) -> pa.Table:
        """Return those with a length as rows of the timeline."""
        some = np.flatnonzero(self.end_ns > self.start_ns)
        start, one = self.start_ns[some], np.zeros(len(some), np.int32)
        return timeline(
            {
                "rank": one,
                "stream": coded(one, ["idle"]),
                "category": coded(one, ["host"]),
                "kind": [self.kind[i] for i in some.tolist()],
                "name": [self.name[i] for i in some.tolist()],
                "start_ns": start,
                "duration_ns": self.end_ns[some] - start,
                "step": known.steps.at(start),
            }
        )


def _pauses(rows: OnDevice, known: Known) -> tuple[Int64Array, Int64Array, Int64Array, NDArray[np.intp]]:
    """Return start and end of each pause, which row in order of time ends it, and that order.

    Pauses are those of all steps, or of the file if it has none; none lies in two steps.
    """
    order = np.lexsort((rows.end_ns, rows.start_ns))
    # Ends of all streams so far: a pause is where none of them runs.
    start, until = rows.start_ns[order], np.maximum.accumulate(rows.end_ns[order])
    steps = known.steps
    edges = np.append(steps.start_ns, steps.end_ns[-1:]) if len(steps.number) else until[:0]
    first, last = (edges[0], edges[-1]) if len(edges) else (start[0], until[-1])
    begin = np.maximum(np.append(first, until), first)
    stop = np.minimum(np.append(start, last), last)
    following = np.flatnonzero(stop - begin >= SHORTEST_NS)
    index, begin, stop = _cut(begin[following], stop[following], edges)
    return begin, stop, following[index], order


def _cut(
    start: Int64Array, stop: Int64Array, point: Int64Array
) -> tuple[NDArray[np.intp], Int64Array, Int64Array]:
    """Cut intervals at ascending points; return of each piece its interval, start and end.

    >>> [part.tolist() for part in _cut(np.array([0, 10]), np.array([10, 12]), np.array([3, 7, 12]))]
    [[0, 0, 0, 1], [0, 3, 7, 10], [3, 7, 10, 12]]
    """
    first, last = np.searchsorted(point, start, side="right"), np.searchsorted(point, stop, side="left")
    n = np.maximum(last - first, 0) + 1
    index = np.repeat(np.arange(len(start)), n)
    nth = np.arange(len(index)) - np.repeat(np.cumsum(n) - n, n)
    at = np.append(point, 0)[np.minimum(first[index] + nth, len(point))]
    begun = np.append(point, 0)[np.maximum(first[index] + nth - 1, 0)]
    return index, np.where(nth == 0, start[index], begun), np.where(nth == n[index] - 1, stop[index], at)


def _causes(
    by: NDArray[np.intp], begin: Int64Array, following: NDArray[np.intp], rows: OnDevice, known: Known
) -> list[str]:
    """Return the cause of each pause as far as nothing is launched yet, whatever the host does."""
    n, steps = len(rows.start_ns), known.steps
    is_first = np.isin(begin, steps.start_ns)
    # what follows may be of a later step: then this one has run
    place = steps.place(begin)
    starts = np.sort(rows.start_ns)
    ends = steps.end_ns[np.clip(place, 0, None)] if len(steps.number) else begin
    is_last = (following == n) | (len(steps.number) > 0) & (np.append(starts, ends.max())[following] >= ends)
    told = np.select([by == -1, is_first, is_last], ["unknown", "before", "after"], "host")
    return [str(cause) for cause in told.tolist()]


def _most_common(values: Int64Array) -> int:
    found, count = np.unique(values, return_counts=True)
    return int(found[count.argmax()])


class _Doing:
    """What threads of the host were doing at every moment, the innermost thing that is worth a name."""

    def __init__(self, known: Known, rows: OnDevice) -> None:
        launches, notes, frames = known.launches, known.notes, known.frames
        steps = known.steps
        window = np.median(steps.end_ns - steps.start_ns) if len(steps.number) else np.ptp(rows.start_ns)
        calls = launches.holding()
        pageable = np.zeros(len(launches.tid) + 1, np.bool_)
        pageable[rows.launch[rows.is_pageable]] = True
        names: dict[str, int] = {}

        def code_of(said: Sequence[str]) -> Int64Array:
            return np.array([names.setdefault(name, len(names)) for name in said], np.int64)

        told = np.flatnonzero(
            [STEP.fullmatch(note.name) is None and note.name not in CALL_NAMES for note in notes.notes]
        )
        long = np.flatnonzero(frames.end_ns - frames.start_ns >= LEAST_PART * window)
        said = [launches.names[launches.code[i]] for i in calls]
        self.blocks = set(code_of(said).tolist())
        said = [
            f"{name} of pageable memory" if pageable[i] else name for i, name in zip(calls, said, strict=True)
        ]
        self.copies = set(code_of(said).tolist()) - self.blocks
        by_call, by_note = code_of(said), code_of([notes.notes[i].name for i in told])
        by_frame = code_of([frames.notes[i].name for i in long])
        parts = (launches, calls, by_call), (notes, told, by_note), (frames, long, by_frame)
        columns = [
            np.concatenate([getattr(of, name)[rows_] for of, rows_, _ in parts])
            for name in ("start_ns", "end_ns", "tid")
        ]
        start, end, tid = columns
        codes = np.concatenate([code for _, _, code in parts])
        self.innermost = flattened(start, end, tid, codes)
        functions = np.array([_FUNCTION.search(name) is not None for name in names], np.bool_)
        is_note = np.repeat([False, True, False], [len(calls), len(told), len(long)])
        self.notes = flattened(start[is_note], end[is_note], tid[is_note], codes[is_note])
        is_function = functions[codes] if names else is_note
        self.functions = flattened(start[is_function], end[is_function], tid[is_function], codes[is_function])
        self.names = list(names)
        self.captures = _captures(known)

    def label(self, code: int, note: int, function: int) -> str:
        """Return what the host does: the innermost thing, and the annotation or function that it is in."""
        around = next((self.names[one] for one in (note, function) if one >= 0 and one != code), "")
        if code < 0:
            return around or UNNAMED
        return f"{self.names[code][:80]} in {around}"[:_LONGEST_NAME] if around else self.names[code]

    def cause(self, code: int, label: str, otherwise: str, *, captures: bool) -> str:
        """Return the cause of a pause in which the host does that."""
        if otherwise == "unknown":
            return otherwise
        if captures:
            return "capture"
        if _LOADING.search(label):
            return "loading"
        if code in self.copies:
            return "pageable"
        return "blocked" if code in self.blocks else otherwise


def _captures(known: Known) -> dict[int, Flat]:
    """Return by thread when it captured graphs: from the call that begins it to the one that ends it."""
    launches = known.launches
    begins, ends = (launches.named(f"Stream{word}Capture") for word in ("Begin", "End"))
    found = {}
    for thread in np.unique(launches.tid[begins]).tolist():
        own = launches.tid == thread
        start = np.sort(launches.start_ns[own & begins])
        stop = np.append(np.sort(launches.end_ns[own & ends]), np.iinfo(np.int64).max)
        # One that was not ended within the file goes on.
        end = np.minimum(stop[np.searchsorted(stop, start)], np.append(start[1:], stop[-1]))
        found[int(thread)] = Flat(start, end, np.zeros(len(start), np.int64))
    return found


def _found(flats: Mapping[int, Flat], t_ns: Int64Array, tid: Int64Array, *, others: bool) -> Int64Array:
    """Return the code at each moment on its thread, else on any of the *others*; -1 where there is none."""
    code = np.full(len(t_ns), -1, np.int64)
    for thread, flat in flats.items():
        own = tid == thread
        code[own] = flat.at(t_ns[own])
    if others:
        for flat in flats.values():
            open_ = code < 0
            code[open_] = flat.at(t_ns[open_])
    return code


def _by_host(
    doing: _Doing, begin: Int64Array, until: Int64Array, tid: Int64Array, causes: Sequence[str]
) -> _Pieces:
    """Return the parts of pauses in which nothing is launched, by what threads *tid* do."""
    some = np.flatnonzero(until > begin)
    parts: list[tuple[Int64Array, ...]] = []
    for thread in np.unique(tid[some]).tolist():
        own = some[tid[some] == thread]
        flats = [of[thread] for of in (doing.innermost, doing.captures) if thread in of]
        edges = np.unique(
            np.concatenate([begin[:0], *(e for flat in flats for e in (flat.start_ns, flat.end_ns))])
        )
        index, start, end = _cut(begin[own], until[own], edges)
        parts.append((own[index], start, end))
    if not parts:
        return _Pieces.of(begin[:0], begin[:0], "", "")
    index, start, end = (np.concatenate(column) for column in zip(*parts, strict=True))
    # Pieces are cut wherever something begins or ends: what is in their middle is there all along.
    middle, thread = (start + end) // 2, tid[index]
    code = _found(doing.innermost, middle, thread, others=False)
    note = _found(doing.notes, middle, thread, others=True)
    function = _found(doing.functions, middle, thread, others=False)
    captures = _found(doing.captures, middle, thread, others=False) >= 0
    # Combinations are few, and put into words once each.
    key = factorized(code, note, function)
    _, first = np.unique(key, return_index=True)
    labels = [doing.label(int(code[i]), int(note[i]), int(function[i])) for i in first]
    numbers = {label: i for i, label in enumerate(dict.fromkeys(labels))}
    same = np.array([numbers[label] for label in labels], np.int64)[key]
    joins = (np.diff(index) == 0) & (np.diff(same) == 0) & (start[1:] == end[:-1])
    joins &= captures[1:] == captures[:-1]
    heads = np.flatnonzero(np.append(True, ~joins))
    tails = np.append(heads[1:], len(index)) - 1
    said = [labels[k] for k in key[heads].tolist()]
    kinds = [
        doing.cause(int(code[i]), label, causes[index[i]], captures=bool(captures[i]))
        for i, label in zip(heads, said, strict=True)
    ]
    return _Pieces.of(start[heads], end[tails], kinds, said)


def _waited(
    stream: Int64Array, since: Int64Array, launched: Int64Array, streams: Sequence[str], known: Known
) -> list[str]:
    """Return which event held back what was launched at a moment on a stream; "" where the file tells none.

    A stream was told to wait for it between the launch before, at *since*, and this one. The file says when
    it was told, which is on the host's clock, not when it waited.
    """
    by_stream: dict[int, list[tuple[int, int]]] = {}
    notes = known.device_notes
    for note, end_ns in zip(notes.notes, notes.end_ns.tolist(), strict=True):
        number = whole(note.said.get("stream"))
        if note.name == "Stream Wait Event" and number is not None:
            by_stream.setdefault(number, []).append((end_ns, whole(note.said.get("wait_on_stream")) or 0))
    found = []
    names = [streams[i] for i in stream.tolist()]
    for name, begin, at in zip(names, since.tolist(), launched.tolist(), strict=True):
        number = whole(name.rpartition(" ")[2])
        told = [one for one in by_stream.get(-1 if number is None else number, ()) if begin <= one[0] <= at]
        found.append(f"{name} waits for an event of stream {max(told)[1]}" if told else "")
    return found
