"""What things are called in a report, and which colour each has: kinds of work, states, axes.

A *kind* is anything with an entry in the legend. Compute kinds come from the timeline, states from
``traces.analysis.activity``, communication has one kind per axis. The page refers to kinds by their position.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from foretrace.traces.analysis.activity import (
    HOST,
    UNNAMED_AXIS,
    axes,
    is_work,
    states,
)
from foretrace.traces.analysis.communications import COMMUNICATION
from foretrace.traces.columns import Int64Array, factorized, int64, is_one_of, labels
from foretrace.traces.report.format import along
from foretrace.traces.report.lanes import STREAM
from foretrace.traces.run import Run

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
    listed = _words()["compute"]  # in the order of a legend
    known = [kind for kind in listed if kind in total and kind != OTHER_COMPUTE]
    least_ns = _LEAST_SHARE * sum(total.values())
    named = (kind for kind, ns in total.items() if kind and kind not in listed and ns >= least_ns)
    others = sorted(named, key=lambda kind: -total[kind])
    return [*known, *others[:_MOST_KINDS], OTHER_COMPUTE]


@cache
def _words() -> Mapping[str, Mapping[str, list[str]]]:
    """Return ``kinds.json``: label, letter, short label of compute, label, short label, meaning of states."""
    found: dict[str, dict[str, list[str]]] = json.loads(
        (files("foretrace.traces.viewer") / "kinds.json").read_text("utf-8")
    )
    return found


def _compute_entry(kind: str) -> dict[str, Any]:
    words = kind.replace("_", " ")
    label, letter, short = _words()["compute"].get(kind, [words.capitalize(), "", words])
    entry = {"id": kind, "label": label, "letter": letter, "short": short, "group": "compute", "axis": ""}
    colour = kind if kind in _words()["compute"] else OTHER_COMPUTE
    return entry | {"colour": colour, "outline": kind == "backward_weight"}


def _state_entry(name: str) -> dict[str, Any]:
    state, _, axis = name.partition(":")
    known, shown = _words()["state"], axis_label(axis)
    said = known.get(name) or known[state]
    label, short, meaning = (one.format(axis=shown, along=along(shown)) for one in said)
    of = HOST if name in known and axis else axis
    return {"id": name, "label": label, "short": short, "group": "state", "axis": of, "meaning": meaning}


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


# Descriptions that many spans of a report share: each is stored once and referred to by its number.

_LABEL_COLUMNS: Final = ("category", "kind", "name", "axis", "dtype")
_NUMBER_COLUMNS: Final = ("size_bytes", "flops", "bytes_moved", "group")


class Labels:
    """Numbers the distinct descriptions of spans.

    A description is ``[kind, name, size in bytes, FLOP, bytes moved, dtype, group, operation]``; name, dtype
    and operation are positions in ``names``, kind one in the entries of *kinds*.

    Args:
        kinds: the kinds of the report.
    """

    def __init__(self, kinds: Kinds) -> None:
        self.kinds = kinds
        self.entries: list[tuple[int, ...]] = []  # the descriptions
        self.names: list[str] = []  # every string that they refer to
        self._entry_number: dict[tuple[int, ...], int] = {}
        self._name_number: dict[str, int] = {}

    @property
    def kind(self) -> NDArray[np.int64]:
        """Kind of each description, shape ``(n_entries,)``."""
        return np.array([entry[0] for entry in self.entries], np.int64)

    @property
    def of_unnamed_work(self) -> int:
        """Number of the description of work that no span of the timeline describes."""
        return self._plain(self.kinds.compute(OTHER_COMPUTE))

    def of_state(self, state: str) -> int:
        """Return the number of the description of a state of ``traces.analysis.activity``."""
        return self._plain(self.kinds.state(state))

    def of_rank(self, run: Run, rank: int) -> Int64Array:
        """Return the number of the description of each span of the stored *rank*, shape ``(n_spans,)``."""
        table = run.spans([rank], [*_LABEL_COLUMNS, *_NUMBER_COLUMNS])
        if not table.num_rows:
            return np.zeros(0, np.int64)
        words = {name: labels(table, name) for name in _LABEL_COLUMNS}
        numbers = {name: int64(table, name) for name in _NUMBER_COLUMNS}
        # Descriptions are few: each is put together once, and spans get its number.
        distinct = factorized(*(codes for codes, _ in words.values()), *numbers.values())
        _, first = np.unique(distinct, return_index=True)
        communicates = is_one_of(table, "category", COMMUNICATION)
        found = np.empty(len(first), np.int64)
        for number, row in enumerate(first):
            said = {name: known[codes[row]] for name, (codes, known) in words.items()}
            values = {name: int(column[row]) for name, column in numbers.items()}
            found[number] = self._described(said, values, is_communication=bool(communicates[row]))
        return found[distinct]

    def _described(self, said: dict[str, str], values: dict[str, int], *, is_communication: bool) -> int:
        if is_communication:
            kind = self.kinds.axis(said["axis"] or UNNAMED_AXIS)
        elif said["category"] == HOST:
            kind = self.kinds.host
        else:
            kind = self.kinds.compute(said["kind"])
        name, dtype, operation = (self._name(said[column]) for column in ("name", "dtype", "kind"))
        size, flops, moved, group = (values[column] for column in _NUMBER_COLUMNS)
        return self._entry((kind, name, size, flops, moved, dtype, group, operation))

    def _plain(self, kind: int) -> int:
        nothing = self._name("")
        return self._entry((kind, nothing, 0, 0, 0, nothing, -1, nothing))

    def _entry(self, entry: tuple[int, ...]) -> int:
        if entry not in self._entry_number:
            self._entry_number[entry] = len(self.entries)
            self.entries.append(entry)
        return self._entry_number[entry]

    def _name(self, text: str) -> int:
        if text not in self._name_number:
            self._name_number[text] = len(self.names)
            self.names.append(text)
        return self._name_number[text]

    def to_json(self) -> list[list[Any]]:
        """Return the descriptions as JSON."""
        return [list(entry) for entry in self.entries]


# Colours and hatches of kinds: solid is working, hatched is waiting, hue and direction say for what.

_PALE: Final = {"exposed": 0.62, "wait": 0.9}
"""How much of the background is in a hatch's ground, by state; as in ``traces/viewer/palette.js``."""


