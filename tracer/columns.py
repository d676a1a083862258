"""Records as columns of a timeline: what a batch is made of, thousands of rows at once.

Most rows are pieces of compute time, which are written as arrays: as tuples they took longer to be written
than to be noted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from foretrace.tracer.records import Block, Communication, Segment, StepWindow
from foretrace.tracer.stamps import Stamp
from foretrace.traces.timeline import DEFAULTS, TIMELINE

MIN_GLUE_NS: Final = 20_000
"""Shortest own time of a module that only calls others which is worth a span: below, it is the host's
overhead of calling a module, some microseconds each."""

SEGMENT: Final = np.dtype(
    [
        ("kind", np.int32),
        ("block", np.int32),
        ("start_ns", np.int64),
        ("end_ns", np.int64),
        ("step", np.int32),
        ("stage", np.int32),
        ("virtual_stage", np.int32),
        ("microbatch", np.int32),
        ("stream", np.int32),
    ]
)
"""A piece of compute time, by the places of its kind, its block and its stream in lists beside it."""

COLUMNS: Final = (
    "stream", "category", "kind", "name", "start_ns", "duration_ns", "step", "microbatch", "layer", "stage",
    "virtual_stage", "axis", "group", "sequence", "peer", "size_bytes", "dtype", "is_bound",
)  # fmt: skip
"""Columns of a row, in order."""

Row = tuple[Any, ...]


class Segments(NamedTuple):
    """Pieces of compute time in the order of time.

    Attributes:
        rows: an array of type ``SEGMENT``; its labels are places in the lists beside it.
        kinds: e.g. ``"forward"``.
        blocks: who owns the time.
        streams: e.g. ``"compute"``.
    """

    rows: np.ndarray[Any, np.dtype[np.void]]
    kinds: Sequence[str]
    blocks: Sequence[Block]
    streams: Sequence[str]

    @classmethod
    def of(cls, found: Sequence[Segment], ns: Callable[[Stamp], int]) -> Segments:
        """Return *found*; *ns* tells when a stamp was."""
        kind, block, start, end, *numbers, stream = zip(*found, strict=True)
        rows, labels = np.empty(len(found), SEGMENT), []
        for name, values in (("kind", kind), ("block", block), ("stream", stream)):
            at = {one: number for number, one in enumerate(dict.fromkeys(values))}
            rows[name] = [at[value] for value in values]
            labels.append(list(at))
        rows["start_ns"], rows["end_ns"] = [ns(one) for one in start], [ns(one) for one in end]
        for name, values in zip(Segment._fields[4:-1], numbers, strict=True):
            rows[name] = values
        return cls(rows, *labels)

    def of_steps(self, has_step: Callable[[int], bool]) -> Segments:
        """Return what belongs to steps that are recorded."""
        steps = np.unique(self.rows["step"])
        kept = [step for step in steps.tolist() if has_step(step)]
        if len(kept) == len(steps):
            return self
        return self._replace(rows=self.rows[np.isin(self.rows["step"], kept)])

    def after(self, ends_ns: dict[str, int]) -> Segments:
        """Return them without overlap among themselves and with what ended at *ends_ns*, by stream.

        Only what is worth a span is left. *ends_ns* is brought up to date.
        """
        rows = self.rows.copy()
        for number, stream in enumerate(self.streams):
            own = rows["stream"] == number
            ends = np.maximum.accumulate(np.append(ends_ns.get(stream, 0), rows["end_ns"][own]))
            rows["start_ns"][own] = np.maximum(rows["start_ns"][own], ends[:-1])
            ends_ns[stream] = int(ends[-1])
        shortest = np.array([MIN_GLUE_NS if block.is_glue else 1 for block in self.blocks], np.int64)
        return self._replace(rows=rows[rows["end_ns"] - rows["start_ns"] >= shortest[rows["block"]]])

    def columns(self, shift_ns: int) -> dict[str, Any]:
        """Return columns of a timeline; of labels the number of each, and the labels."""
        rows = self.rows
        layers = np.array([block.layer for block in self.blocks], np.int32)
        return {
            "kind": (rows["kind"], self.kinds),
            "stream": (rows["stream"], self.streams),
            "name": (rows["block"], [block.name for block in self.blocks]),
            "start_ns": rows["start_ns"] + shift_ns,
            "duration_ns": rows["end_ns"] - rows["start_ns"],
            "layer": layers[rows["block"]],
            "category": (np.zeros(len(rows), np.int32), ["compute"]),
            **{name: rows[name] for name in ("step", "stage", "virtual_stage", "microbatch")},
        }


def table(rows: Sequence[Row], segments: Iterable[dict[str, Any]], rank: int) -> pa.Table:
    """Return a timeline of *rows* and, behind them, of columns of *segments*: one row at least in all.

    It is in the very types of a timeline, so that nothing has to be cast.
    """
    columns = dict(zip(COLUMNS, zip(*rows, strict=True), strict=True)) if rows else {}
    parts = [(len(rows), columns), *((len(part["start_ns"]), part) for part in segments)]
    return pa.table([_array(field, parts, rank) for field in TIMELINE], schema=TIMELINE)


def _array(field: pa.Field, parts: Sequence[tuple[int, dict[str, Any]]], rank: int) -> pa.Array:
    """Return one column, of which each of *parts* has so many rows, or the default."""
    default = rank if field.name == "rank" else DEFAULTS.get(field.name)
    if not any(field.name in part for _, part in parts):
        plain = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        found = pa.repeat(pa.scalar(default, plain), sum(n for n, _ in parts))
        return found.dictionary_encode() if pa.types.is_dictionary(field.type) else found
    given = [(n, part.get(field.name)) for n, part in parts if n]
    if pa.types.is_dictionary(field.type):
        return _labels([(n, default, values) for n, values in given])
    dtype = field.type.to_pandas_dtype()
    pieces = [np.full(n, default, dtype) if v is None else np.asarray(v, dtype) for n, v in given]
    return pa.array(np.concatenate(pieces), field.type)


def _labels(given: Sequence[tuple[int, Any, Any]]) -> pa.DictionaryArray:
    """Return a column of labels: of each part its length, its default, and its labels or numbers of them."""
    index: dict[str, int] = {}
    numbers: list[np.ndarray[Any, np.dtype[np.int32]]] = []
    for n, default, values in given:
        if values is None:
            numbers.append(np.full(n, index.setdefault(default, len(index)), np.int32))
        elif isinstance(values[0], np.ndarray):
            used, places = np.unique(values[0], return_inverse=True)
            found = [index.setdefault(values[1][at], len(index)) for at in used.tolist()]
            numbers.append(np.array(found, np.int32)[places])
        else:
            numbers.append(np.array([index.setdefault(one, len(index)) for one in values], np.int32))
    return pa.DictionaryArray.from_arrays(
        pa.array(np.concatenate(numbers)), pa.array(list(index), pa.string())
    )


def step_row(s: StepWindow, start_ns: int, duration_ns: int) -> Row:
    """Return the row of the window of a step or of a phase; numbers are in their column only.

    Each label is kept, so that none holds a number.
    """
    category, kind = ("phase", s.phase) if s.phase else ("step", "step")
    step = -1 if s.phase and not s.is_inside else s.step
    return (
        category, category, kind, kind, start_ns, duration_ns, step, -1, -1,
        -1, -1, "", -1, -1, -1, 0, "", False,
    )  # fmt: skip


def communication_row(c: Communication, stream: str, start_ns: int, duration_ns: int) -> Row:
    """Return the row of a communication that has ended."""
    step, stage, virtual_stage, microbatch = c.position
    category = "p2p" if c.is_p2p else "collective"
    return (
        stream, category, c.kind, c.block.name or c.kind, start_ns, duration_ns, step, microbatch,
        c.block.layer, stage, virtual_stage, c.group.axis, c.group.id, c.sequence, c.peer,
        c.size_bytes, c.dtype, c.is_bound,
    )  # fmt: skip
