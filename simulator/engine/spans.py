"""From the times of a program's tasks to the rows of a timeline, column by column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from foretrace.simulator.program import STATES, Int64Array, Program
from foretrace.traces.run import Inside
from foretrace.traces.timeline import timeline

STEP: Final = "step"
"""Stream, category and kind of the rows that mark the window of a step."""


def spans(program: Program, start_ns: Int64Array, end_ns: Int64Array) -> pa.Table:
    """Return the checked timeline of *program*: its tasks in order, then a row per rank and step.

    *start_ns*: start of each task, for a communication its arrival; shape ``(n_tasks,)``. *end_ns*: end of
    each task; shape ``(n_tasks,)``.
    """
    tasks = timeline(_task_columns(program, start_ns, end_ns))
    steps = timeline(_step_columns(program, end_ns))
    # In one piece, as every label of a column in pieces is looked up again by whoever asks for it.
    return pa.concat_tables([tasks, steps]).unify_dictionaries().combine_chunks()


def insides(program: Program, start_ns: Int64Array) -> dict[int, Inside]:
    """Return by rank the communications inside of tasks that stand for several, if there are any.

    *start_ns*: start of each task.
    """
    if program.merged is None:
        return {}
    starts, ends, codes = (
        np.concatenate([getattr(one, name) for one in program.insides])
        for name in ("start_ns", "end_ns", "state")
    )
    used, codes = np.unique(codes, return_inverse=True)
    states = tuple(STATES[at] for at in used.tolist())
    lengths = np.array([len(one.state) for one in program.insides], np.int64)
    n_more = np.array([one.n_tasks - 1 for one in program.insides], np.int64)
    first = np.cumsum(lengths) - lengths
    found, rows = {}, np.flatnonzero(program.merged >= 0)
    for rank in np.unique(program.rank[rows]).tolist():
        own = rows[program.rank[rows] == rank]
        own = own[np.argsort(start_ns[own], kind="stable")]
        which = program.merged[own]
        sizes = lengths[which]
        at = np.repeat(first[which] - (np.cumsum(sizes) - sizes), sizes) + np.arange(int(sizes.sum()))
        begun_ns = np.repeat(start_ns[own], sizes)
        more = int(n_more[which].sum())
        found[rank] = Inside(begun_ns + starts[at], begun_ns + ends[at], codes[at], states, more)
    return found


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