@dataclass(frozen=True, slots=True)
class Fill:
    """How an area is filled: a colour, and for a state a hatch on it."""

    colour: str  # colour of the area, ``#rrggbb``
    hatch: str = ""  # direction of the hatch as plotly spells it, "" if solid
    line: str = ""  # colour of the hatch


def palette() -> dict[str, Any]:
    """Return the colours that the page and the figures share: by theme, and the hatch of each state."""
    colours: dict[str, Any] = json.loads(
        (files("foretrace.traces.viewer") / "palette.json").read_text("utf-8")
    )
    return colours


def fill(entry: Mapping[str, Any], colours: Mapping[str, Any], theme: str) -> Fill:
    """Return how a kind is filled.

    Args:
        entry: one of the entries of ``traces.report.kinds.Kinds``.
        colours: what ``palette`` returns.
        theme: ``"light"`` or ``"dark"``.
    """
    own = colours[theme]
    if entry["group"] == "compute":
        return Fill(own["compute"][entry["colour"]])
    axis_colour = own["axes"].get(entry["axis"], own["axes"]["world"])
    if entry["group"] == "communication":
        return Fill(axis_colour)
    if entry["id"] in own["idle"]:
        ground, line = own["idle"][entry["id"]]
        return Fill(ground, colours["hatch"][entry["id"]], line)
    ground = mix(axis_colour, own["surface"]["bg"], _PALE[entry["id"].partition(":")[0]])
    return Fill(ground, colours["hatch"].get(entry["axis"], colours["hatch"]["world"]), axis_colour)


def mix(first: str, second: str, share: float) -> str:
    """Return a blend of two colours; *share* is how much of the second.

    >>> mix("#000000", "#ffffff", 0.5)
    '#808080'
    """
    pairs = ((int(first[i : i + 2], 16), int(second[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a * (1 - share) + b * share):02x}" for a, b in pairs)
