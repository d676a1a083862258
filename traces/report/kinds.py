"""What things are called in a report, and which colour each has: kinds of work, states, axes.

A *kind* is anything with an entry in the legend. Compute kinds come from the timeline, states from
``traces.analysis.activity``, communication has one kind per axis. The page refers to kinds by their position.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from foretrace.traces.analysis.activity import axes, states
from foretrace.traces.analysis.offloaded import HOST, HOST_OPTIMIZER, OFFLOADING, is_work
from foretrace.traces.report.format import along
from foretrace.traces.report.lanes import STREAM
from foretrace.traces.run import Run

_COMPUTE: Final = {  # label, letter in a cell, short label in a table, in the order of a legend
    "forward": ("Forward", "F", "forward"),
    "recompute": ("Recompute", "R", "recompute"),
    "backward": ("Backward", "B", "backward"),
    "backward_input": ("Backward: input gradient", "I", "backward input"),
    "backward_weight": ("Backward: weight gradient", "W", "backward weight"),
    "optimizer": ("Optimizer", "O", "optimizer"),
    "copy": ("Copy", "C", "copy"),
    "compute": ("Other compute", "", "other compute"),
}
OTHER_COMPUTE: Final = "compute"
"""Kind of work that says no kind of its own, and of all kinds past the most frequent ones."""

_MOST_KINDS: Final = 6
"""Kinds of compute that a timeline may name besides those above; a legend cannot hold more."""

_LEAST_SHARE: Final = 0.005
"""Share of all compute from which another kind has an entry of its own: less cannot be seen."""

AXIS_WORDS: Final = {
    "tp": "tensor parallel",
    "cp": "context parallel",
    "ep": "expert parallel",
    "dp": "data parallel",
    "pp": "pipeline",
}


class Kinds:
    """The kinds of one report, numbered.

    Args:
        runs: the runs that the report is about.

    Attributes:
        entries: one JSON object per kind: id, label, short, group, colour key, letter, axis, meaning.
    """

    def __init__(self, runs: Iterable[Run]) -> None:
        runs = tuple(runs)
        named = _compute_kinds(runs)
        state_names = list(dict.fromkeys(name for run in runs for name in states(run)[1:]))
        axis_names = list(dict.fromkeys(name for run in runs for name in axes(run)))
        self.entries: list[dict[str, Any]] = [
            *(_compute_entry(kind) for kind in named),
            *(_state_entry(name) for name in _ordered(state_names)),
            *(_axis_entry(axis) for axis in axis_names),
            {
                "id": HOST,
                "label": "Launching kernels and waiting for the device",
                "short": "host",
                "group": "host",
                "axis": "",
                "letter": "",
                "meaning": "What the process does on the CPU: it launches kernels ahead of the device.",
            },
        ]
        self._number = {entry["id"]: i for i, entry in enumerate(self.entries)}

    def __contains__(self, name: object) -> bool:
        """Whether there is an entry of that id."""
        return name in self._number

    def compute(self, kind: str) -> int:
        """Return the number of a kind of work; one without an entry counts as other compute."""
        return self._number.get(kind if kind in self._number else OTHER_COMPUTE, 0)

    def state(self, name: str) -> int:
        """Return the number of a state of ``traces.analysis.activity``."""
        return self._number[name]

    def axis(self, axis: str) -> int:
        """Return the number of the communication along *axis*."""
        return self._number[f"axis:{axis}"]

    def lane(self, axis: str, direction: str) -> dict[str, Any]:
        """Return a lane as the page takes it: axis, label, kind; one that computes has no axis and kind."""
        if direction == STREAM:
            return {"axis": "", "label": axis, "kind": None, "stream": True}
        if axis == HOST:
            return {"axis": "", "label": HOST, "kind": self.host}
        if not axis:
            return {"axis": "", "label": "", "kind": None}
        arrow = {"send": " →", "recv": " ←"}.get(direction, "")
        return {"axis": axis, "label": axis_label(axis) + arrow, "kind": self.axis(axis)}

    @property
    def host(self) -> int:
        """Number of the host lane's kind."""
        return self._number[HOST]


