"""Two runs side by side: what one step took in each, and which causes make up the difference.

A typical step of each run is taken apart into causes that add up to it exactly, so that the differences of
the causes add up to the difference of the steps. Spans are joined one by one beside it, in ``traces.join``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from traces.activity import PASSES, Sweep, covered_by, states, sweep, window_state
from traces.columns import int64, is_one_of, labels
from traces.errors import RunError
from traces.join import JoinedSpans, join_spans
from traces.metrics import averaged_steps, breakdown, represented, step_times_ns
from traces.run import Run
from traces.windows import Window, windows

RANK_SPREAD: Final = "rank spread"
"""Cause: the mean rank ends its step before the slowest one, which says how long the step took."""


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause of step time in two runs: a state of ``traces.activity``, compute split by kind."""

    name: str
    a_ns: int
    b_ns: int

    @property
    def difference_ns(self) -> int:
        """Time that this cause takes in *b* more than in *a*."""
        return self.b_ns - self.a_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What two runs have in common and what not; *a* is usually simulated, *b* measured.

    Attributes:
        a_name, b_name: what to call the runs.
        a_step, b_step: the step of each that is compared, the one of median length.
        a_step_ns, b_step_ns: how long it takes on its slowest rank.
        causes: mean over ranks; ``a_ns`` adds up to ``a_step_ns``, ``b_ns`` to ``b_step_ns``, exactly.
        spans: the spans of the two steps, joined one to one.
        warnings: of both runs, and what limits the comparison.
    """

    a_name: str
    b_name: str
    a_step: int
    b_step: int
    a_step_ns: int
    b_step_ns: int
    causes: tuple[Cause, ...]
    spans: JoinedSpans
    warnings: tuple[str, ...]

    @property
    def ratio(self) -> float:
        """Step time of *a* over that of *b*; ``ratio - 1`` is the error of a prediction *a*."""
        return self.a_step_ns / self.b_step_ns

    @property
    def joined(self) -> pa.Table:
        """The joined spans, in the columns of ``traces.join.JOINED``."""
        return self.spans.table

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as one JSON object, without the single spans."""
        return {
            "a": {"name": self.a_name, "step": self.a_step, "step_time_s": self.a_step_ns / 1e9},
            "b": {"name": self.b_name, "step": self.b_step, "step_time_s": self.b_step_ns / 1e9},
            "ratio": self.ratio,
            "difference_s": (self.b_step_ns - self.a_step_ns) / 1e9,
            "causes": [
                {
                    "name": c.name,
                    "a_s": c.a_ns / 1e9,
                    "b_s": c.b_ns / 1e9,
                    "difference_s": c.difference_ns / 1e9,
                }
                for c in self.causes
            ],
            "spans": self.spans.to_dict(),
            "warnings": list(self.warnings),
        }


def compare(a: Run, b: Run) -> Comparison:
    """Compare a typical step of *a* with a typical step of *b*.

    The step of median length is typical; the first step of a recording is left out where there are enough.
    Layouts may differ: causes are means over all ranks of each run.

    Raises:
        RunError: one of the runs has no step with a length.
    """
    a_step, a_step_ns = typical_step(a)
    b_step, b_step_ns = typical_step(b)
    a_causes, b_causes = causes(a, a_step), causes(b, b_step)
    names = [*a_causes, *(name for name in b_causes if name not in a_causes)]
    return Comparison(
        a_name=_name(a),
        b_name=_name(b),
        a_step=a_step,
        b_step=b_step,
        a_step_ns=a_step_ns,
        b_step_ns=b_step_ns,
        causes=tuple(
            Cause(name, a_causes.get(name, 0), b_causes.get(name, 0))
            for name in sorted(names, key=_precedence)
        ),
        spans=join_spans(a, a_step, b, b_step),
        warnings=(*(f"{_name(a)}: {w}" for w in a.warnings), *(f"{_name(b)}: {w}" for w in b.warnings)),
    )


