"""Descriptions that many spans of a report share: each is stored once and referred to by its number."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from foretrace.traces.analysis.activity import UNNAMED_AXIS
from foretrace.traces.analysis.communications import COMMUNICATION
from foretrace.traces.analysis.offloaded import HOST
from foretrace.traces.columns import Int64Array, factorized, int64, is_one_of, labels
from foretrace.traces.report.kinds import OTHER_COMPUTE, Kinds
from foretrace.traces.run import Run

_LABEL_COLUMNS: Final = ("category", "kind", "name", "axis", "dtype")
_NUMBER_COLUMNS: Final = ("size_bytes", "flops", "bytes_moved", "group")


class Labels:
    """Numbers the distinct descriptions of spans.

    A description is ``[kind, name, size in bytes, FLOP, bytes moved, dtype, group, operation]``; name, dtype
    and operation are positions in ``names``, kind one in the entries of *kinds*.

    Args:
        kinds: the kinds of the report.

    Attributes:
        entries: the descriptions.
        names: every string that they refer to.
    """

    def __init__(self, kinds: Kinds) -> None:
        self.kinds = kinds
        self.entries: list[tuple[int, ...]] = []
        self.names: list[str] = []
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
