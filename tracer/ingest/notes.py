"""Annotations of the host: what a person, torch or a library has named."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretrace.tracer.ingest.events import (
    CALL_NAME,
    CALL_NAMES,
    SIZED_CALLS,
    all_to_ns,
    arguments,
    array_bytes,
    elements,
    text,
    timed,
    whole,
)
from foretrace.tracer.ingest.groups import TraceGroups
from foretrace.tracer.ingest.kernels import UNKNOWN, collective_kind, dtype, first_dtype
from foretrace.tracer.ingest.recording import innermost
from foretrace.traces.columns import BoolArray, Int64Array
from foretrace.traces.layout import Group

STEP: Final = re.compile(r"ProfilerStep#(\d{1,9})")
"""Annotation that torch.profiler makes for each step."""

AS: Final = "as"
"""Key of what a file calls the annotation that a note stands for, where that has another name."""

COLLECTIVE: Final = ("nccl:", "gloo:", "rccl:", "mpi:", "ucc:", "xccl:")
"""How annotations of collectives begin."""

ON_HOST: Final = "call on the host"

_LONGEST_NAME: Final = 160


class Note(NamedTuple):
    """One annotation, or one call of a collective; times in µs. ``said`` is empty where it tells nothing."""

    ts: float
    dur: float
    tid: int
    on_host: bool
    name: str
    said: Mapping[str, Any]


def note_of(event: Mapping[str, Any]) -> Note | None:
    """Return the annotation that *event* is; None without a usable time, or if it tells nothing."""
    if (found := timed(event)) is None:
        return None
    # Most names come again and again: one text serves all of them.
    name = sys.intern(text(event.get("name", ""))[:_LONGEST_NAME])
    tells = name in CALL_NAMES or name.startswith(COLLECTIVE) or event.get("cat") == "cuda_sync"
    said = arguments(event) if tells else {}
    if name == CALL_NAME and "Collective name" not in said:
        return None
    return Note(*found, event.get("cat") not in {"gpu_user_annotation", "cuda_sync"}, name, said)


@dataclass(frozen=True, slots=True)
class Notes:
    """Annotations of the host, or of the device, as columns, in the order of the file; times in ns."""

    start_ns: Int64Array  # shape ``(n_notes,)``, as of all
    end_ns: Int64Array
    tid: Int64Array
    notes: tuple[Note, ...]  # the annotations themselves

    @classmethod
    def of(cls, notes: Sequence[Note], base_ns: int, *, on_host: bool = True) -> Notes:
        """Return those of *notes* that are of the host, or of the device; times count from *base_ns*."""
        own = tuple(note for note in notes if note.on_host == on_host)
        start = base_ns + all_to_ns(np.array([note.ts for note in own], np.float64))
        duration = all_to_ns(np.array([note.dur for note in own], np.float64))
        return cls(start, start + duration, np.array([note.tid for note in own], np.int64), own)


@dataclass(frozen=True, slots=True)
class Flat:
    """What one thread was doing: consecutive pieces of time, each with its innermost annotation; in ns."""

    start_ns: Int64Array
    end_ns: Int64Array
    code: NDArray[np.int64]

    def at(self, t_ns: Int64Array) -> NDArray[np.int64]:
        """Return the number of the name at each moment, -1 where there is none."""
        index = np.searchsorted(self.start_ns, t_ns, side="right") - 1
        inside: BoolArray = (index >= 0) & (t_ns < self.end_ns[index])
        return np.where(inside, self.code[index], -1)


def flattened(start_ns: Int64Array, end_ns: Int64Array, tid: Int64Array, code: Int64Array) -> dict[int, Flat]:
    """Return by thread which of nested spans, numbered by *code*, was the innermost at every moment."""
    found = {}
    for thread in np.unique(tid).tolist():
        rows = np.flatnonzero(tid == thread)
        rows = rows[np.lexsort((-end_ns[rows], start_ns[rows]))]
        pieces = innermost(start_ns[rows], end_ns[rows])
        if pieces:
            index, start, end = (np.array(column, np.int64) for column in zip(*pieces, strict=True))
            found[int(thread)] = Flat(start, end, code[rows][index])
    return found


# What the collectives of a Kineto trace are. From torch 2.4 on, each NCCL kernel carries it. Before, the
# host's call does (``record_param_comms``, from torch 2.3), or an annotation ``nccl:<op>`` has at least the
# shape of the input. Kernel and call are brought together by the launch: the runtime call with the kernel's
# correlation number lies within the call on the same thread.

_INTERNAL: Final = frozenset({"wait", "init", "startcoalescing", "endcoalescing", "groupstart", "groupend"})
"""Names in ``record_param_comms`` that are no communication."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What is known about one collective or transfer; "" , 0 and -1 mean unknown."""

    kind: str = UNKNOWN
    dtype: str = ""
    size_bytes: int = 0
    group: Group | None = None
    sequence: int = -1
    peer: int = -1
    source: str = ""