def typical_step(run: Run) -> tuple[int, int]:
    """Return the number of the step of median length, and its length in ns on its slowest rank.

    Raises:
        RunError: the run has no step with a length.
    """
    times_ns = step_times_ns(breakdown(run))
    steps = averaged_steps(run, times_ns)
    if not steps:
        raise RunError(f"{run.path} holds no span with a length: nothing to compare")
    step = sorted(steps, key=lambda step: (times_ns[step], step))[(len(steps) - 1) // 2]
    return step, times_ns[step]


def causes(run: Run, step: int) -> dict[str, int]:
    """Return where the time of *step* went, in ns on the mean rank; the values add up to the slowest rank.

    Causes are the states of ``traces.activity`` with ``compute`` split into ``compute:<kind>``, and
    ``RANK_SPREAD``, by which the mean rank ends before the slowest. Rounding loses nothing: what is left
    over goes to the causes with the largest remainders.
    """
    weights = represented(run)
    chosen = [window for window in windows(run) if window.step == step]
    longest_ns = max(window.duration_ns for window in chosen)
    total: Counter[str] = Counter()
    for window in chosen:
        total[RANK_SPREAD] += (longest_ns - window.duration_ns) * weights[window.rank]
        for name, ns in _rank_causes(run, window).items():
            total[name] += ns * weights[window.rank]
    return _shared_out(total, sum(weights[window.rank] for window in chosen))


def _rank_causes(run: Run, window: Window) -> dict[str, int]:
    """Return the causes of one step on one rank; they add up to its window."""
    swept = sweep(run, window.rank)
    part = swept.inside(window)
    lengths = swept.lengths_ns(part)
    state = window_state(run, swept, window)
    kind, kinds = _compute_kinds(run, window.rank, swept)
    names = [*states(run), *(f"compute:{name}" for name in kinds)]
    computing = state == states(run).index("compute")
    cause = np.where(computing, len(states(run)) + kind[part], state)
    total = np.bincount(cause, lengths, len(names)).astype(np.int64)  # float sums of ns: exact below 2^53
    return {name: ns for name, ns in zip(names, total.tolist(), strict=True) if name != "compute"}


def _compute_kinds(run: Run, rank: int, swept: Sweep) -> tuple[NDArray[np.int64], list[str]]:
    """Return which kind of compute runs in each interval; where several do, the first of the list has it."""
    table = run.spans([rank])
    start = int64(table, "start_ns")
    end = start + int64(table, "duration_ns")
    codes, names = labels(table, "kind")
    work = is_one_of(table, "category", ("compute", "copy"))
    present = sorted({names[code] for code in np.unique(codes[work])}, key=_pass_order)
    kind = np.zeros(len(swept.point_ns) - 1, np.int64)
    for number in reversed(range(len(present))):
        rows = work & (codes == names.index(present[number]))
        kind[covered_by(swept.point_ns, start[rows], end[rows])] = number
    return kind, present


def _shared_out(total: Mapping[str, int], n_ranks: int) -> dict[str, int]:
    """Return *total* divided by *n_ranks* in whole numbers whose sum is the sum divided, by remainders."""
    mean = {name: ns // n_ranks for name, ns in total.items()}
    left = sum(total.values()) // n_ranks - sum(mean.values())
    for name in sorted(total, key=lambda name: (-(total[name] % n_ranks), name))[:left]:
        mean[name] += 1
    return mean


def _pass_order(kind: str) -> tuple[int, str]:
    """Sort kinds of compute: forward and backward work first, then by name."""
    return (PASSES.index(kind) if kind in PASSES else len(PASSES), kind)


def _precedence(cause: str) -> tuple[int, tuple[int, str]]:
    """Sort causes as a person reads them: work, then exposed communication, then waiting, then the rest."""
    order = ("compute", "exposed", "bubble", "wait", "other", RANK_SPREAD)
    head, _, tail = cause.partition(":")
    return order.index(head), _pass_order(tail)


def _name(run: Run) -> str:
    """Return what to call *run*."""
    return run.info.name or run.path.rstrip("/").rpartition("/")[2]
