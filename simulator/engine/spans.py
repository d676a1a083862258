"""From the times of a program's tasks to the rows of a timeline, column by column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from foretrace.simulator.program import Int64Array, Program
from foretrace.traces.timeline import timeline

STEP: Final = "step"
"""Stream, category and kind of the rows that mark the window of a step."""


def spans(program: Program, start_ns: Int64Array, end_ns: Int64Array) -> pa.Table:
    """Return the checked timeline of *program*: its tasks in order, then a row per rank and step.

    *start_ns*: start of each task, for a communication its arrival; shape ``(n_tasks,)``. *end_ns*: end of
    each task; shape ``(n_tasks,)``.
    """
    tasks = timeline(_task_columns(program, start_ns, end_ns))
    return pa.concat_tables([tasks, timeline(_step_columns(program, end_ns))]).unify_dictionaries()


def step_windows(
    rank: NDArray[np.int32], step: NDArray[np.int32], end_ns: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """Return ``(rank, step, start_ns, end_ns)`` of the window of every step on every rank.

    A step ends on a rank with its last task there; it starts where the step before it ended, or at 0.
    """
    known = step >= 0
    key = rank[known].astype(np.int64) << 32 | step[known]
    keys, position = np.unique(key, return_inverse=True)
    ends = np.zeros(len(keys), np.int64)
    np.maximum.at(ends, position, end_ns[known])
    ranks, steps = keys >> 32, keys & 0xFFFFFFFF
    starts = np.zeros_like(ends)
    same_rank = np.flatnonzero(ranks[1:] == ranks[:-1]) + 1
    starts[same_rank] = ends[same_rank - 1]
    return ranks, steps, starts, ends


def _step_columns(program: Program, end_ns: Int64Array) -> dict[str, object]:
    ranks, steps, starts, ends = step_windows(program.rank, program.step, end_ns)
    names = [f"step {step}" for step in steps.tolist()]
    fixed = {name: np.repeat(STEP, len(ranks)) for name in ("stream", "category", "kind")}
    return {
        **fixed,
        "rank": ranks.astype(np.int32),
        "name": pa.array(names, pa.string()),
        "start_ns": starts,
        "duration_ns": ends - starts,
        "step": steps.astype(np.int32),
    }


def _task_columns(program: Program, start_ns: Int64Array, end_ns: Int64Array) -> dict[str, object]:
    labels = program.labels
    columns: dict[str, object] = {
        "rank": program.rank,
        "stream": _encoded(program.streams, program.stream),
        "start_ns": start_ns,
        "duration_ns": end_ns - start_ns,
        "group": _of_instance(program, program.instance_group, -1),
        "sequence": _of_instance(program, program.instance_sequence, -1),
        "size_bytes": _of_instance(program, program.instance_size_bytes, 0),
        "stage": program.stage.astype(np.int16),
        "virtual_stage": program.virtual_stage.astype(np.int16),
    }
    for field in ("category", "kind", "name", "axis", "dtype"):
        columns[field] = _encoded([getattr(label, field) for label in labels], program.label)
    for field in ("step", "microbatch", "layer", "peer", "flops", "bytes_moved"):
        columns[field] = getattr(program, field)
    return columns


def _encoded(values: Sequence[str], codes: NDArray[np.int32]) -> pa.DictionaryArray:
    """Return ``values[codes]`` as a dictionary array whose dictionary holds each value once."""
    distinct = list(dict.fromkeys(values))
    position = {value: at for at, value in enumerate(distinct)}
    recoded = np.array([position[value] for value in values], np.int32)
    indices = recoded[codes] if len(values) else codes
    return pa.DictionaryArray.from_arrays(pa.array(indices, pa.int32()), pa.array(distinct, pa.string()))


def _of_instance(program: Program, values: NDArray[np.integer], default: int) -> NDArray[np.integer]:
    """Return the value of each task's communication, or *default* where it has none."""
    padded = np.append(values, np.array([default], values.dtype))  # instance -1 is the last
    return padded[program.instance]