@dataclass(frozen=True, slots=True)
class HostCalls:
    """The host's calls of collectives on all threads, sorted by start; times in ns."""

    tid: Int64Array
    start_ns: Int64Array
    end_ns: Int64Array
    calls: tuple[Call, ...]

    def around(self, tid: Int64Array, t_ns: Int64Array) -> list[Call | None]:
        """Return for each moment on a thread what the calls around it say, None if there are none."""
        found: list[Call | None] = [None] * len(tid)
        for thread in np.unique(tid).tolist():
            own = np.flatnonzero(self.tid == thread)
            asked = np.flatnonzero(tid == thread)
            last = np.searchsorted(self.start_ns[own], t_ns[asked], side="right") - 1
            for i, at in zip(asked.tolist(), last.tolist(), strict=True):
                # Calls of one collective nest: the one with most to say may be around the one that has begun
                # last.
                inside = [own[k] for k in range(max(at - 3, 0), at + 1) if t_ns[i] <= self.end_ns[own[k]]]
                if inside:
                    found[i] = _united([self.calls[k] for k in inside])
        return found


def from_arguments(said: Mapping[str, Any], groups: TraceGroups, source: str) -> Call | None:
    """Return the call that metadata *said* describes; None if it describes none."""
    name = said.get("Collective name")
    if not isinstance(name, str) or name.lower().replace("_", "") in _INTERNAL:
        return None
    label, width = dtype(str(said.get("dtype", "")))
    largest = max(whole(said.get("In msg nelems")) or 0, whole(said.get("Out msg nelems")) or 0, 0)
    kind = collective_kind(name)
    peer = said.get("Dst Rank") if kind == "send" else said.get("Src Rank") if kind == "recv" else None
    peer_rank, order = whole(peer), whole(said.get("Seq"))
    return Call(
        kind=kind,
        dtype=label,
        size_bytes=array_bytes(largest, width),
        group=groups.of(said),
        sequence=order if order is not None and order >= 0 else -1,
        peer=peer_rank if peer_rank is not None and peer_rank >= 0 else -1,
        source=source,
    )


def host_calls(notes: Notes, groups: TraceGroups) -> HostCalls:
    """Return what the host's calls and annotations say about collectives."""
    rows: list[int] = []
    calls: list[Call] = []
    # From torch 2.3 on calls say more than the sizes of operators around them.
    is_told = any(note.name == CALL_NAME for note in notes.notes)
    for row, note in enumerate(notes.notes):
        if note.name == CALL_NAME:
            call = from_arguments(note.said, groups, ON_HOST)
        elif note.name in SIZED_CALLS and not is_told:
            call = _from_sizes(note.name, note.said, groups)
        elif note.name.startswith(COLLECTIVE):
            call = _from_annotation(note.name, note.said)
        else:
            continue
        if call is not None:
            rows.append(row)
            calls.append(call)
    kept = np.array(rows, np.int64)
    start, end, tid = notes.start_ns[kept], notes.end_ns[kept], notes.tid[kept]
    order = np.lexsort((end, start))
    return HostCalls(tid[order], start[order], end[order], tuple(calls[i] for i in order))


def named(calls: Sequence[Call | None]) -> Counter[str]:
    """Return how often each source told what a communication is."""
    return Counter(call.source for call in calls if call is not None and call.source)


def _from_annotation(name: str, said: Mapping[str, Any]) -> Call:
    """Return the call that an annotation such as ``nccl:all_reduce`` tells, with the shape of its input."""
    kinds, shapes = said.get("Input type"), said.get("Input Dims")
    label, width = first_dtype(kinds)
    n_elements = elements(shapes[0]) if isinstance(shapes, list) and shapes else 0
    words = text(name).partition(" ")[2]
    peers = words.split("->") if "->" in words else []
    kind = collective_kind(name)
    peer = whole(peers[1 if kind == "send" else 0]) if len(peers) == 2 else None
    return Call(
        kind=kind,
        dtype=label,
        size_bytes=array_bytes(n_elements, width),
        peer=-1 if peer is None else peer,
        source="annotation on the host",
    )


def _from_sizes(name: str, said: Mapping[str, Any], groups: TraceGroups) -> Call:
    """Return the call of an operator whose first two inputs are what comes out and what goes in."""
    kinds, shapes = said.get("Input type"), said.get("Input Dims")
    label, width = first_dtype(kinds)
    sizes = sorted(map(elements, shapes[:2])) if isinstance(shapes, list) else []
    least, most = sizes if len(sizes) == 2 else (0, 0)
    return Call(
        kind=collective_kind(name),
        dtype=label,
        size_bytes=array_bytes(most, width),
        group=groups.of_size(most // least) if least and not most % least else None,
        source=ON_HOST if most and width else "",
    )


def _united(calls: Sequence[Call]) -> Call:
    """Return what nested calls of one collective say together, the outer ones first."""
    best = calls[0]
    for call in calls[1:]:
        best = replace(
            best,
            kind=call.kind if best.kind == UNKNOWN else best.kind,
            dtype=best.dtype or call.dtype,
            size_bytes=best.size_bytes or call.size_bytes,
            group=best.group or call.group,
            sequence=best.sequence if best.sequence >= 0 else call.sequence,
            peer=best.peer if best.peer >= 0 else call.peer,
        )
    return best
