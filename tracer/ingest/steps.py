"""Windows of the steps in a trace, as ``ProfilerStep`` annotations mark them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from foretrace.tracer.ingest.events import whole
from foretrace.tracer.ingest.notes import STEP, Notes
from foretrace.tracer.ingest.rows import rows
from foretrace.tracer.kernels import N_STEPS
from foretrace.traces.columns import BoolArray, Int64Array, int64
from foretrace.traces.timeline import empty


@dataclass(frozen=True, slots=True)
class Steps:
    """Windows of optimizer steps on one rank, one behind the other; times in ns, shape ``(n_steps,)``.

    Attributes:
        number: number of each step.
        start_ns, end_ns: bounds; a step ends where the next begins.
        tid: thread that marked them, -1 if there are none.
        optimizer: start and end of ``Optimizer.step`` annotations, shape ``(n, 2)``.
        n_steps: the first that had not ended, None: all had, as far as is known.
    """

    number: Int64Array
    start_ns: Int64Array
    end_ns: Int64Array
    tid: int
    optimizer: Int64Array
    n_steps: int | None = None

    def at(self, t_ns: Int64Array) -> NDArray[np.int32]:
        """Return the number of the step in which each moment lies, -1 outside; the last step is open."""
        if not len(self.number):
            return np.full(len(t_ns), -1, np.int32)
        index = np.searchsorted(self.start_ns, t_ns, side="right") - 1
        return np.where(index >= 0, self.number[index], -1).astype(np.int32)

    def in_optimizer(self, t_ns: Int64Array) -> BoolArray:
        """Return which moments lie in an ``Optimizer.step`` annotation."""
        if not len(self.optimizer):
            return np.zeros(len(t_ns), np.bool_)
        index = np.searchsorted(self.optimizer[:, 0], t_ns, side="right") - 1
        inside: BoolArray = (index >= 0) & (t_ns <= self.optimizer[index, 1])
        return inside


def steps_of(notes: Notes, header: Mapping[str, Any]) -> Steps:
    """Return the steps that ``ProfilerStep`` annotations of the host mark.

    Args:
        notes: the annotations.
        header: keys of the file beside its events.
    """
    marks: dict[int, int] = {}
    optimizer: list[int] = []
    for row, note in enumerate(notes.notes):
        if note.name.startswith("ProfilerStep#"):
            if found := STEP.fullmatch(note.name):
                marks.setdefault(int(found[1]), row)
        elif note.name.startswith("Optimizer.step#"):
            optimizer.append(row)
    rows_ = np.array(list(marks.values()), np.int64)
    number = np.array(list(marks), np.int64)
    order = np.argsort(notes.start_ns[rows_], kind="stable")
    rows_, number = rows_[order], number[order]
    start, end = notes.start_ns[rows_], notes.end_ns[rows_].copy()
    end[:-1] = start[1:]
    tid = int(notes.tid[rows_[0]]) if len(rows_) else -1
    within = np.stack([notes.start_ns[optimizer], notes.end_ns[optimizer]], axis=1)
    within = within[np.argsort(within[:, 0], kind="stable")]
    return Steps(number, start, end, tid, within, whole(header.get(N_STEPS)))


def step_rows(steps: Steps, spans: pa.Table) -> pa.Table:
    """Return the rows that mark the steps that have ended; the last one marked ends with the last span."""
    if not len(steps.number):
        return empty()
    end = steps.end_ns.copy()
    end[-1] = max(int(end[-1]), int((int64(spans, "start_ns") + int64(spans, "duration_ns")).max(initial=0)))
    if steps.n_steps is not None:
        ended = steps.number < steps.n_steps
        steps = replace(steps, number=steps.number[ended], start_ns=steps.start_ns[ended])
        end = end[ended]
    return rows(
        {
            "rank": np.zeros(len(end), np.int32),
            "stream": ["step"] * len(end),
            "category": ["step"] * len(end),
            "kind": ["step"] * len(end),
            "name": [f"step {step}" for step in steps.number],
            "start_ns": steps.start_ns,
            "duration_ns": end - steps.start_ns,
            "step": steps.number.astype(np.int32),
        }
    )
