"""What each operator took in two traces: joined by module path, operator and shape, else by less of it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from foretrace.traces.analysis.kernels import group_of
from foretrace.traces.columns import int64, is_one_of, labels
from foretrace.traces.errors import RunError
from foretrace.traces.rehearsal import (
    HOST_KINDS,
    WHAT,
    read_measured,
    read_rank,
    read_rehearsal,
    rehearsal_folder,
)
from foretrace.traces.run import Run

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
