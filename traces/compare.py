"""Two runs side by side: what one step took in each, and which causes make up the difference.

A typical step of each run is taken apart into causes that add up to it exactly, so that the differences of
the causes add up to the difference of the steps. Spans are joined one by one beside it, in ``traces.join``.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from foretrace.traces.analysis import activity
from foretrace.traces.analysis.communications import COMMUNICATION, arrivals
from foretrace.traces.analysis.kernels import group_of
from foretrace.traces.analysis.metrics import left_out, represented, typical_step
from foretrace.traces.analysis.windows import Window, windows
from foretrace.traces.batch import work_of
from foretrace.traces.columns import bounds, int64, is_one_of, labels
from foretrace.traces.errors import RunError
from foretrace.traces.join import JoinedSpans, join_spans
from foretrace.traces.notebook import card
from foretrace.traces.rehearsal import (
    HOST_KINDS,
    WHAT,
    read_measured,
    read_rank,
    read_rehearsal,
    rehearsal_folder,
)
from foretrace.traces.report.format import format_share, format_signed, format_time
from foretrace.traces.run import Run

_BACKWARD: Final = ("compute:backward", "compute:backward_input", "compute:backward_weight")
"""Causes that are the backward, whole or in the two parts that some schedules run apart."""


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause of step time in two runs: a state of ``traces.analysis.activity``, compute split by kind."""

    name: str
    a_ns: int
    b_ns: int

    @property
    def difference_ns(self) -> int:
        """Time that this cause takes in *b* more than in *a*."""
        return self.b_ns - self.a_ns

    def to_dict(self) -> dict[str, Any]:
        """Return it as a JSON object, in s."""
        return {
            "name": self.name,
            "a_s": self.a_ns / 1e9,
            "b_s": self.b_ns / 1e9,
            "difference_s": self.difference_ns / 1e9,
        }


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Comparison:
    """What two runs have in common and what not; *a* is usually simulated, *b* measured."""

    # what to call the runs
    a_name: str
    b_name: str
    # ``"simulated"``, ``"recorded"`` or what else made them
    a_origin: str
    b_origin: str
    # the step of each that is compared, the one of median length
    a_step: int
    b_step: int
    # how long it takes on its slowest rank
    a_step_ns: int
    b_step_ns: int
    # what of each is no training, as ``traces.analysis.metrics.left_out`` has it
    a_left_out: Sequence[Mapping[str, Any]]
    b_left_out: Sequence[Mapping[str, Any]]
    # what their steps train on, and its unit, as ``traces.batch.work_of`` has it
    a_work: tuple[int, str] | None
    b_work: tuple[int, str] | None
    # ranks of each
    a_gpus: int
    b_gpus: int
    differs: Mapping[str, tuple[Any, Any]]  # what makes them two jobs: the setting, and its value in each
    # mean over ranks; ``a_ns`` adds up to ``a_step_ns``, ``b_ns`` to ``b_step_ns``, exactly
    causes: tuple[Cause, ...]
    # the same with communication and waiting split by kind, ``"exposed:dp:all_gather"``; they add up as the
    # causes do
    details: tuple[Cause, ...]
    spans: JoinedSpans  # the spans of the two steps, joined one to one
    # of two traces, what each operator took, as ``by_operator`` has it
    operators: tuple[Pair, ...]
    # of two traces, what each kind of kernel took, as ``by_kind`` has it
    kernels: tuple[Pair, ...]
    warnings: tuple[str, ...]  # warnings of both runs, and what limits the comparison

    @property
    def ratio(self) -> float:
        """Step time of *a* over that of *b*; ``ratio - 1`` is the error of a prediction *a*."""
        return self.a_step_ns / self.b_step_ns

    @property
    def scale(self) -> float | None:
        """Steps of *b* that train on as much as one step of *a*; None where nobody knows."""
        if self.a_work is None or self.b_work is None or self.a_work[1] != self.b_work[1]:
            return None
        return self.a_work[0] / self.b_work[0]

    @property
    def ratio_per_work(self) -> float | None:
        """Time of a token (or row) in *a* over that in *b*, on all GPUs of each; None where nobody knows."""
        return None if self.scale is None else self.ratio / self.scale

    def faster(self, names: Sequence[str] = ("a", "b")) -> str:
        """Say who is faster at the same work; nothing where steps do the same, or nobody knows."""
        per_work = self.ratio_per_work
        if per_work is None or self.a_work is None or self.a_work == self.b_work:
            return ""
        each = self.a_work[1].removesuffix("s")
        gain = format_share(max(per_work, 1 / per_work) - 1)
        whole = "" if self.a_gpus == self.b_gpus else ", each on all of its GPUs"
        return f"per {each}, {names[per_work > 1]} is {gain} faster than {names[per_work <= 1]}{whole}"

    @property
    def warned(self) -> str:
        """What to know first: in what the two are different jobs; empty if in nothing."""
        if not self.differs:
            return ""
        return "different jobs: " + ", ".join(f"{name} {a} and {b}" for name, (a, b) in self.differs.items())

    @property
    def joined(self) -> pa.Table:
        """The joined spans, in the columns of ``traces.join.JOINED``."""
        return self.spans.table

    def waterfall(self) -> list[dict[str, Any]]:
        """Return how the step of *a* becomes that of *b*, detail by detail: what to draw as a waterfall.

        The first bar begins at the step time of *a*, each begins where the one before it ends, and the last
        ends at the step time of *b*, to the nanosecond.
        """
        bars, level_ns = [], self.a_step_ns
        for cause in self.details:
            if cause.difference_ns:
                bars.append(
                    {"name": cause.name, "start_ns": level_ns, "end_ns": level_ns + cause.difference_ns}
                )
                level_ns += cause.difference_ns
        return bars

    def __repr__(self) -> str:
        """Return both steps in one line."""
        both = ((self.a_name, self.a_step_ns), (self.b_name, self.b_step_ns))
        said = (f"{name} {format_time(step_ns / 1e9)}" for name, step_ns in both)
        return f"<Comparison of a step: {', '.join(said)}>"

    def _repr_html_(self) -> str:
        """Return both steps as a notebook shows them, and the causes of their difference, largest first."""
        difference = self.b_step_ns - self.a_step_ns
        causes = sorted((c for c in self.causes if c.difference_ns), key=lambda c: -abs(c.difference_ns))
        share = f"{format_share(difference / self.a_step_ns, '+.1f')} of the first"
        rows = [
            ("step, first run", format_time(self.a_step_ns / 1e9), self.a_name),
            ("step, second run", format_time(self.b_step_ns / 1e9), self.b_name),
            ("difference", format_signed(difference), share),
            *((cause.name, format_signed(cause.difference_ns), "") for cause in causes),
        ]
        return card("Two runs", "what differs, by cause; the causes add up", rows, self.warnings)

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as one JSON object, without the single spans."""
        return {
            "a": {
                "name": self.a_name,
                "step": self.a_step,
                "step_time_s": self.a_step_ns / 1e9,
                "left_out": list(self.a_left_out),
                **_rates(self.a_work, self.a_step_ns, self.a_gpus),
            },
            "b": {
                "name": self.b_name,
                "step": self.b_step,
                "step_time_s": self.b_step_ns / 1e9,
                "left_out": list(self.b_left_out),
                **_rates(self.b_work, self.b_step_ns, self.b_gpus),
            },
            "ratio": self.ratio,
            "ratio_per_work": self.ratio_per_work,
            "b_steps_of_the_work_of_a": self.scale,
            "differs": {name: list(both) for name, both in self.differs.items()},
            "difference_s": (self.b_step_ns - self.a_step_ns) / 1e9,
            "causes": [cause.to_dict() for cause in self.causes],
            "details": [cause.to_dict() for cause in self.details],
            "waterfall": self.waterfall(),
            "spans": self.spans.to_dict(),
            "operators": [pair.to_dict() for pair in self.operators],
            "kernels": [pair.to_dict() for pair in self.kernels],
            "warnings": list(self.warnings),
        }


def compare(a: Run, b: Run) -> Comparison:
    """Compare a typical step of *a* with a typical step of *b*.

    The step of median length is typical; the first step of a recording is left out where there are enough.
    Layouts may differ: causes are means over all ranks of each run. Raises RunError: one of the runs has no
    step with a length.
    """
    a_step, a_step_ns = typical_step(a)
    b_step, b_step_ns = typical_step(b)
    return Comparison(
        a_name=_name(a),
        b_name=_name(b),
        a_origin=a.info.origin,
        b_origin=b.info.origin,
        a_step=a_step,
        b_step=b_step,
        a_step_ns=a_step_ns,
        b_step_ns=b_step_ns,
        a_left_out=left_out(a),
        b_left_out=left_out(b),
        a_work=_work(a),
        b_work=_work(b),
        a_gpus=a.info.world_size,
        b_gpus=b.info.world_size,
        differs=_differences(a, b),
        causes=_side_by_side(causes(a, a_step), causes(b, b_step)),
        details=_side_by_side(causes(a, a_step, detailed=True), causes(b, b_step, detailed=True)),
        spans=join_spans(a, a_step, b, b_step),
        operators=by_operator(a, b, (a_step, b_step)),
        kernels=by_kind(a, b, (a_step, b_step)),
        warnings=(*(f"{_name(a)}: {w}" for w in a.warnings), *(f"{_name(b)}: {w}" for w in b.warnings)),
    )


def _rates(work: tuple[int, str] | None, step_ns: int, n_gpus: int) -> dict[str, Any]:
    """Return how fast a step is, in tokens or rows per second and GPU, where that is known."""
    if work is None:
        return {"per_step": None, "unit": None, "per_s_per_gpu": None}
    return {"per_step": work[0], "unit": work[1], "per_s_per_gpu": work[0] / step_ns * 1e9 / n_gpus}


def _differences(a: Run, b: Run) -> dict[str, tuple[Any, Any]]:
    """Return what makes two runs different jobs, of what both say: the setting and its values.

    A simulated machine has the name of our files, a recorded one that of its driver.
    """
    found: dict[str, tuple[Any, Any]] = {}
    for name, read in _ASKED.items():
        if name == "machine" and a.info.origin != b.info.origin:
            continue
        ours, theirs = read(a), read(b)
        if ours is not None and theirs is not None and ours != theirs:
            found[name] = (ours, theirs)
    return found


def _work(run: Run) -> tuple[int, str] | None:
    return work_of(run.info.job or {}, run.info.layout)


def _said(run: Run, name: str) -> Any:
    return (run.info.job or {}).get(name)


_ASKED: Final[Mapping[str, Callable[[Run], Any]]] = {
    "model": lambda run: _size(run.info.model or {}),
    "machine": lambda run: ((run.info.cluster or {}).get("device") or {}).get("name"),
    "GPUs": lambda run: run.info.world_size,
    "precision": lambda run: _said(run, "precision") or (run.info.model or {}).get("dtype"),
    "sequence length": lambda run: _said(run, "seq_len"),
    "work per step": lambda run: (work := _work(run)) and f"{work[0]:,} {work[1]}",
    "micro-batch": lambda run: _said(run, "micro_batch"),
}
"""What two runs have to share for their steps to be steps of one job, and how each says it."""


def _size(model: Mapping[str, Any]) -> str | None:
    """Return the parameters of a model, by which one is told from another under whatever name."""
    n_params = model.get("n_params")
    return None if not n_params else f"of {float(f'{n_params:.3g}'):,.0f} parameters"


def _side_by_side(ours: Mapping[str, int], theirs: Mapping[str, int]) -> tuple[Cause, ...]:
    """Return the causes of two steps in the order in which a person reads them."""
    if len({tuple(bool(side.get(name)) for name in _BACKWARD) for side in (ours, theirs)}) > 1:
        ours, theirs = _with_whole_backward(ours), _with_whole_backward(theirs)
    names = {*ours, *theirs}
    return tuple(
        Cause(name, ours.get(name, 0), theirs.get(name, 0)) for name in sorted(names, key=precedence)
    )


def _with_whole_backward(side: Mapping[str, int]) -> dict[str, int]:
    """Return causes with the backward as one: between a run that splits it and one that does not."""
    rest = {name: ns for name, ns in side.items() if name not in _BACKWARD}
    return rest | {_BACKWARD[0]: sum(side.get(name, 0) for name in _BACKWARD)}


def _name(run: Run) -> str:
    """Return what to call *run*."""
    return run.info.name or run.path.rstrip("/").rpartition("/")[2]


# Where the time of one step goes, cause by cause, adding up to the step of the slowest rank exactly.

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
    swept = activity.sweep(run, window.rank)
    part = swept.inside(window)
    lengths = swept.lengths_ns(part)
    state = activity.window_state(run, swept, window)
    kind, kinds = _compute_kinds(run, window.rank, swept)
    names = [*activity.states(run), *(f"compute:{name}" for name in kinds)]
    computing = state == activity.states(run).index("compute")
    cause = np.where(computing, len(activity.states(run)) + kind[part], state)
    if detailed:
        cause = _by_kind_of_communication(run, window, swept, cause, names)
    total = np.bincount(cause, lengths, len(names)).astype(np.int64)  # float sums of ns: exact below 2^53
    return {name: ns for name, ns in zip(names, total.tolist(), strict=True) if name != "compute"}


def _by_kind_of_communication(
    run: Run, window: Window, swept: activity.Sweep, cause: NDArray[np.int64], names: list[str]
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
        of_axis = is_one_of(table, "axis", ("", axis) if axis == activity.UNNAMED_AXIS else (axis,))
        rows = of_axis & is_one_of(table, "category", COMMUNICATION)
        codes, kinds = labels(table, "kind")
        begin, until = (last, end) if head == "exposed" else (start, last)
        # Backwards, so that the first by name is written last, and stays.
        for kind in sorted({kinds[i] for i in np.unique(codes[rows])}, reverse=True):
            chosen = rows & (codes == kinds.index(kind))
            names.append(f"{name}:{kind}")
            under_way = activity.covered_by(swept.point_ns, begin[chosen], until[chosen])[part]
            found[under_way & (cause == code)] = len(names) - 1
    return found


def _compute_kinds(run: Run, rank: int, swept: activity.Sweep) -> tuple[NDArray[np.int64], list[str]]:
    """Return which kind of compute runs in each interval; of several, the first of the list counts."""
    table = run.spans([rank])
    start, end = bounds(table)
    codes, names = labels(table, "kind")
    work = activity.is_work(table)
    present = sorted({names[code] for code in np.unique(codes[work])}, key=_pass_order)
    kind = np.zeros(len(swept.point_ns) - 1, np.int64)
    # Backwards, so that the first of the list is written last, and stays.
    for number in reversed(range(len(present))):
        rows = work & (codes == names.index(present[number]))
        kind[activity.covered_by(swept.point_ns, start[rows], end[rows])] = number
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
    return (activity.PASSES.index(kind) if kind in activity.PASSES else len(activity.PASSES), kind)


def precedence(cause: str) -> tuple[int, tuple[int, str]]:
    """Sort causes as a person reads them: work, then exposed communication, then waiting, then the rest."""
    order = ("compute", "exposed", "bubble", "wait", "host", "other", RANK_SPREAD)
    head, _, tail = cause.partition(":")
    return order.index(head), _pass_order(tail)


# What each operator took in two traces: joined by module path, operator and shape, else by less of it.

_NUMBER: Final = re.compile(r"_\d+(?=/|$)")


class Operator(NamedTuple):
    """What calls of an operator have in common: path of modules without their numbers, name, shapes."""

    module: str
    name: str
    shapes: str


Key = Callable[[Operator], tuple[str, ...]]

JOINED_BY: Final[Mapping[str, Key]] = {
    "module, operator, shape": lambda one: (one.module, one.name, one.shapes),
    "operator, shape": lambda one: (one.name, one.shapes),
    "module, operator": lambda one: (one.module, one.name),
    "operator": lambda one: (one.name,),
}
"""What operators of two traces are joined by: what the first does not join, the next one may."""

UNMATCHED: Final = ""


@dataclass(frozen=True, slots=True)
class Pair:
    """An operator in two traces; calls and seconds are per step, mean over ranks."""

    operator: Operator  # as in *a*, if it is there
    joined_by: str  # a key of ``JOINED_BY``, empty for one that only one of them has
    a_calls: float
    b_calls: float
    a_s: float
    b_s: float

    def to_dict(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        calls = {"a_calls": self.a_calls, "b_calls": self.b_calls, "a_s": self.a_s, "b_s": self.b_s}
        return {**self.operator._asdict(), "joined_by": self.joined_by, **calls}


Taken = dict[Operator, tuple[float, float]]  # by operator, its calls and seconds per step


def by_operator(a: Run, b: Run, steps: tuple[int, int]) -> tuple[Pair, ...]:
    """Return what each operator took in two traces, the largest difference first, unmatched ones last.

    Traces that say their operators are joined by them, others by the names of their kernels. Nothing is
    joined if one says operators and the other does not, or if one is no trace.

    Args:
        a: a trace.
        b: another one.
        steps: of each, the step that stands for it where kernels are joined.
    """
    if {a.info.origin, b.info.origin} != {"ingested"}:
        return ()
    ours, theirs = operators_of(a), operators_of(b)
    if not ours and not theirs:
        ours, theirs = (kernels_of(run, step) for run, step in zip((a, b), steps, strict=True))
    if not ours or not theirs:
        return ()
    pairs = []
    for how, key in JOINED_BY.items():
        left, right = _grouped(ours, key), _grouped(theirs, key)
        for shared in left.keys() & right.keys():
            (calls, seconds), (other_calls, other_s) = (
                _total(own[one] for one in of[shared]) for own, of in ((ours, left), (theirs, right))
            )
            operator = min(left[shared])
            if len(left[shared]) + len(right[shared]) > 2:  # of several the shapes, or modules, are not one
                operator = Operator(*(v if v in shared else "…" for v in operator))
            pairs.append(Pair(operator, how, calls, other_calls, seconds, other_s))
            for one in left[shared]:
                del ours[one]
            for one in right[shared]:
                del theirs[one]
    pairs += [Pair(one, UNMATCHED, calls, 0.0, seconds, 0.0) for one, (calls, seconds) in ours.items()]
    pairs += [Pair(one, UNMATCHED, 0.0, calls, 0.0, seconds) for one, (calls, seconds) in theirs.items()]
    return tuple(sorted(pairs, key=lambda one: (not one.joined_by, -abs(one.b_s - one.a_s), one.operator)))


def by_kind(a: Run, b: Run, steps: tuple[int, int]) -> tuple[Pair, ...]:
    """Return what kinds of kernels, as their names tell, took in two traces, the largest difference first.

    Devices of two vendors have no kernel's name in common; a compiled model and an eager one few operators.
    Nothing is joined if one is no trace. *steps*: of each, the step that stands for it.
    """
    if {a.info.origin, b.info.origin} != {"ingested"}:
        return ()
    sides = []
    for run, step in zip((a, b), steps, strict=True):
        own = kernels_of(run, step)
        of = _grouped(own, lambda one: (group_of(one.name),))
        sides.append({kind: _total(own[one] for one in found) for (kind,), found in of.items()})
    pairs = [
        Pair(
            Operator("", kind, ""),
            "kind",
            *(side.get(kind, (0.0, 0.0))[at] for at in (0, 1) for side in sides),
        )
        for kind in sides[0].keys() | sides[1].keys()
    ]
    return tuple(sorted(pairs, key=lambda one: (-abs(one.b_s - one.a_s), one.operator)))


def operators_of(run: Run) -> Taken:
    """Return the operators that *run* says it issued; nothing if it says none."""
    try:
        rehearsal, folder = read_rehearsal(run.path), rehearsal_folder(run.path)
    except RunError:
        return {}
    found: defaultdict[Operator, list[float]] = defaultdict(lambda: [0.0, 0.0])
    share = 1 / (max(len(rehearsal.ranks), 1) * max(int(rehearsal.job.get("steps", 1)), 1))
    for rank in rehearsal.ranks:
        measured = read_measured(folder, rank)
        if measured is None:
            return {}
        tables = read_rank(folder, rank)
        works, places = tables.works.to_pylist(), tables.places["name"].to_pylist()
        events = [tables.events[name].to_pylist() for name in ("what", "item", "place")]
        for event, took in zip(*(measured[name].to_pylist() for name in ("event", "device_ns")), strict=True):
            what, item, place = (column[event] for column in events)
            if what == WHAT.index("op"):
                path = _NUMBER.sub("", places[place])
                work = works[item]
                # A copy over the link has a size, which the data of each step may change.
                shapes = "" if work["kind"] in HOST_KINDS else work["shapes"]
                one = found[Operator(path, work["name"], shapes)]
                one[0] += share
                one[1] += took * share / 1e9
    return {operator: (calls, seconds) for operator, (calls, seconds) in found.items()}


def kernels_of(run: Run, step: int) -> Taken:
    """Return the kernels of *run* in *step* by name, mean over ranks."""
    found: defaultdict[Operator, list[float]] = defaultdict(lambda: [0.0, 0.0])
    share = 1 / max(len(run.stored_ranks), 1)
    for rank in run.stored_ranks:
        table = run.spans([rank])
        chosen = is_one_of(table, "category", ("compute", "copy")) & (int64(table, "step") == step)
        codes, names = labels(table, "name")
        codes, took = codes[chosen], int64(table, "duration_ns")[chosen]
        calls, ns = (np.bincount(codes, weights, minlength=len(names)) for weights in (None, took))
        for code in np.flatnonzero(calls).tolist():
            one = found[Operator("", names[code], "")]
            one[0] += float(calls[code]) * share
            one[1] += float(ns[code]) * share / 1e9
    return {operator: (calls, seconds) for operator, (calls, seconds) in found.items()}


def _grouped(taken: Taken, key: Key) -> dict[tuple[str, ...], list[Operator]]:
    found: defaultdict[tuple[str, ...], list[Operator]] = defaultdict(list)
    for operator in taken:
        found[key(operator)].append(operator)
    return found


def _total(parts: Any) -> tuple[float, float]:
    """Return the sum of calls and of seconds."""
    listed: Sequence[tuple[float, float]] = list(parts)
    return sum(calls for calls, _ in listed), sum(seconds for _, seconds in listed)
