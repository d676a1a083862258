"""What a recorded pipeline run would have taken if its operations had been alike, or faster.

The ideal run has every operation take the mean of all its like, over ranks, stages and steps: the mean
duration for compute, the median transfer for communication. A *slowdown* says how much longer the recorded
durations take than that; that of one kind, stage, replica or worker, how much longer if only its own
durations are put back.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from foretrace.traces.columns import Int64Array
from foretrace.traces.errors import RunError
from foretrace.traces.replay.waves import FloatArray
from foretrace.traces.replay.work import Parts, Replay, replay
from foretrace.traces.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Slowdowns: step time over that of the ideal run, mean over steps. 1.0 costs nothing."""

    step_time_s: float  # recorded
    undelayed_s: float  # without the delays between operations (launches, data loading)
    ideal_s: float  # with all operations alike
    slowdown: float  # ``undelayed_s / ideal_s``
    delay_slowdown: float  # ``step_time_s / undelayed_s``
    by_kind: Mapping[str, float]  # kind of operation to slowdown, worst first; so the others
    by_stage: Mapping[int, float]  # pipeline stage to slowdown
    by_replica: Mapping[int, float]  # data-parallel rank to slowdown
    by_worker: Mapping[int, float]  # rank to slowdown


def what_if(run: Run) -> WhatIf:
    """Return how much unlike durations cost a recorded pipeline run, and whose they are; kept with the run.

    Raises RunError: the run cannot be played again.
    """
    return run.derived(_what_if)


def _what_if(run: Run) -> WhatIf:
    played = replay(run)
    work = played.work
    actual = np.maximum(work.work_ns, 0).astype(np.float64)
    ideal = _ideal(played, actual)
    kind, kinds = _kinds(played)
    replica = _replicas(run)
    of_spans = [("kind", kind), ("stage", work.stage)]
    of_ranks = [("replica", replica), ("worker", np.array(run.stored_ranks, np.int64))]
    where = [(name, key, value) for name, key in of_spans for value in np.unique(key).tolist()]
    masks = [np.ones(len(actual), np.bool_), np.zeros(len(actual), np.bool_)]
    parts = Parts(played, actual, ideal)
    mean = parts.means_of_spans_s(itertools.chain(masks, (key == value for _, key, value in where)))
    undelayed, best = float(mean[0]), float(mean[1])
    some = [(name, key, value) for name, key in of_ranks for value in np.unique(key).tolist()]
    of_some = parts.means_s([key == value for _, key, value in some])
    groups = [*of_spans, *of_ranks]
    where += some
    mean = np.concatenate([mean, of_some])
    tables: dict[str, dict[Any, float]] = {name: {} for name, _ in groups}
    for (name, _, value), seconds in sorted(
        zip(where, mean[2:].tolist(), strict=True), key=lambda item: -item[1]
    ):
        tables[name][kinds[value] if name == "kind" else value] = seconds / best
    recorded = float(_recorded_ns(played).mean()) / 1e9
    return WhatIf(
        step_time_s=recorded,
        undelayed_s=undelayed,
        ideal_s=best,
        slowdown=undelayed / best,
        delay_slowdown=recorded / undelayed,
        by_kind=tables["kind"],
        by_stage=tables["stage"],
        by_replica=tables["replica"],
        by_worker=tables["worker"],
    )


def scaled(run: Run, factors: Mapping[str, float]) -> dict[int, float]:
    """Return by step how long it takes, in s, with operations of some kinds faster or slower.

    Delays stay as recorded: with factors of 1 the recorded times come out.

    Args:
        run: a pipeline run.
        factors: kind of operation, as ``WhatIf.by_kind`` names it, to the factor on its durations.

    Raises:
        RunError: the run cannot be played again, or has no operation of that kind.
    """
    played = replay(run)
    kind, kinds = _kinds(played)
    if unknown := sorted(set(factors) - set(kinds)):
        raise RunError(f"no operation {unknown[0]!r} in {run.path}; it has {', '.join(sorted(kinds))}")
    factor = np.array([factors.get(name, 1.0) for name in kinds])[kind]
    times = played.delayed_ns((played.work.work_ns * factor)[:, None])[:, 0]
    return {int(step): float(ns) / 1e9 for step, ns in zip(played.steps, times, strict=True)}


def _ideal(played: Replay, actual: FloatArray) -> FloatArray:
    """Return the duration of each span if it were like all others that do the same."""
    ideal = actual.copy()
    work = played.work
    order = np.argsort(work.like, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(work.like[order])) + 1):
        typical = _median if work.is_communication[rows].any() else _mean
        ideal[rows] = typical(actual[rows], work.weight[rows])
    return ideal


def _mean(values: FloatArray, weight: Int64Array) -> float:
    return float((values * weight).sum() / weight.sum())


def _median(values: FloatArray, weight: Int64Array) -> float:
    """Return the median of *values*, each taken *weight* times."""
    order = np.argsort(values)
    until, n = np.cumsum(weight[order]), int(weight.sum())
    low, high = values[order][np.searchsorted(until, ((n - 1) // 2, n // 2), side="right")]
    return float((low + high) / 2)


def _kinds(played: Replay) -> tuple[Int64Array, list[str]]:
    """Return what each span is, both ends of a transfer as one, and the names."""
    names = [name.replace("send ", "p2p ").replace("recv ", "p2p ") for name in played.work.names]
    distinct = sorted(set(names))
    code = np.array([distinct.index(name) for name in names], np.int64)
    of_span: Int64Array = code[played.work.what]
    return of_span, distinct


def _replicas(run: Run) -> Int64Array:
    """Return the data-parallel rank of each stored rank; 0 if the layout is unknown."""
    layout = run.info.layout
    return np.array([0 if layout is None else layout.coord(rank).dp for rank in run.stored_ranks], np.int64)


def _recorded_ns(played: Replay) -> FloatArray:
    """Return how long each step took."""
    work = played.work
    last = np.zeros(len(played.steps), np.int64)
    np.maximum.at(last, played.step, work.end_ns)
    times: FloatArray = last.astype(np.float64) - played.first_ns
    return times
