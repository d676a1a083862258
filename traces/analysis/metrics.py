"""What a step is made of, rank by rank, adding up to the whole; and the headline of a run.

Everything is a sum of whole nanoseconds over the intervals of ``traces.analysis.activity``, so that the
parts of a step add up to its window exactly. Folded runs are analysed on the ranks that are stored, each
counted as often as it stands for a rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

import numpy as np
import pyarrow as pa

from foretrace.traces.analysis.activity import in_window, sweep
from foretrace.traces.analysis.windows import windows
from foretrace.traces.columns import factorized, flags, int64, is_one_of, labels
from foretrace.traces.errors import RunError
from foretrace.traces.run import Run

WARM_STEPS = 3
"""From this many steps on, the first recorded one is left out of averages: it fills caches and compiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Where the time of one step went on one rank.

    Attributes:
        rank: global rank; it stands for ``represents`` ranks.
        step: optimizer step, -1 if unnumbered.
        represents: number of ranks that share these spans, 1 unless the run is folded.
        window_ns: length of the step.
        ns: by state, in the order of ``traces.analysis.activity.states``; adds up to ``window_ns``.
        hidden_ns: by axis, time in which data of that axis moves behind compute; beside ``ns``, not in it.
        communication_ns: by axis, time in which a communication of that axis runs, waiting included.
    """

    rank: int
    step: int
    represents: int
    window_ns: int
    ns: Mapping[str, int]
    hidden_ns: Mapping[str, int]
    communication_ns: Mapping[str, int]

    @property
    def shares(self) -> dict[str, float]:
        """Return the states as shares of the window; they add up to 1."""
        return {state: ns / self.window_ns for state, ns in self.ns.items()}


def breakdown(run: Run) -> list[Breakdown]:
    """Return what each step of each stored rank is made of, by rank and step; kept with the run."""
    return run.derived(_breakdown)


def summarize(run: Run) -> dict[str, Any]:
    """Return the headline figures of a run as one JSON object.

    Keys:
        origin, name, world_size, n_ranks_stored, n_spans: what the run is; folded ranks are counted.
        steps: ``[{step, step_time_s, averaged}]``, where a step takes as long as on its slowest rank.
        step_time_s: median over the averaged steps.
        left_out: what is no training, as ``left_out`` returns it.
        shares: state to its share of step time, mean over ranks and averaged steps; adds up to 1.
        bubble_fraction: idle in the pipeline over **total** step time.
        exposed_comm_fraction: data moving and nobody computing, over step time; ``exposed_by_axis`` by axis.
        waiting_fraction: waiting for other ranks in collectives, over step time.
        hidden_by_axis: communication behind compute over step time; beside the shares.
        n_bounds: communications of all ranks whose times are bounds: they are in no share and not hidden.
        kinds: ``[{category, kind, axis, count, total_s, size_bytes, flops}]``, the sums over all ranks and
            steps of spans as they are, waiting included.

    Raises:
        RunError: the run has no step with a length.
    """
    rows = breakdown(run)
    if not rows:
        raise RunError(f"{run.path} holds no span with a length: nothing to analyse")
    times_ns = step_times_ns(rows)
    averaged = averaged_steps(run, times_ns)
    counted = [row for row in rows if row.step in averaged]
    shares = _mean(counted, [row.shares for row in counted])
    return {
        "origin": run.info.origin,
        "name": run.info.name,
        "world_size": run.info.world_size,
        "n_ranks_stored": len(run.stored_ranks),
        "n_spans": sum(run.spans([rank]).num_rows * n for rank, n in represented(run).items()),
        "step_time_s": median_low([times_ns[step] for step in averaged]) / 1e9,
        "steps": [
            {"step": step, "step_time_s": ns / 1e9, "averaged": step in averaged}
            for step, ns in times_ns.items()
        ],
        "left_out": left_out(run),
        "shares": shares,
        "bubble_fraction": shares["bubble"],
        "exposed_comm_fraction": sum(_by_axis(shares, "exposed").values()),
        "exposed_by_axis": _by_axis(shares, "exposed"),
        "waiting_fraction": sum(_by_axis(shares, "wait").values()),
        "hidden_by_axis": _mean(
            counted, [{axis: ns / row.window_ns for axis, ns in row.hidden_ns.items()} for row in counted]
        ),
        "n_bounds": sum(
            int(flags(run.spans([rank], ["is_bound"]), "is_bound").sum()) * n
            for rank, n in represented(run).items()
        ),
        "kinds": kinds(run),
    }


def step_times_ns(rows: Iterable[Breakdown]) -> dict[int, int]:
    """Return by step how long it took on its slowest rank."""
    times: dict[int, int] = {}
    for row in rows:
        times[row.step] = max(times.get(row.step, 0), row.window_ns)
    return dict(sorted(times.items()))


def averaged_steps(run: Run, times_ns: Mapping[int, int]) -> list[int]:
    """Return the steps that averages are over: all, but not the warm-up step of a recording."""
    steps = sorted(times_ns)
    return steps if run.info.origin == "simulated" or len(steps) < WARM_STEPS else steps[1:]


def left_out(run: Run) -> list[dict[str, Any]]:
    """Return the phases that are no training, by kind, of the rank that spends most time in them.

    Keys:
        kind: ``evaluation`` or ``checkpoint``.
        count, total_s: how many there are between steps, or before the first, and their time: in no step.
        count_inside, total_inside_s: how many steps contain, and their time: it is in that of the steps.
    """
    found: dict[str, tuple[int, int, int, int]] = {}
    for rank in run.stored_ranks:
        table = run.spans([rank], ["category", "kind", "step", "duration_ns"])
        table = table.filter(pa.array(is_one_of(table, "category", ("phase",))))
        codes, names = labels(table, "kind")
        step, ns = int64(table, "step"), int64(table, "duration_ns")
        for code in np.unique(codes).tolist():
            outside, inside = ((codes == code) & there for there in (step < 0, step >= 0))
            sums = int(ns[outside].sum()), int(ns[inside].sum()), int(outside.sum()), int(inside.sum())
            found[names[code]] = max(found.get(names[code], sums), sums)
    return [
        {
            "kind": kind,
            "count": count,
            "total_s": total_ns / 1e9,
            "count_inside": count_inside,
            "total_inside_s": inside_ns / 1e9,
        }
        for kind, (total_ns, inside_ns, count, count_inside) in sorted(found.items(), reverse=True)
    ]


def represented(run: Run) -> dict[int, int]:
    """Return by stored rank how many ranks of the world it stands for, itself included."""
    count = Counter(run.source(rank) for rank in run.ranks)
    return {rank: count[rank] for rank in run.stored_ranks}


def kinds(run: Run) -> list[dict[str, Any]]:
    """Return sums by category, kind and axis over all spans; folded ranks counted as often as they stand."""
    total: Counter[tuple[str, str, str, str]] = Counter()
    for rank, weight in represented(run).items():
        table = run.spans([rank])
        columns = [labels(table, name) for name in ("category", "kind", "axis")]
        if not table.num_rows:
            continue
        key = factorized(*(codes for codes, _ in columns))
        _, first = np.unique(key, return_index=True)
        sums = {"count": np.bincount(key)} | {
            name: _sums(key, int64(table, name)) for name in ("duration_ns", "size_bytes", "flops")
        }
        for number, row in enumerate(first):
            category, kind, axis = (names[codes[row]] for codes, names in columns)
            for name, values in sums.items():
                total[category, kind, axis, name] += int(values[number]) * weight
    return [
        {
            "category": category,
            "kind": kind,
            "axis": axis,
            "count": total[category, kind, axis, "count"],
            "total_s": total[category, kind, axis, "duration_ns"] / 1e9,
            "size_bytes": total[category, kind, axis, "size_bytes"],
            "flops": total[category, kind, axis, "flops"],
        }
        for category, kind, axis in sorted({key[:3] for key in total})
    ]


def _breakdown(run: Run) -> list[Breakdown]:
    found: list[Breakdown] = []
    weights = represented(run)
    for rank in run.stored_ranks:
        swept = sweep(run, rank)
        for window in (window for window in windows(run) if window.rank == rank):
            part = swept.inside(window)
            lengths = swept.lengths_ns(part)
            computing = swept.computing[part]
            found.append(
                Breakdown(
                    rank=rank,
                    step=window.step,
                    represents=weights[rank],
                    window_ns=window.duration_ns,
                    ns=in_window(run, swept, window, rank).total_ns(),
                    hidden_ns={
                        axis: int(lengths[mask[part] & computing].sum())
                        for axis, mask in swept.moving.items()
                    },
                    communication_ns={
                        axis: int(lengths[mask[part]].sum()) for axis, mask in swept.communicating.items()
                    },
                )
            )
    return found


def _mean(rows: Sequence[Breakdown], values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of *values*, one mapping per row, each counted as often as its rank stands for one."""
    weight = np.array([row.represents for row in rows], np.float64)
    names = values[0].keys()
    table = np.array([[value[name] for name in names] for value in values], np.float64).reshape(len(rows), -1)
    return dict(zip(names, (weight @ table / weight.sum()).tolist(), strict=True))


def _by_axis(shares: Mapping[str, float], state: str) -> dict[str, float]:
    """Return the shares of ``state:<axis>`` by axis."""
    return {name.partition(":")[2]: share for name, share in shares.items() if name.startswith(f"{state}:")}


def _sums(key: np.ndarray[Any, np.dtype[np.int64]], values: np.ndarray[Any, np.dtype[np.int64]]) -> Any:
    """Return the sum of *values* by *key*, in whole numbers."""
    total = np.zeros(int(key.max()) + 1, np.int64)
    np.add.at(total, key, values)
    return total
