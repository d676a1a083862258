"""The timeline: one row per span, the format shared by the simulator and the tracer.

Times are whole nanoseconds since the start of the run on a common clock. A span of a collective or of a
point-to-point transfer runs from the arrival of its rank to its completion, like a CUDA kernel of NCCL:
the time until the last participant arrives is waiting, the rest is transfer. Spans of one
``(rank, stream)`` do not overlap.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from foretrace.traces.errors import TimelineError

FORMAT_VERSION: Final = 2  # version of the columns below and of ``run.json``; readers refuse a newer one

MARKS: Final = ("step", "phase")
"""Kinds of spans that are no work but mark time: the window of one optimizer step on one rank; a phase that
is no training, as an evaluation."""

_LABEL: Final = pa.dictionary(pa.int32(), pa.string())

TIMELINE: Final = pa.schema(
    [
        pa.field("rank", pa.int32(), nullable=False),
        pa.field("stream", _LABEL, nullable=False),
        pa.field("category", _LABEL, nullable=False),
        pa.field("kind", _LABEL, nullable=False),
        pa.field("name", _LABEL, nullable=False),
        pa.field("start_ns", pa.int64(), nullable=False),
        pa.field("duration_ns", pa.int64(), nullable=False),
        pa.field("step", pa.int32(), nullable=False),  # -1: unknown, as for all below
        pa.field("microbatch", pa.int32(), nullable=False),
        pa.field("layer", pa.int32(), nullable=False),
        pa.field("stage", pa.int16(), nullable=False),
        pa.field("virtual_stage", pa.int16(), nullable=False),
        pa.field("axis", _LABEL, nullable=False),  # "": not communication
        pa.field("group", pa.int32(), nullable=False),  # process group; members are in run.json
        pa.field("sequence", pa.int64(), nullable=False),  # n-th collective of its group, or p2p of its pair
        pa.field("peer", pa.int32(), nullable=False),  # the other rank of a p2p transfer
        pa.field("size_bytes", pa.int64(), nullable=False),  # whole array as in nccl-tests; p2p: the message
        pa.field("flops", pa.int64(), nullable=False),  # 0: none or unknown
        pa.field("bytes_moved", pa.int64(), nullable=False),
        pa.field("dtype", _LABEL, nullable=False),
        pa.field("is_bound", pa.bool_(), nullable=False),  # begun no earlier, ended no later: when is unknown
    ],
    metadata={"foretrace.format": str(FORMAT_VERSION)},
)
"""Columns of a timeline, in order."""

DEFAULTS: Final[dict[str, object]] = {
    "stream": "compute",
    "name": "",
    "step": -1,
    "microbatch": -1,
    "layer": -1,
    "stage": -1,
    "virtual_stage": -1,
    "axis": "",
    "group": -1,
    "sequence": -1,
    "peer": -1,
    "size_bytes": 0,
    "flops": 0,
    "bytes_moved": 0,
    "dtype": "",
    "is_bound": False,
}
"""Default of each column that a writer may omit."""

SINCE_2: Final = ("is_bound",)
"""Columns that files of version 1 do not have: their writers took every time for exact."""

MEMORY: Final = pa.schema(
    [
        pa.field("rank", pa.int32(), nullable=False),
        pa.field("t_ns", pa.int64(), nullable=False),
        pa.field("category", _LABEL, nullable=False),  # parameters, activations, ..., total, reserved
        pa.field("bytes", pa.int64(), nullable=False),  # held from t_ns to the next row of its category
    ],
    metadata={"foretrace.format": str(FORMAT_VERSION)},
)
"""Columns of ``memory.arrow``: a step function per rank and category."""

LINKS: Final = pa.schema(
    [
        pa.field("rank", pa.int32(), nullable=False),
        pa.field("tier", _LABEL, nullable=False),
        pa.field("direction", _LABEL, nullable=False),
        pa.field("start_ns", pa.int64(), nullable=False),
        pa.field("end_ns", pa.int64(), nullable=False),
        pa.field("used", pa.float64(), nullable=False),
    ]
)
"""Columns of ``links.arrow``: how full a rank's way into its node (``near``) or out of it (``far``) was, or
the way of a switch upward (``leaf``, ``spine``; ``rank`` is its number). The metadata may hold ``changes``, a
list of ``LinkChange`` in JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkChange:
    """What is left of the width of a way from a moment on."""

    rank: int
    tier: str
    direction: str
    at_ns: int
    capacity: float


def timeline(columns: dict[str, object]) -> pa.Table:
    """Return a checked timeline from *columns*; those in ``DEFAULTS`` may be omitted.

    Args:
        columns: name to a sequence, NumPy array or Arrow array; all of one length.

    Raises:
        TimelineError: a column is missing, unknown, of the wrong type or of the wrong length.
    """
    if unknown := set(columns) - set(TIMELINE.names):
        raise TimelineError(
            f"unknown column {', '.join(sorted(unknown))}; a timeline has {', '.join(TIMELINE.names)}"
        )
    try:
        given = pa.table(columns)
    except (ValueError, TypeError, pa.ArrowException) as error:
        raise TimelineError(f"not a timeline: {error}") from error
    return checked(_completed(given, DEFAULTS))


def checked(table: pa.Table) -> pa.Table:
    """Return *table* in the timeline's columns and types.

    Raises TimelineError: a column is missing, contains a null, or cannot be cast; a duration is negative.
    """
    table = _completed(table, SINCE_2)
    if missing := set(TIMELINE.names) - set(table.column_names):
        raise TimelineError(f"not a timeline: no column {', '.join(sorted(missing))}")
    columns = []
    for field in TIMELINE:
        column = table[field.name]
        if column.null_count:
            raise TimelineError(f"not a timeline: {column.null_count} nulls in column {field.name}")
        try:
            columns.append(_cast(column, field.type))
        except (ValueError, pa.ArrowException) as error:
            raise TimelineError(f"not a timeline: column {field.name}: {error}") from error
    result = pa.table(columns, schema=TIMELINE)
    if result.num_rows and (shortest := pc.min(result["duration_ns"]).as_py()) < 0:
        raise TimelineError(f"not a timeline: a span lasts {shortest} ns; durations are 0 or more")
    return result


def empty() -> pa.Table:
    """Return a timeline without rows."""
    return TIMELINE.empty_table()


def _completed(table: pa.Table, names: Iterable[str]) -> pa.Table:
    """Return *table* with those of the columns *names* that it lacks, which have their defaults."""
    for name in names:
        if name not in table.column_names:
            value = pa.scalar(DEFAULTS[name], _plain(TIMELINE.field(name).type))
            table = table.append_column(name, pa.repeat(value, table.num_rows))
    return table


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return the value type of a dictionary type, or *kind* itself."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _cast(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """Cast *column* to *kind*; dictionary columns are encoded or re-indexed."""
    if column.type == kind:
        return column
    if pa.types.is_dictionary(kind):
        plain = column.cast(kind.value_type) if pa.types.is_dictionary(column.type) else column
        return plain.cast(kind.value_type).dictionary_encode().cast(kind)
    return column.cast(kind)
