"""Reads tables of the operations of a pipeline run, as StragglerAnalysis publishes them.

Columns: ``dp_rank, stage, rank, step, optype, start_ts, duration, seq_id, mc, mb_id, gmc``; times in seconds
from the start of the step, on one clock. https://github.com/ByteDance-Seed/StragglerAnalysis (OSDI'25).
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import parquet as pq

from foretrace.tracer.errors import IngestError
from foretrace.tracer.ingest.recording import Recording, place_in_time, stacked, step_table
from foretrace.tracer.ingest.sources import UNREADABLE, Progress, Source, read_whole
from foretrace.traces.columns import BoolArray, Int64Array, bounds, factorized, int64, lanes
from foretrace.traces.errors import LayoutError, reason
from foretrace.traces.layout import Group, Layout
from foretrace.traces.timeline import timeline

EMBEDDING: Final = "embedding"
"""Axis of the gradients of a shared embedding: first and last stage of one pipeline."""


class Operation(NamedTuple):
    """What a row of that type is: category, kind, axis and stream of the timeline."""

    category: str
    kind: str
    axis: str
    stream: str


OPERATIONS: Final = {
    "forward-compute": Operation("compute", "forward", "", "compute"),
    "backward-compute": Operation("compute", "backward", "", "compute"),
    "forward-send": Operation("p2p", "send", "pp", "pp.send forward"),
    "forward-recv": Operation("p2p", "recv", "pp", "pp.recv forward"),
    "backward-send": Operation("p2p", "send", "pp", "pp.send backward"),
    "backward-recv": Operation("p2p", "recv", "pp", "pp.recv backward"),
    "params-all-gather": Operation("collective", "all_gather", "dp", "dp"),
    "grads-reduce-scatter": Operation("collective", "reduce_scatter", "dp", "dp"),
    "separate-grads-all-reduce": Operation("collective", "all_reduce", "dp", "dp"),
    "layernorm-grads-all-reduce": Operation("collective", "all_reduce", "tp", "tp"),
    "embedding-grads-all-reduce": Operation("collective", "all_reduce", EMBEDDING, EMBEDDING),
    "optimizer-clip-main-grad": Operation("collective", "all_reduce", "world", "world"),
    "optimizer": Operation("compute", "optimizer", "", "compute"),
    "gc": Operation("host", "gc", "", "host"),
}
"""Types of operations by their name in the table."""


def operation_rows(
    names: list[str],
    whole: dict[str, Int64Array],
    times_ns: tuple[Int64Array, Int64Array],
    groups: tuple[Group, ...],
    layout: Layout,
) -> pa.Table:
    """Return the timeline of operations of types *names*; *times_ns* are their starts and durations."""
    start, duration = times_ns
    what = [OPERATIONS[name] for name in names]
    rank = whole["rank"]
    group = _group_ids(groups, rank, [operation.axis for operation in what])
    order, microbatch = _order(names, whole, start)
    collective = np.array([operation.category == "collective" for operation in what], np.bool_)
    order = np.where(collective, place_in_time(start, rank, np.where(collective, group, -1)), order)
    sequence = np.where(group >= 0, order, -1)
    table = timeline(
        {
            "rank": rank.astype(np.int32),
            "stream": [operation.stream for operation in what],
            "category": [operation.category for operation in what],
            "kind": [operation.kind for operation in what],
            "name": names,
            "start_ns": start,
            "duration_ns": duration,
            "step": whole["step"].astype(np.int32),
            "microbatch": microbatch.astype(np.int32),
            "stage": whole["stage"].astype(np.int16),
            "virtual_stage": np.where(whole["gmc"] >= 0, whole["gmc"], -1).astype(np.int16),
            "axis": [operation.axis for operation in what],
            "group": group.astype(np.int32),
            "sequence": sequence,
            "peer": _peers(names, whole, layout).astype(np.int32),
        }
    )
    return _without_overlaps(table)


def _group_ids(groups: tuple[Group, ...], rank: Int64Array, axes: list[str]) -> Int64Array:
    of = {(group.axis, member): group.id for group in groups for member in group.ranks}
    return np.array([of.get((axis, r), -1) for axis, r in zip(axes, rank.tolist(), strict=True)], np.int64)


def _order(
    names: list[str], whole: dict[str, Int64Array], start: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Return the number of each row among those of its rank and type over all steps, and its micro-batch."""
    codes = {name: i for i, name in enumerate(sorted(set(names)))}
    code = np.array([codes[name] for name in names], np.int64)
    order = place_in_time(start, whole["rank"], code)
    within = place_in_time(start, whole["rank"], code, whole["step"])
    microbatch = np.where(whole["mb_id"] >= 0, whole["mb_id"], -1)
    for direction in ("forward", "backward"):
        compute = np.array([name == f"{direction}-compute" for name in names], np.bool_)
        keys = zip(whole["rank"][compute], whole["step"][compute], within[compute], strict=True)
        known = dict(
            zip(map(tuple, np.array(list(keys)).reshape(-1, 3).tolist()), microbatch[compute], strict=True)
        )
        for i in np.flatnonzero(
            [name in {f"{direction}-send", f"{direction}-recv"} for name in names]
        ).tolist():
            microbatch[i] = known.get((int(whole["rank"][i]), int(whole["step"][i]), int(within[i])), -1)
    return order, microbatch


