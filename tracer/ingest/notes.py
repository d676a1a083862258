"""Annotations of the host: what a person, torch or a library has named."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretrace.tracer.ingest.events import CALL_NAME, all_to_ns, arguments, number, text, whole
from foretrace.tracer.ingest.recording import innermost
from foretrace.traces.columns import BoolArray, Int64Array

STEP: Final = re.compile(r"ProfilerStep#(\d{1,9})")
"""Annotation that torch.profiler makes for each step."""

COLLECTIVE: Final = ("nccl:", "gloo:", "rccl:", "mpi:", "ucc:", "xccl:")
"""How annotations of collectives begin."""

_LONGEST_US: Final = 4e15
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
    ts, dur, tid = number(event.get("ts")), number(event.get("dur")), whole(event.get("tid"))
    if ts is None or dur is None or tid is None or not 0 <= dur < _LONGEST_US or abs(ts) >= _LONGEST_US:
        return None
    name = sys.intern(text(event.get("name", ""))[:_LONGEST_NAME])
    said = arguments(event) if name == CALL_NAME or name.startswith(COLLECTIVE) else {}
    if name == CALL_NAME and "Collective name" not in said:
        return None
    return Note(ts, dur, tid, event.get("cat") != "gpu_user_annotation", name, said)


@dataclass(frozen=True, slots=True)
class Notes:
    """The host's annotations as columns, in the order of the file; times in ns.

    Attributes:
        start_ns, end_ns, tid: start, end and thread of each, shape ``(n_notes,)``.
        notes: the annotations themselves.
    """

    start_ns: Int64Array
    end_ns: Int64Array
    tid: Int64Array
    notes: tuple[Note, ...]

    @classmethod
    def of(cls, notes: Sequence[Note], base_ns: int) -> Notes:
        """Return those of *notes* that are of the host; times count from *base_ns*."""
        own = tuple(note for note in notes if note.on_host)
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


def flattened(notes: Notes) -> tuple[dict[int, Flat], list[str]]:
    """Return what each thread was doing, and the names that are numbered; steps are left out."""
    names: dict[str, int] = {}
    code = np.array([names.setdefault(note.name, len(names)) for note in notes.notes], np.int64)
    wanted = np.array([STEP.fullmatch(name) is None and name != CALL_NAME for name in names], np.bool_)
    found = {}
    for tid in np.unique(notes.tid).tolist():
        rows = np.flatnonzero((notes.tid == tid) & wanted[code])
        rows = rows[np.lexsort((-notes.end_ns[rows], notes.start_ns[rows]))]
        pieces = innermost(notes.start_ns[rows], notes.end_ns[rows])
        if pieces:
            index, start, end = (np.array(column, np.int64) for column in zip(*pieces, strict=True))
            found[int(tid)] = Flat(start, end, code[rows][index])
    return found, list(names)
