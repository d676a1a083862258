"""What a step is made of, rank by rank, adding up to the whole; and the headline of a run.

Everything is a sum of whole nanoseconds over the intervals of ``traces.analysis.activity``, so that the
parts of a step add up to its window exactly. Folded runs are analysed on the ranks that are stored, each
counted as often as it stands for a rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from foretrace.traces.analysis.activity import Sweep, covered_by, states, sweep, window_state
from foretrace.traces.analysis.communications import arrivals
from foretrace.traces.analysis.windows import Window, windows, windows_of
from foretrace.traces.columns import (
    BoolArray,
    Int64Array,
    distinct,
    factorized,
    flags,
    int64,
    is_one_of,
    labels,
    summed,
)
from foretrace.traces.errors import RunError
from foretrace.traces.run import Inside, Run

WARM_STEPS = 3  # from this many steps on, a first recorded one that warms up is left out of averages

WARM_FACTOR = 1.05
"""A first step that takes longer than all others, and so many times their median, fills caches or compiles: a
convention."""


AWAITED = 0.05
"""Share of a step that a rank waits beside a phase of another, from which it is left out: our choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Where the time of one step went on one rank."""

    rank: int  # global rank; it stands for ``represents`` ranks
    step: int  # optimizer step, -1 if unnumbered
    represents: int  # number of ranks that share these spans, 1 unless the run is folded
    window_ns: int  # length of the step
    # by state, in the order of ``traces.analysis.activity.states``; adds up to ``window_ns``
    ns: Mapping[str, int]
    # by axis, time in which data of that axis moves behind compute; beside ``ns``, not in it
    hidden_ns: Mapping[str, int]
    # by axis, time in which a communication of that axis runs, waiting included
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
        assumed: what nothing tells and the figures assume, by what it is about.
        has_steps: whether anything marks steps; else the one step, of number -1, is all that there is.
        steps: ``[{step, step_time_s, averaged, why_not}]``; a step takes as long as on its slowest rank.
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
    return {
        **headline(run),
        "n_bounds": sum(run.once(_own_bounds, rank) * n for rank, n in represented(run).items()),
        "kinds": kinds(run),
    }


def headline(run: Run) -> dict[str, Any]:
    """Return the figures of ``summarize`` up to ``hidden_by_axis``. Raises RunError as it does."""
    rows = breakdown(run)
    if not rows:
        raise RunError(f"{run.path} holds no span with a length: nothing to analyse")
    times_ns = step_times_ns(rows)
    why_not, counted = unaveraged(run), averaged_rows(run)
    shares = mean_over_ranks(counted, [row.shares for row in counted])
    return {
        "origin": run.info.origin,
        "name": run.info.name,
        "world_size": run.info.world_size,
        "n_ranks_stored": len(run.stored_ranks),
        "n_spans": sum(
            (run.once(len, rank) + (run.inside[rank].n_more if rank in run.inside else 0)) * n
            for rank, n in represented(run).items()
        ),
        "has_steps": has_steps(run),
        "assumed": assumptions(run),
        "step_time_s": median_low([times_ns[step] for step in averaged_steps(run)]) / 1e9,
        "steps": [
            {"step": step, "step_time_s": ns / 1e9, "averaged": step not in why_not}
            | ({"why_not": why_not[step]} if step in why_not else {})
            for step, ns in times_ns.items()
        ],
        "left_out": left_out(run),
        "shares": shares,
        "bubble_fraction": shares["bubble"],
        "exposed_comm_fraction": sum(_by_axis(shares, "exposed").values()),
        "exposed_by_axis": _by_axis(shares, "exposed"),
        "waiting_fraction": sum(_by_axis(shares, "wait").values()),
        "hidden_by_axis": mean_over_ranks(
            counted, [{axis: ns / row.window_ns for axis, ns in row.hidden_ns.items()} for row in counted]
        ),
    }


def step_times_ns(rows: Iterable[Breakdown]) -> dict[int, int]:
    """Return by step how long it took on its slowest rank."""
    times: dict[int, int] = {}
    for row in rows:
        times[row.step] = max(times.get(row.step, 0), row.window_ns)
    return dict(sorted(times.items()))


def averaged_steps(run: Run) -> list[int]:
    """Return the steps that averages are over: all but those that ``unaveraged`` says."""
    return sorted(step_times_ns(breakdown(run)).keys() - unaveraged(run).keys())


def averaged_rows(run: Run) -> list[Breakdown]:
    """Return what the steps that averages are over are made of, by rank and step."""
    averaged = set(averaged_steps(run))
    return [row for row in breakdown(run) if row.step in averaged]


def typical_step(run: Run) -> tuple[int, int]:
    """Return the number of the step of median length, and its length in ns on its slowest rank.

    Raises RunError: the run has no step with a length.
    """
    times_ns, steps = step_times_ns(breakdown(run)), averaged_steps(run)
    if not steps:
        raise RunError(f"{run.path} holds no span with a length: nothing to compare")
    step = sorted(steps, key=lambda step: (times_ns[step], step))[(len(steps) - 1) // 2]
    return step, times_ns[step]


def unaveraged(run: Run) -> dict[int, str]:
    """Return the steps that averages leave out, and why; kept with the run.

    They run nothing, the first one warms up, or other ranks wait in them for one that saves or evaluates.
    """
    return run.derived(_unaveraged)


def _unaveraged(run: Run) -> dict[int, str]:
    times_ns = step_times_ns(breakdown(run))
    busy = {row.step for row in breakdown(run) if sum(row.ns.values()) > row.ns["other"]}
    found = {step: "runs nothing" for step in times_ns if step not in busy} if busy else {}
    kept = [step for step in sorted(times_ns) if step not in found]
    others = [times_ns[step] for step in kept[1:]]
    is_recorded = run.info.origin != "simulated" and len(kept) >= WARM_STEPS
    if is_recorded and times_ns[kept[0]] > max(*others, WARM_FACTOR * median_low(others)):
        found[kept[0]] = "warms up"
    awaiting = _awaiting(run) - set(found)
    if awaiting < set(times_ns) - set(found):  # where every step does so, it is part of them
        found |= dict.fromkeys(sorted(awaiting), "waits for a rank that saves or evaluates")
    return found


def grouped(whys: Mapping[int, str]) -> dict[str, list[int]]:
    """Return the steps that averages leave out by the reason."""
    found: dict[str, list[int]] = {}
    for step, why in whys.items():
        found.setdefault(why, []).append(step)
    return found


def in_plural(why: str) -> str:
    """Return the reason of one step, as it is said of several.

    >>> in_plural("warms up")
    'warm up'
    """
    verb, _, rest = why.partition(" ")
    return f"{verb.removesuffix('s')} {rest}"


def _awaiting(run: Run) -> set[int]:
    """Return the steps in which a rank waits in a communication while another is in a phase between steps."""
    bounds = np.concatenate([run.once(_phase_bounds, rank) for rank in run.stored_ranks])
    if not len(bounds):
        return set()
    point = distinct(bounds.ravel())
    covered = np.concatenate([[0], np.cumsum(np.diff(point) * covered_by(point, bounds[:, 0], bounds[:, 1]))])
    found, last_ns = set[int](), arrivals(run).last_ns
    for rank in run.stored_ranks:
        table = run.spans([rank], ["step", "start_ns"])
        start, step = int64(table, "start_ns"), int64(table, "step")
        beside_ns = np.interp(last_ns[rank], point, covered) - np.interp(start, point, covered)
        number, group = np.unique(step, return_inverse=True)
        longest_ns = np.zeros(len(number))
        np.maximum.at(longest_ns, group, beside_ns)
        longest = dict(zip(number.tolist(), longest_ns.tolist(), strict=True))
        found |= {
            window.step
            for window in windows_of(run, rank)
            if longest.get(window.step, 0) > AWAITED * window.duration_ns
        }
    return found


def _phase_bounds(table: pa.Table) -> Int64Array:
    """Return starts and ends of the phases of a rank that are in none of its steps, of shape (n, 2)."""
    rows = is_one_of(table, "category", ("phase",)) & (int64(table, "step") < 0)
    start = int64(table, "start_ns")[rows]
    return np.stack([start, start + int64(table, "duration_ns")[rows]], axis=1)


def assumptions(run: Run) -> dict[str, str]:
    """Return what of a run nothing tells and its figures assume, by what it is about."""
    said = (run.info.job or {}).get("assumed")
    return {str(what): str(text) for what, text in said.items()} if isinstance(said, Mapping) else {}


def has_steps(run: Run) -> bool:
    """Whether anything marks the steps of a run; else its only window is all that there is.

    A recording numbers spans from the first forward on, and marks each step that has ended.
    """
    steps = {window.step for window in windows(run)}
    if run.info.origin == "recorded" and len(steps) == 1:
        return any(run.once(_has_marks, rank) for rank in run.stored_ranks)
    return max(steps, default=-1) >= 0


def _has_marks(table: pa.Table) -> bool:
    return bool(is_one_of(table, "category", ("step",)).any())


def left_out(run: Run) -> list[dict[str, Any]]:
    """Return the phases that are no training, by kind, of the rank that spends most time in them.

    Keys:
        kind: ``evaluation`` or ``checkpoint``.
        count, total_s: how many there are between steps, or before the first, and their time: in no step.
        count_inside, total_inside_s: how many steps contain, and their time: it is in that of the steps.
    """
    found: dict[str, tuple[int, int, int, int]] = {}
    for rank in run.stored_ranks:
        for kind, sums in run.once(_own_phases, rank).items():
            found[kind] = max(found.get(kind, sums), sums)
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


def _own_bounds(table: pa.Table) -> int:
    return int(flags(table, "is_bound").sum())


def _own_phases(table: pa.Table) -> dict[str, tuple[int, int, int, int]]:
    """Return by kind of phase the time outside of and inside of steps, and how many there are."""
    table = table.select(["category", "kind", "step", "duration_ns"])
    table = table.filter(pa.array(is_one_of(table, "category", ("phase",))))
    codes, names = labels(table, "kind")
    step, ns = int64(table, "step"), int64(table, "duration_ns")
    found = {}
    for code in np.unique(codes).tolist():
        outside, inside = ((codes == code) & there for there in (step < 0, step >= 0))
        sums = int(ns[outside].sum()), int(ns[inside].sum()), int(outside.sum()), int(inside.sum())
        found[names[code]] = sums
    return found


def represented(run: Run) -> dict[int, int]:
    """Return by stored rank how many ranks of the world it stands for, itself included."""
    return run.derived(_represented)


def _represented(run: Run) -> dict[int, int]:
    count = Counter(run.source(rank) for rank in run.ranks)
    return {rank: count[rank] for rank in run.stored_ranks}


def kinds(run: Run) -> list[dict[str, Any]]:
    """Return sums by category, kind and axis over all spans; folded ranks counted as often as they stand."""
    total: dict[tuple[str, ...], list[int]] = {}
    for rank, weight in represented(run).items():
        for key, sums in run.once(_own_kinds, rank).items():
            before = total.get(key, [0] * len(sums))
            total[key] = [one + weight * more for one, more in zip(before, sums, strict=True)]
    return [
        {
            "category": category,
            "kind": kind,
            "axis": axis,
            "count": count,
            "total_s": ns / 1e9,
            "size_bytes": size_bytes,
            "flops": flops,
        }
        for (category, kind, axis), (count, ns, size_bytes, flops, _) in sorted(total.items())
    ]


def _own_kinds(table: pa.Table) -> dict[tuple[str, ...], list[int]]:
    amounts = [int64(table, name) for name in ("duration_ns", "size_bytes", "flops")]
    return sums_by_label(table, np.arange(table.num_rows), ("category", "kind", "axis"), amounts)


def sums_by_label(
    table: pa.Table, rows: NDArray[np.intp], names: Sequence[str], amounts: Sequence[Int64Array]
) -> dict[tuple[str, ...], list[int]]:
    """Return how many *rows* have the same labels in the columns *names*, by these labels.

    Behind that number stand the sums of *amounts*, which have a value for each row, and the largest of the
    first amount.
    """
    codes, spelled = zip(*(labels(table, name) for name in names), strict=True)
    key = factorized(*(one[rows] for one in codes))
    first, count, _ = summed(key, key)
    largest = np.zeros(len(count), np.int64)
    np.maximum.at(largest, key, amounts[0])
    columns = np.stack([count, *(summed(key, amount)[2] for amount in amounts), largest], axis=1)
    said = [tuple(of[one[row]] for one, of in zip(codes, spelled, strict=True)) for row in rows[first]]
    return dict(zip(said, columns.tolist(), strict=True))


def _breakdown(run: Run) -> list[Breakdown]:
    weights, like = represented(run), arrivals(run).like
    found: dict[int, list[Breakdown]] = {}
    for rank in run.stored_ranks:
        alike = found.get(like[rank])
        found[rank] = (
            [replace(row, rank=rank, represents=weights[rank]) for row in alike]
            if alike is not None
            else _steps_of(run, rank, weights[rank])
        )
    return [row for rows in found.values() for row in rows]


def _steps_of(run: Run, rank: int, represents: int) -> list[Breakdown]:
    """Return what each step of the stored *rank* is made of."""
    swept, windows, names, found = sweep(run, rank), windows_of(run, rank), states(run), []
    lengths = np.diff(swept.point_ns)
    parts = [swept.inside(window) for window in windows]

    def of_steps(mask: BoolArray) -> list[int]:
        return [int(lengths[part][mask[part]].sum()) for part in parts]

    hidden_ns = {axis: of_steps(mask & swept.computing) for axis, mask in swept.moving.items()}
    communication_ns = {axis: of_steps(mask) for axis, mask in swept.communicating.items()}
    for at, (window, part) in enumerate(zip(windows, parts, strict=True)):
        # Sums of whole nanoseconds, which a float has exactly for a hundred days.
        ns = np.bincount(window_state(run, swept, window), lengths[part], len(names)).astype(np.int64)
        row = Breakdown(
            rank=rank,
            step=window.step,
            represents=represents,
            window_ns=window.duration_ns,
            ns=dict(zip(names, ns.tolist(), strict=True)),
            hidden_ns={axis: each[at] for axis, each in hidden_ns.items()},
            communication_ns={axis: each[at] for axis, each in communication_ns.items()},
        )
        found.append(_opened(row, run.inside[rank], swept, window) if rank in run.inside else row)
    return found


def _opened(row: Breakdown, inside: Inside, swept: Sweep, window: Window) -> Breakdown:
    """Return *row* with the communications *inside* of spans, which it has as compute."""
    first, last = np.searchsorted(inside.start_ns, (window.start_ns, window.end_ns))
    start, end, state = (column[first:last] for column in inside[:3])
    lengths, part = end - start, swept.inside(window)
    ns, hidden_ns, communication_ns = dict(row.ns), dict(row.hidden_ns), dict(row.communication_ns)
    for at, (axis, behind) in enumerate(inside.states):
        own = int(lengths[state == at].sum())
        communication_ns[axis] += own
        if behind == "compute":
            hidden_ns[axis] += own
        elif not behind:
            ns["compute"] -= own
            ns[f"exposed:{axis}"] += own
    exposed = np.array([not behind for _, behind in inside.states], np.bool_)[state]
    start, end, lengths = start[exposed], end[exposed], lengths[exposed]
    if not len(start):
        return replace(row, ns=ns, hidden_ns=hidden_ns, communication_ns=communication_ns)
    # The time in which nothing computes, up to each edge of those communications.
    edges, done_ns = np.stack([start, end], axis=1).ravel(), np.zeros(2 * len(start), np.int64)
    np.cumsum(lengths, out=done_ns[1::2])
    done_ns[2::2] = done_ns[1:-1:2]
    for axis, mask in swept.moving.items():
        turns = np.flatnonzero(np.diff(mask[part].astype(np.int8), prepend=0, append=0))
        until_ns = np.interp(swept.point_ns[part.start + turns], edges, done_ns)
        hidden_ns[axis] -= round(float((until_ns[1::2] - until_ns[::2]).sum()))
    return replace(row, ns=ns, hidden_ns=hidden_ns, communication_ns=communication_ns)


def mean_over_ranks(rows: Sequence[Breakdown], values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of *values*, one mapping per row, each counted as often as its rank stands for one."""
    weight = np.array([row.represents for row in rows], np.float64)
    names = values[0].keys()
    table = np.array([[value[name] for name in names] for value in values], np.float64).reshape(len(rows), -1)
    return dict(zip(names, (weight @ table / weight.sum()).tolist(), strict=True))


def _by_axis(shares: Mapping[str, float], state: str) -> dict[str, float]:
    """Return the shares of ``state:<axis>`` by axis."""
    return {name.partition(":")[2]: share for name, share in shares.items() if name.startswith(f"{state}:")}