def _peers(names: list[str], whole: dict[str, Int64Array], layout: Layout) -> Int64Array:
    """Return the other rank of each transfer, -1 for everything else; stages are neighbours in a ring."""
    ahead = np.array(
        [
            {"forward-send": 1, "backward-recv": 1, "forward-recv": -1, "backward-send": -1}.get(n, 0)
            for n in names
        ]
    )
    stage = (whole["stage"] + ahead) % layout.pp
    return np.where(ahead != 0, (stage * layout.dp + whole["dp_rank"]) * layout.tp, -1)


def _without_overlaps(table: pa.Table) -> pa.Table:
    """Return *table* with overlapping operations of one stream, by the rounding of seconds, cut apart."""
    (start, end), rank = bounds(table), int64(table, "rank")
    stream = table["stream"].combine_chunks()
    streams = stream.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    key = factorized(rank, streams)
    order = np.lexsort((end, start, key))
    begin, lane = start.copy(), np.zeros(len(start), np.int64)
    lane[order], begin[order] = lanes(start[order], end[order], 1_000_000, 8, key[order])
    kept: BoolArray = lane >= 0
    names = stream.to_pylist()
    named = [
        f"{name} ({number + 1})" if number > 0 else name
        for name, number in zip(names, lane.tolist(), strict=True)
    ]
    columns = {"start_ns": begin, "duration_ns": end - begin, "stream": named}
    whole = {name: columns.get(name, table[name]) for name in table.column_names}
    return timeline(whole).filter(pa.array(kept)).combine_chunks()


def step_rows(spans: pa.Table) -> pa.Table:
    """Return one row per rank and step: from the first start to the last end of any rank."""
    step, (start, end) = int64(spans, "step"), bounds(spans)
    ranks = np.unique(int64(spans, "rank"))
    steps = np.unique(step)
    first = np.array([start[step == number].min() for number in steps])
    last = np.array([end[step == number].max() for number in steps])
    number, start_ns, duration_ns = (np.tile(column, len(ranks)) for column in (steps, first, last - first))
    return step_table(np.repeat(ranks, len(steps)), number, start_ns, duration_ns)


COLUMNS: Final = (
    "dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mb_id", "gmc",
)  # fmt: skip
"""Columns that are read; what tells a table of operations from any other Parquet file."""

MOST_RANKS: Final = 1 << 16  # largest world that is believed

MOST_ROWS: Final = 10_000_000  # operations of a table, which take 2 GB while they are translated

ROUNDING_NS: Final = 100_000
"""Operations of one rank that follow one another overlap by up to 75 µs in the published runs; the publishers
themselves forgive up to 500 µs when they match operations."""


def read(source: Source, progress: Progress | None = None) -> Recording:
    """Read a table of operations.

    Raises IngestError: it is no such table, or its ranks do not make a grid.
    """
    data = read_whole(source, progress)
    try:
        file = pq.ParquetFile(pa.BufferReader(data))
        if missing := [name for name in COLUMNS if name not in file.schema_arrow.names]:
            raise IngestError(f"{source.name} is not a table of operations: no column {', '.join(missing)}")
        # By the footer, before anything is read: a small file may unpack to more than memory holds.
        if file.metadata.num_rows > MOST_ROWS:
            raise IngestError(f"{source.name}: more than {MOST_ROWS:,} operations: give fewer steps")
        found = file.read(list(COLUMNS))
        table = found.drop_null()
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
    # The table has one rank of each group of tensor parallelism: the others do as it does.
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
    # The highest place has the highest rank.
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