def axis_label(axis: str) -> str:
    """Return an axis as people write it.

    >>> axis_label("dp"), axis_label("world")
    ('DP', 'world')
    """
    return axis.upper() if axis in AXIS_WORDS else axis


def _compute_kinds(runs: Iterable[Run]) -> list[str]:
    """Return the known kinds that occur, then the longest of the others, then the rest as one."""
    total: dict[str, int] = {}
    for run in runs:
        for rank in run.stored_ranks:
            table = run.spans([rank], ["category", "kind", "duration_ns"])
            table = table.filter(is_work(table))
            sums = table.select(["kind", "duration_ns"]).group_by("kind").aggregate([("duration_ns", "sum")])
            for kind, ns in zip(sums["kind"].to_pylist(), sums["duration_ns_sum"].to_pylist(), strict=True):
                total[kind] = total.get(kind, 0) + ns
    known = [kind for kind in _COMPUTE if kind in total and kind != OTHER_COMPUTE]
    least_ns = _LEAST_SHARE * sum(total.values())
    named = (kind for kind, ns in total.items() if kind and kind not in _COMPUTE and ns >= least_ns)
    others = sorted(named, key=lambda kind: -total[kind])
    return [*known, *others[:_MOST_KINDS], OTHER_COMPUTE]


def _compute_entry(kind: str) -> dict[str, Any]:
    words = kind.replace("_", " ")
    label, letter, short = _COMPUTE.get(kind, (words.capitalize(), "", words))
    entry = {"id": kind, "label": label, "letter": letter, "short": short, "group": "compute", "axis": ""}
    colour = kind if kind in _COMPUTE else OTHER_COMPUTE
    return entry | {"colour": colour, "outline": kind == "backward_weight"}


_OFFLOADED: Final = {
    OFFLOADING: (
        "Exposed copies to and from the host",
        "host exposed",
        "What is offloaded, or a batch, is copied to or from the host, and nothing is computed meanwhile.",
    ),
    HOST_OPTIMIZER: (
        "Optimizer on the host",
        "host optimizer",
        "The processors of the node run the optimizer, and the device has nothing to do.",
    ),
}
"""Label, short label and meaning of the states that offloading causes."""


def _state_entry(name: str) -> dict[str, Any]:
    state, _, axis = name.partition(":")
    if name in _OFFLOADED:
        entry = dict(zip(("label", "short", "meaning"), _OFFLOADED[name], strict=True))
        return {"id": name, "group": "state", "axis": HOST} | entry
    shown = axis_label(axis)
    label, short, meaning = {
        "exposed": (
            f"Exposed {shown}",
            f"{shown} exposed",
            f"Data moves {along(shown)} and nothing is computed meanwhile.",
        ),
        "wait": (
            f"Waiting for {shown}",
            f"{shown} wait",
            f"This rank has arrived at a {shown} communication; another one has not.",
        ),
        "bubble": (
            "Pipeline bubble",
            "bubble",
            "No work: the pipeline is filling or draining, or the next micro-batch has not arrived.",
        ),
        "other": (
            "Other",
            "other",
            "No cause in the timeline: launch gaps, host work, data loading, or what was not recorded.",
        ),
    }[state]
    return {"id": name, "label": label, "short": short, "group": "state", "axis": axis, "meaning": meaning}


def _axis_entry(axis: str) -> dict[str, Any]:
    words = AXIS_WORDS.get(axis)
    meaning = f"Communication between {words} ranks." if words else f"Communication of the group {axis}."
    return {
        "id": f"axis:{axis}",
        "label": axis_label(axis),
        "short": axis_label(axis),
        "group": "communication",
        "axis": axis,
        "meaning": meaning,
    }


def _ordered(names: list[str]) -> list[str]:
    """Sort states as they are read: exposed communication, bubble, waiting, other."""
    order = ("exposed", "bubble", "wait", "host", "other")
    return sorted(names, key=lambda name: order.index(name.partition(":")[0]))
