"""What a reader makes of one rank's trace, before ranks are joined."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from foretrace.tracer.ingest.events import joined
from foretrace.traces.columns import Int64Array, factorized, lanes, occurrence
from foretrace.traces.layout import Group, Layout
from foretrace.traces.rehearsal import Issued
from foretrace.traces.timeline import TIMELINE, timeline

MOST_LANES: Final = 1 << 10  # communications of a rank that may be under way at once


@dataclass(slots=True, kw_only=True)
class Recording:
    """The trace of one rank, or of several on one clock."""

    name: str  # file it comes from
    # a timeline; times in ns on the file's own clock, ``group`` by ``traces.info.stable_group_id``,
    # ``sequence`` in order of time, or as the file numbers them
    spans: pa.Table
    rank: int | None = None  # whose it is; None if the file does not say. Of several ranks, the first
    world_size: int | None = None  # number of ranks of the job; None if the file does not say
    groups: tuple[Group, ...] = ()  # process groups that ``spans`` refers to
    numbered: bool = False  # whether ``sequence`` is the file's own number, equal on all ranks
    one_clock: bool = False  # whether the times of all its ranks are on one clock already
    rounding_ns: int = 0  # how far each of these times may be off
    layout: Layout | None = None  # parallel degrees, where the file tells them
    # index rank, value the rank whose spans it shares, where the file holds only some
    representatives: tuple[int, ...] | None = None
    evidence: dict[str, str] = field(default_factory=dict)  # by column or property, where it was taken from
    lost: Counter[str] = field(default_factory=Counter)  # what could not be understood, by reason
    warnings: list[str] = field(default_factory=list)  # what limits the recording
    memory: pa.Table | None = None  # of its one rank, on the same clock; None if the file does not say
    issued: Issued | None = None  # what its one rank issued, where it was asked for
    facts: dict[str, Any] = field(default_factory=dict)  # further facts for ``run.json``: device, versions


def place_in_time(start: Int64Array, *keys: Int64Array) -> Int64Array:
    """Return the place of each row in time among those with equal *keys*."""
    order = np.argsort(start, kind="stable")
    place = np.empty(len(start), np.int64)
    place[order] = occurrence(factorized(*keys)[order])
    return place


def innermost(start: Int64Array, end: Int64Array) -> list[tuple[int, int, int]]:
    """Flatten nested spans: return ``(index, start, end)`` of pieces in which span *index* is the innermost.

    Spans of one thread, sorted by start, longer ones first among equals. One that outlasts the span it began
    in, which a thread cannot do, is cut to it.
    """
    pieces: list[tuple[int, int, int]] = []
    stack: list[tuple[int, int]] = []
    now = 0

    def advance(until: int) -> None:
        nonlocal now
        while stack and stack[-1][1] <= until:
            index, stop = stack.pop()
            if stop > now:
                pieces.append((index, now, stop))
                now = stop
        if stack and until > now:
            pieces.append((stack[-1][0], now, until))
        now = max(now, until)

    for i, (a, b) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        advance(a)
        stop = min(b, stack[-1][1]) if stack else b
        if stop > a:
            stack.append((i, stop))
    if stack:
        # The outermost ends last: those in it were cut to it.
        advance(stack[0][1])
    return pieces


def stacked(tables: Sequence[pa.Table]) -> pa.Table:
    """Return timelines one below the other, in one piece per column."""
    return joined(tables, TIMELINE)


def coded(codes: Any, names: Sequence[str]) -> pa.DictionaryArray:
    """Return a label column from numbers and the names that they stand for."""
    return pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), pa.array(list(names), pa.string()))


def step_table(
    rank: NDArray[Any], number: Int64Array, start_ns: Int64Array, duration_ns: Int64Array
) -> pa.Table:
    """Return the rows that mark steps of these *numbers* on these ranks."""
    return timeline(
        {
            "rank": rank.astype(np.int32),
            **dict.fromkeys(("stream", "category", "kind"), ["step"] * len(number)),
            "name": [f"step {step}" for step in number],
            "start_ns": start_ns,
            "duration_ns": duration_ns,
            "step": number.astype(np.int32),
        }
    )


class Rows:
    """Rows of a timeline that are found one by one; of rank 0 unless they say otherwise."""

    def __init__(self) -> None:
        self._columns: defaultdict[str, list[Any]] = defaultdict(list)

    def __len__(self) -> int:
        return len(self._columns["start_ns"])

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row; all have the same columns."""
        for name, value in row.items():
            self._columns[name].append(value)

    def column(self, name: str) -> list[Any]:
        """Return what the rows have in one column."""
        return self._columns[name]

    def table(self) -> pa.Table:
        """Return them as a checked timeline."""
        return timeline({"rank": [0] * len(self)} | dict(self._columns))

    def beside(self, name: str) -> pa.Table:
        """Return them by their start on streams *name*, *name 2*, ... on which none overlap."""
        start, duration = (np.array(self._columns[of], np.int64) for of in ("start_ns", "duration_ns"))
        order = np.argsort(start, kind="stable")
        lane, _ = lanes(start[order], (start + duration)[order], 0, MOST_LANES)
        kept = lane >= 0
        chosen = order[kept].tolist()
        streams = [f"{name} {n + 1}" if n else name for n in lane[kept].tolist()]
        columns = {key: [values[i] for i in chosen] for key, values in self._columns.items()}
        return timeline({"rank": [0] * len(chosen)} | columns | {"stream": streams})
