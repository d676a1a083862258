"""What a rank is doing at every moment of a step: intervals that cover the step's window exactly.

Every nanosecond is in exactly one state, by the table in docs/architecture.md, section 3:

========================  ==========================================================================
``compute``               a compute or copy span is running, except copies of offloaded data and batches
``exposed:<axis>``        else, a communication span of that axis is past the last arrival
``exposed:host``          else, offloaded data, or a batch, is copied to or from the host
``bubble``                else, a pp span waits for its peer; or, with pp > 1, nothing runs, or only a
                          collective of the whole world waits, and the rank has not begun, or has
                          finished, its forward and backward work
``wait:<axis>``           else, a communication span of that axis waits for other ranks
``host:optimizer``        else, the optimizer runs on the host
``other``                 else
========================  ==========================================================================

If several axes compete for one state, the innermost one of ``traces.layout.AXES`` takes precedence. A run
without copies of offloaded data or batches has no ``exposed:host``. A communication whose times are bounds
is in none of these states: when it moved data, and when it waited, is not known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from foretrace.traces.analysis.communications import COMMUNICATION, arrivals
from foretrace.traces.analysis.windows import Window, windows_of
from foretrace.traces.columns import (
    BoolArray,
    Int64Array,
    bounds,
    distinct,
    flags,
    int64,
    is_one_of,
    labels,
    points,
)
from foretrace.traces.errors import RunError
from foretrace.traces.info import rank_list
from foretrace.traces.layout import AXES
from foretrace.traces.run import Run
from foretrace.traces.timeline import MARKS

PASSES: Final = ("forward", "backward", "backward_input", "backward_weight", "recompute")
"""Kinds of spans that are a rank's forward and backward work."""

UNNAMED_AXIS: Final = "unknown"  # axis of a communication span without one

StateArray = NDArray[np.int16]


