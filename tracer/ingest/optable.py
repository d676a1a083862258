"""Reads tables of the operations of a pipeline run, as StragglerAnalysis publishes them.

Columns: ``dp_rank, stage, rank, step, optype, start_ts, duration, seq_id, mc, mb_id, gmc``; times in seconds
from the start of the step, on one clock. https://github.com/ByteDance-Seed/StragglerAnalysis (OSDI'25).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyarrow import parquet as pq

from foretrace.tracer.errors import IngestError
from foretrace.tracer.ingest.operations import EMBEDDING, OPERATIONS, operation_rows, step_rows
from foretrace.tracer.ingest.recording import Recording
from foretrace.tracer.ingest.rows import stacked
from foretrace.tracer.ingest.sources import UNREADABLE, Progress, Source, opened
from foretrace.traces.columns import Int64Array
from foretrace.traces.errors import LayoutError, reason
from foretrace.traces.layout import Group, Layout

COLUMNS: Final = (
    "dp_rank",
    "stage",
    "rank",
    "step",
    "optype",
    "start_ts",
    "duration",
    "seq_id",
    "mb_id",
    "gmc",
)
"""Columns that are read; what tells a table of operations from any other Parquet file."""

MOST_RANKS: Final = 1 << 16
"""Largest world that is believed."""

ROUNDING_NS: Final = 100_000
"""Operations of one rank that follow one another overlap by up to 75 µs in the published runs; the publishers
themselves forgive up to 500 µs when they match operations."""


def read(source: Source, progress: Progress | None = None) -> Recording:
    """Read a table of operations.

    Raises:
        IngestError: it is no such table, or its ranks do not make a grid.
    """
    with opened(source, progress) as stream:
        data = stream.read()
    try:
        found = pq.read_table(pa.BufferReader(data))
        if missing := [name for name in COLUMNS if name not in found.column_names]:
            raise IngestError(f"{source.name} is not a table of operations: no column {', '.join(missing)}")
        table = found.select(list(COLUMNS)).drop_null()
        kinds = [str(value) for value in table["optype"].to_pylist()]
        values = {name: table[name].to_numpy() for name in COLUMNS if name != "optype"}
        exact = {name: column.astype(np.float64) for name, column in values.items()}
    except (*UNREADABLE, pa.ArrowException, ValueError, TypeError) as error:
        if isinstance(error, IngestError):
            raise
        raise IngestError(
            f"{source.name} cannot be read as a table of operations: {reason(error)}"
        ) from error
    result = Recording(
        name=source.name, spans=pa.table({}), numbered=True, one_clock=True, rounding_ns=ROUNDING_NS
    )
    if found.num_rows > table.num_rows:
        result.lost["row with an empty cell"] += found.num_rows - table.num_rows
    _translate(result, kinds, exact)
    return result


def _translate(result: Recording, kinds: list[str], values: dict[str, Any]) -> None:
    """Fill *result* with the rows of the table."""
    known = np.array([kind in OPERATIONS for kind in kinds], np.bool_)
    for kind in sorted({kind for kind in kinds if kind not in OPERATIONS}):
        result.lost[f"operation {kind[:60]!r}"] += kinds.count(kind)
    seconds = values["start_ts"], values["duration"]
    sane = np.isfinite(seconds[0]) & np.isfinite(seconds[1]) & (np.abs(seconds[0]) < 1e6) & (seconds[1] < 1e6)
    sane &= seconds[1] >= 0
    for name in ("rank", "stage", "dp_rank", "step"):
        sane &= (values[name] >= 0) & (values[name] < (MOST_RANKS if name != "step" else 2**31))
    if bad := int((known & ~sane).sum()):
        result.lost["operation without usable times or place"] += bad
    kept = known & sane
    if not kept.any():
        raise IngestError(
            f"{result.name} holds no operation that is known: it has {', '.join(sorted(set(kinds)))[:80]}"
        )
    names = [kind for kind, keep in zip(kinds, kept, strict=True) if keep]
    whole = {
        name: np.rint(column[kept]).astype(np.int64) for name, column in values.items() if "dur" not in name
    }
    layout = _layout(result, whole)
    start, duration = (np.rint(column[kept] * 1e9).astype(np.int64) for column in seconds)
    start = start + _step_offsets(whole["step"], start, start + duration)
    result.layout, result.world_size = layout, layout.world_size
    result.groups = _groups(layout)
    result.representatives = tuple(rank // layout.tp * layout.tp for rank in range(layout.world_size))
    spans = operation_rows(names, whole, (start, duration), result.groups, layout)
    result.spans = stacked([spans, step_rows(spans)])
    result.evidence |= {
        "layout": "stages and data-parallel ranks in the table; tp from the distance of the ranks",
        "step": "the table's; steps are laid end to end, time between them is not in it",
        "microbatch": "the table's for compute; the n-th transfer belongs to the n-th pass of its direction",
    }


def _layout(result: Recording, whole: dict[str, Int64Array]) -> Layout:
    """Return the layout in which the table's ranks are (stage * dp + dp_rank) * tp."""
    pp, dp = int(whole["stage"].max()) + 1, int(whole["dp_rank"].max()) + 1
    place = whole["stage"] * dp + whole["dp_rank"]
    tp = int(whole["rank"].max() // max(int(place.max()), 1)) if place.max() else 1
    if tp < 1 or (place * tp != whole["rank"]).any():
        raise IngestError(f"{result.name}: its ranks are not (stage * dp + dp_rank) * tp for any tp")
    try:
        return Layout(pp=pp, dp=dp, tp=tp)
    except LayoutError as error:
        raise IngestError(f"{result.name}: {error}") from error


def _groups(layout: Layout) -> tuple[Group, ...]:
    """Return the process groups of *layout*, and that of the first and last stage of each pipeline."""
    found = layout.process_groups()
    ends = [(ranks[0], ranks[-1]) for ranks in layout.groups("pp")] if layout.pp > 1 else []
    return (*found, *(Group(id=len(found) + i, axis=EMBEDDING, ranks=pair) for i, pair in enumerate(ends)))


def _step_offsets(step: Int64Array, start: Int64Array, end: Int64Array) -> Int64Array:
    """Return what to add to the times of each row so that the steps follow one another."""
    steps, index = np.unique(step, return_inverse=True)
    first, last = np.full(len(steps), np.iinfo(np.int64).max), np.full(len(steps), np.iinfo(np.int64).min)
    np.minimum.at(first, index, start)
    np.maximum.at(last, index, end)
    begins = np.concatenate([[0], np.cumsum(last - first)[:-1]])
    offsets: Int64Array = (begins - first)[index]
    return offsets
