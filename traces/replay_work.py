"""The spans of a run as columns, with the communication that they take part in: what a replay is made of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from traces.activity import PASSES
from traces.columns import BoolArray, Int64Array, factorized, int64, is_one_of, labels
from traces.errors import RunError
from traces.run import Run


@dataclass(frozen=True, slots=True)
class Work:
    """The spans of all steps, of all stored ranks, as columns; times in ns, shape ``(n_spans,)``.

    Attributes:
        rank, step, stage: where each span belongs.
        what: index into ``names``: kind of pass, or operation and axis of a communication.
        names: what the spans are.
        start_ns, end_ns: as recorded.
        instance: number of the communication that a span takes part in, -1 if none.
        work_ns: duration; of a communication, from the last arrival to the end, which may be negative.
        is_communication: whether it moves data.
    """

    rank: Int64Array
    step: Int64Array
    stage: Int64Array
    what: Int64Array
    names: tuple[str, ...]
    start_ns: Int64Array
    end_ns: Int64Array
    instance: Int64Array
    work_ns: Int64Array
    is_communication: BoolArray


def collected(run: Run) -> tuple[Work, BoolArray]:
    """Return the spans of *run* as columns, sorted by rank, step and start; and which are passes."""
    table = run.spans()
    chosen = is_one_of(table, "category", ("compute", "collective", "p2p", "host", "copy"))
    chosen &= (int64(table, "step") >= 0) & ~is_one_of(table, "stream", ("idle",))
    table = table.filter(chosen)
    order = np.lexsort((int64(table, "start_ns"), int64(table, "step"), int64(table, "rank")))
    table = table.take(order)
    line = is_one_of(table, "kind", PASSES) & is_one_of(table, "category", ("compute",))
    if not line.any() or (int64(table, "microbatch")[line] < 0).any():
        raise RunError(
            f"{run.path}: its passes do not say their micro-batch, so that it cannot be played again; "
            "what-if needs a pipeline run"
        )
    start = int64(table, "start_ns")
    end = start + int64(table, "duration_ns")
    communication = is_one_of(table, "category", ("collective", "p2p"))
    instance = instances(table)
    last = start.copy()
    joined = instance >= 0
    latest = np.full(int(instance.max(initial=-1)) + 1, np.iinfo(np.int64).min)
    np.maximum.at(latest, instance[joined], start[joined])
    last[joined] = latest[instance[joined]]
    what, names = _what(table)
    stage = int64(table, "stage")
    work = Work(
        int64(table, "rank"),
        int64(table, "step"),
        stage,
        what,
        names,
        start,
        end,
        instance,
        end - last,
        communication,
    )
    return work, line


def instances(table: pa.Table) -> Int64Array:
    """Return a number per communication that several spans take part in, -1 elsewhere."""
    sequence, group = int64(table, "sequence"), int64(table, "group")
    rank, peer = int64(table, "rank"), int64(table, "peer")
    p2p = is_one_of(table, "category", ("p2p",)) & (peer >= 0)
    sends = is_one_of(table, "kind", ("send",))
    sender = np.where(p2p, np.where(sends, rank, peer), -1)
    receiver = np.where(p2p, np.where(sends, peer, rank), -1)
    joinable = is_one_of(table, "category", ("collective", "p2p")) & (sequence >= 0) & (group >= 0)
    instance = np.full(len(sequence), -1, np.int64)
    rows = np.flatnonzero(joinable)
    if len(rows):
        instance[rows] = factorized(
            *(key[rows] for key in (group, sender, receiver, sequence, int64(table, "step")))
        )
    return instance


def _what(table: pa.Table) -> tuple[Int64Array, tuple[str, ...]]:
    """Return what each span is: its kind, with the axis of a collective, the direction of a transfer."""
    kinds, kind_names = labels(table, "kind")
    axes, axis_names = labels(table, "axis")
    categories, category_names = labels(table, "category")
    names, spelled = labels(table, "name")
    rank, peer = int64(table, "rank"), int64(table, "peer")
    upward = (peer > rank) == is_one_of(table, "kind", ("send",))
    found: dict[str, int] = {}
    what = np.empty(len(rank), np.int64)
    for row in range(len(rank)):
        said = kind_names[kinds[row]]
        if category_names[categories[row]] == "p2p":
            told = spelled[names[row]].partition("-")[0]
            direction = told if told in {"forward", "backward"} else "forward" if upward[row] else "backward"
            said = f"{said} {direction}"
        elif axis_names[axes[row]]:
            said = f"{said} {axis_names[axes[row]]}"
        what[row] = found.setdefault(said, len(found))
    return what, tuple(found)


def by_place(work: Work) -> list[Int64Array]:
    """Return the rows of each rank in each step, by start."""
    key = factorized(work.rank, work.step)
    first = np.flatnonzero(np.diff(key, prepend=-1))
    return [np.arange(a, b) for a, b in zip(first, np.append(first[1:], len(key)), strict=True)]