@dataclass(frozen=True, slots=True)
class Activity:
    """What one rank does during one step, as consecutive intervals.

    Interval *i* runs from ``start_ns[i]`` to ``end_ns[i]``, where *i + 1* starts; the first starts and the
    last ends with the window. Adjacent intervals differ in state. Arrays have shape ``(n_intervals,)``.
    """

    rank: int  # global rank
    step: int  # optimizer step
    # bounds of the intervals
    start_ns: Int64Array
    end_ns: Int64Array
    state: StateArray  # index into ``states``
    states: tuple[str, ...]  # names of the states, the same for all ranks and steps of a run

    def total_ns(self) -> dict[str, int]:
        """Return the time spent in each state; the values add up to the window."""
        total = np.zeros(len(self.states), np.int64)
        np.add.at(total, self.state, self.end_ns - self.start_ns)
        return dict(zip(self.states, total.tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class Sweep:
    """The state of one rank between any two neighbouring events of its whole timeline.

    Interval *i* lies between ``point_ns[i]`` and ``point_ns[i + 1]``; masks have shape ``(n_points - 1,)``.
    """

    point_ns: Int64Array  # times at which anything starts, ends or arrives, ascending; shape ``(n_points,)``
    state: StateArray  # index into the states of the run, without those that depend on the window
    computing: BoolArray  # a compute or copy span is running, except copies of offloaded data and batches
    idle: BoolArray  # no span is running
    # by axis, a communication span is past the last arrival; by ``HOST``, copies of offloaded data
    moving: dict[str, BoolArray]
    communicating: dict[str, BoolArray]  # by axis, a communication span is running, waiting included
    # starts and ends of the forward and backward spans, by start
    pass_start_ns: Int64Array
    pass_end_ns: Int64Array
    pass_until_ns: Int64Array  # by when each of them and all before it have ended

    def inside(self, window: Window) -> slice:
        """Return the intervals that make up *window*, whose edges are points."""
        first, last = np.searchsorted(self.point_ns, (window.start_ns, window.end_ns))
        return slice(int(first), int(last))

    def lengths_ns(self, part: slice) -> Int64Array:
        """Return the lengths of the intervals in *part*."""
        return np.diff(self.point_ns[part.start : part.stop + 1])


def activity(run: Run, rank: int, step: int) -> Activity:
    """Return what *rank* does during *step*.

    Args:
        run: an open run.
        rank: global rank; a folded one does what its representative does.
        step: optimizer step.

    Raises:
        RunError: the run has no such rank or step.
    """
    if rank not in run.ranks:
        raise RunError(f"no spans of rank {rank} in {run.path}; it has ranks {rank_list(run.ranks)}")
    stored = run.source(rank)
    window = next((w for w in windows_of(run, stored) if w.step == step), None)
    if window is None:
        steps = sorted({w.step for w in windows_of(run, stored)})
        raise RunError(f"no step {step} on rank {rank} in {run.path}; it has steps {rank_list(steps)}")
    recent = run.derived(_recent)
    if stored not in recent:
        recent.clear()
        recent[stored] = sweep(run, stored)
    return in_window(run, recent[stored], window, rank)


def in_window(run: Run, swept: Sweep, window: Window, rank: int) -> Activity:
    """Return the part of *swept* inside *window*, as the activity of *rank*."""
    part = swept.inside(window)
    state = window_state(run, swept, window)
    point = swept.point_ns[part.start : part.stop + 1]
    first = np.flatnonzero(np.diff(state, prepend=-1))
    ends = np.append(point[first[1:]], point[-1:])
    return Activity(rank, window.step, point[first], ends, state[first], states(run))


def window_state(run: Run, swept: Sweep, window: Window) -> StateArray:
    """Return the state of each interval of *window*, with the bubbles at its two ends."""
    part = swept.inside(window)
    state = swept.state[part].copy()
    if not is_pipelined(run):
        return state
    near = slice(
        int(np.searchsorted(swept.pass_until_ns, window.start_ns, side="right")),
        int(np.searchsorted(swept.pass_start_ns, window.end_ns)),
    )
    within = swept.pass_end_ns[near] > window.start_ns
    if within.any():
        start = swept.point_ns[part]
        begun = swept.pass_start_ns[near][within].min()
        finished = swept.pass_end_ns[near][within].max()
        unoccupied = swept.idle[part]
        if "world" in axes(run):  # a norm over all gradients waits for the last stage to finish
            unoccupied = unoccupied | (state == states(run).index("wait:world"))
        state[unoccupied & ((start < begun) | (start >= finished))] = states(run).index("bubble")
    return state


def states(run: Run) -> tuple[str, ...]:
    """Return the names of the possible states of the ranks of *run*, in order of precedence."""
    named, offloaded = axes(run), run.derived(offloaded_states)
    return (
        "compute",
        *(f"exposed:{axis}" for axis in named),
        *(state for state in (OFFLOADING,) if state in offloaded),
        "bubble",
        *(f"wait:{axis}" for axis in named if axis != "pp"),
        *(state for state in (HOST_OPTIMIZER,) if state in offloaded),
        "other",
    )


def axes(run: Run) -> tuple[str, ...]:
    """Return the axes along which the stored ranks communicate, innermost first; cached with the run."""
    return run.derived(_axes)


def is_pipelined(run: Run) -> bool:
    """Whether the run has more than one pipeline stage, so that a rank can be idle in a bubble."""
    return run.info.layout.pp > 1 if run.info.layout is not None else "pp" in axes(run)


def stage_of(run: Run, rank: int) -> int:
    """Return the pipeline stage of *rank*: by the layout, else the first in its spans; -1 if none."""
    if run.info.layout is not None:
        return run.info.layout.coord(rank).pp
    return run.once(_own_stage, rank)


def _own_stage(table: pa.Table) -> int:
    said = int64(table, "stage")
    return int(said[said >= 0][0]) if (said >= 0).any() else -1


def sweep(run: Run, rank: int) -> Sweep:
    """Sweep once through the timeline of the stored *rank*."""
    table = run.spans([rank])
    start, end = bounds(table)
    last = arrivals(run).last_ns[rank]
    edges = [edge for w in windows_of(run, rank) for edge in (w.start_ns, w.end_ns)]
    point, (starts, ends, lasts, _) = points([start, end, last, np.array(edges, np.int64)])

    def covered(rows: BoolArray, opens: Int64Array, closes: Int64Array) -> BoolArray:
        return _covered(len(point), opens[rows], closes[rows])

    computing = covered(is_work(table), starts, ends)
    communication = is_one_of(table, "category", COMMUNICATION) & ~flags(table, "is_bound")
    waits = communication & (lasts > starts)
    blocked = is_one_of(table, "category", ("wait",)) & ~is_one_of(table, "axis", ("",))
    of_axis = {axis: _on_axis(table, axis) for axis in axes(run)}
    moving = {axis: covered(communication & rows, lasts, ends) for axis, rows in of_axis.items()}
    waiting = {
        axis: covered(waits & rows, starts, lasts) | covered(blocked & rows, starts, ends)
        for axis, rows in of_axis.items()
    }
    communicating = {axis: moving[axis] | waiting[axis] for axis in of_axis}
    named, on_host = states(run), covered(is_host_optimizer(table), starts, ends)
    if OFFLOADING in named:
        moving[HOST] = covered(is_offloading(table), starts, ends)
    passes = np.flatnonzero(is_one_of(table, "kind", PASSES) & is_one_of(table, "category", ("compute",)))
    passes = passes[np.argsort(start[passes], kind="stable")]
    return Sweep(
        point_ns=point,
        state=_ranked(named, computing, moving, waiting, on_host),
        computing=computing,
        idle=~covered(~is_one_of(table, "category", MARKS), starts, ends),
        moving=moving,
        communicating=communicating,
        pass_start_ns=start[passes],
        pass_end_ns=end[passes],
        pass_until_ns=np.maximum.accumulate(end[passes]),
    )


def _ranked(
    names: tuple[str, ...],
    computing: BoolArray,
    moving: dict[str, BoolArray],
    waiting: dict[str, BoolArray],
    on_host: BoolArray,
) -> StateArray:
    """Return the first state of *names* that applies to each interval; the last one always does."""
    applies = {f"exposed:{axis}": mask for axis, mask in moving.items()}
    applies |= {f"wait:{axis}": mask for axis, mask in waiting.items()}
    applies |= {"compute": computing, HOST_OPTIMIZER: on_host}
    if "pp" in waiting:
        applies["bubble"] = waiting["pp"]
    state = np.full(len(computing), len(names) - 1, np.int16)
    for code in reversed(range(len(names) - 1)):
        if (mask := applies.get(names[code])) is not None:
            state[mask] = code
    return state


def covered_by(point: Int64Array, start: Int64Array, end: Int64Array) -> BoolArray:
    """Return which intervals between neighbours of *point* lie in any of the spans from *start* to *end*.

    Args:
        point: ascending times, shape ``(n_points,)``; every start and end is one of them.
        start: when each span starts, shape ``(n_spans,)``.
        end: when each span ends.

    Returns:
        Mask of shape ``(n_points - 1,)``.
    """
    return _covered(len(point), np.searchsorted(point, start), np.searchsorted(point, end))


def _covered(n_points: int, opens: NDArray[np.intp], closes: NDArray[np.intp]) -> BoolArray:
    """Return which intervals between points lie in any of the spans that open and close at some of them."""
    if not len(opens):
        return np.zeros(max(n_points - 1, 0), np.bool_)
    opened = np.bincount(opens, minlength=n_points)
    opened -= np.bincount(closes, minlength=n_points)
    return np.cumsum(opened)[:-1] > 0


def _on_axis(table: pa.Table, axis: str) -> BoolArray:
    """Return which rows have *axis*."""
    return is_one_of(table, "axis", ("", UNNAMED_AXIS) if axis == UNNAMED_AXIS else (axis,))


def _axes(run: Run) -> tuple[str, ...]:
    found = {axis for rank in run.stored_ranks for axis in run.once(_own_axes, rank)}
    found |= {axis for inside in run.inside.values() for axis, _ in inside.states}
    return tuple(sorted(found, key=lambda axis: (AXES.index(axis) if axis in AXES else len(AXES), axis)))


def _own_axes(table: pa.Table) -> set[str]:
    codes, names = labels(table, "axis")
    communication = is_one_of(table, "category", COMMUNICATION)
    blocked = is_one_of(table, "category", ("wait",))
    found = {names[code] or UNNAMED_AXIS for code in distinct(codes[communication].astype(np.int64))}
    return found | {names[code] for code in distinct(codes[blocked].astype(np.int64)) if names[code]}


def _recent(_run: Run) -> dict[int, Sweep]:
    """Return the cache of the sweep of the most recently requested rank."""
    return {}


# What of a step is due to the host: copies to and from it, and an optimizer that runs there.

HOST: Final = "host"  # what copies to and from the host move along, beside the axes of a layout

OFFLOADING: Final = f"exposed:{HOST}"
"""State of a rank that waits for copies of what is offloaded, or of what it is fed."""

KINDS: Final = ("offload", "input")
"""Kinds of such copies: of what is kept on the host for want of memory, and of what is made there."""

HOST_OPTIMIZER: Final = "host:optimizer"  # state of a rank that waits for the optimizer that runs on its host


def is_work(table: pa.Table) -> BoolArray:
    """Return which rows are work of the device: compute, and copies other than those of ``KINDS``."""
    return is_one_of(table, "category", ("compute", "copy")) & ~is_offloading(table)


def is_offloading(table: pa.Table) -> BoolArray:
    """Return which rows are copies to and from the host of what is offloaded, or of what a rank is fed."""
    return is_one_of(table, "category", ("copy",)) & is_one_of(table, "kind", KINDS)


def is_host_optimizer(table: pa.Table) -> BoolArray:
    """Return which rows are an optimizer that runs on the host."""
    return is_one_of(table, "category", ("host",)) & is_one_of(table, "kind", ("optimizer",))


def offloaded_states(run: Run) -> frozenset[str]:
    """Return which of the states that the host causes occur."""
    return frozenset(state for rank in run.stored_ranks for state in run.once(_own_states, rank))


def _own_states(table: pa.Table) -> set[str]:
    applies = {OFFLOADING: is_offloading(table), HOST_OPTIMIZER: is_host_optimizer(table)}
    return {state for state, rows in applies.items() if rows.any()}
