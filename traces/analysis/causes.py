"""Where the time of one step goes, cause by cause, adding up to the step of the slowest rank exactly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from foretrace.traces.analysis.activity import (
    PASSES,
    UNNAMED_AXIS,
    Sweep,
    covered_by,
    states,
    sweep,
    window_state,
)
from foretrace.traces.analysis.arrivals import arrivals
from foretrace.traces.analysis.communications import COMMUNICATION
from foretrace.traces.analysis.metrics import represented
from foretrace.traces.analysis.offloaded import is_work
from foretrace.traces.analysis.windows import Window, windows
from foretrace.traces.columns import int64, is_one_of, labels
from foretrace.traces.run import Run

RANK_SPREAD: Final = "rank spread"
"""Cause for the time from the end of the mean rank to that of the slowest, with which the step ends."""


def causes(run: Run, step: int, *, detailed: bool = False) -> dict[str, int]:
    """Return where the time of *step* went, in ns on the mean rank; the values add up to the slowest rank.

    Causes are the states of ``traces.analysis.activity`` with ``compute`` split into ``compute:<kind>``, and
    ``RANK_SPREAD``, by which the mean rank ends before the slowest. Rounding loses nothing: what is left
    over goes to the causes with the largest remainders. If *detailed*, exposed communication and waiting are
    split by the kind of communication.
    """
    weights = represented(run)
    chosen = [window for window in windows(run) if window.step == step]
    longest_ns = max(window.duration_ns for window in chosen)
    total: Counter[str] = Counter()
    for window in chosen:
        total[RANK_SPREAD] += (longest_ns - window.duration_ns) * weights[window.rank]
        for name, ns in _rank_causes(run, window, detailed=detailed).items():
            total[name] += ns * weights[window.rank]
    return _shared_out(total, sum(weights[window.rank] for window in chosen))


def _rank_causes(run: Run, window: Window, *, detailed: bool) -> dict[str, int]:
    """Return the causes of one step on one rank; they add up to its window."""
    swept = sweep(run, window.rank)
    part = swept.inside(window)
    lengths = swept.lengths_ns(part)
    state = window_state(run, swept, window)
    kind, kinds = _compute_kinds(run, window.rank, swept)
    names = [*states(run), *(f"compute:{name}" for name in kinds)]
    computing = state == states(run).index("compute")
    cause = np.where(computing, len(states(run)) + kind[part], state)
    if detailed:
        cause = _by_kind_of_communication(run, window, swept, cause, names)
    total = np.bincount(cause, lengths, len(names)).astype(np.int64)  # float sums of ns: exact below 2^53
    return {name: ns for name, ns in zip(names, total.tolist(), strict=True) if name != "compute"}


def _by_kind_of_communication(
    run: Run, window: Window, swept: Sweep, cause: NDArray[np.int64], names: list[str]
) -> NDArray[np.int64]:
    """Return *cause* with exposed communication and waiting split by kind.

    New causes go to the end of *names*. While several kinds of one axis are under way, the time
    counts for the first of them by name.
    """
    table, part = run.spans([window.rank]), swept.inside(window)
    start = int64(table, "start_ns")
    end, last = start + int64(table, "duration_ns"), arrivals(run).last_ns[window.rank]
    found, split = cause.copy(), len(names)
    for code, name in enumerate(names[:split]):
        head, _, axis = name.partition(":")
        if head not in ("exposed", "wait") or not (cause == code).any():
            continue
        of_axis = is_one_of(table, "axis", ("", axis) if axis == UNNAMED_AXIS else (axis,))
        rows = of_axis & is_one_of(table, "category", COMMUNICATION)
        codes, kinds = labels(table, "kind")
        begin, until = (last, end) if head == "exposed" else (start, last)
        # Backwards, so that the first by name is written last, and stays.
        for kind in sorted({kinds[i] for i in np.unique(codes[rows])}, reverse=True):
            chosen = rows & (codes == kinds.index(kind))
            names.append(f"{name}:{kind}")
            under_way = covered_by(swept.point_ns, begin[chosen], until[chosen])[part]
            found[under_way & (cause == code)] = len(names) - 1
    return found


def _compute_kinds(run: Run, rank: int, swept: Sweep) -> tuple[NDArray[np.int64], list[str]]:
    """Return which kind of compute runs in each interval; of several, the first of the list counts."""
    table = run.spans([rank])
    start = int64(table, "start_ns")
    end = start + int64(table, "duration_ns")
    codes, names = labels(table, "kind")
    work = is_work(table)
    present = sorted({names[code] for code in np.unique(codes[work])}, key=_pass_order)
    kind = np.zeros(len(swept.point_ns) - 1, np.int64)
    # Backwards, so that the first of the list is written last, and stays.
    for number in reversed(range(len(present))):
        rows = work & (codes == names.index(present[number]))
        kind[covered_by(swept.point_ns, start[rows], end[rows])] = number
    return kind, present


def _shared_out(total: Mapping[str, int], n_ranks: int) -> dict[str, int]:
    """Return each value of *total* divided by *n_ranks*, rounded so that they add up to the divided sum.

    Values with the largest remainders are rounded up.
    """
    mean = {name: ns // n_ranks for name, ns in total.items()}
    left = sum(total.values()) // n_ranks - sum(mean.values())
    for name in sorted(total, key=lambda name: (-(total[name] % n_ranks), name))[:left]:
        mean[name] += 1
    return mean


def _pass_order(kind: str) -> tuple[int, str]:
    """Sort kinds of compute: forward and backward work first, then by name."""
    return (PASSES.index(kind) if kind in PASSES else len(PASSES), kind)


def precedence(cause: str) -> tuple[int, tuple[int, str]]:
    """Sort causes as a person reads them: work, then exposed communication, then waiting, then the rest."""
    order = ("compute", "exposed", "bubble", "wait", "host", "other", RANK_SPREAD)
    head, _, tail = cause.partition(":")
    return order.index(head), _pass_order(tail)
