"""Segments of what a rank issues, in a form in which two can be compared and one can be repeated.

Two equal segments differ only in numbers: those of events, marks, collectives and the micro-batch, and the
memory in use when they began.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from foretrace.tracer.rehearse.events.tape import COMMUNICATION, MARK, WAIT, WAIT_MARK, Tape
from foretrace.tracer.rehearse.gpu.memory import Change

Rows = npt.NDArray[np.int64]

Owned = tuple[str, int]
"""A storage of a micro-batch: the part that made it, and the how manyth of that part it was."""

OwnChange = tuple[str, Owned | None, int, str, int]
"""What happened to which storage, its bytes, their category, and the stream that they are of."""


class Result(NamedTuple):
    """A tensor that remains after a segment.

    Attributes:
        shape, stride, dtype, device: of it.
        requires_grad: whether it does.
        owned: the storage that it lies in, None if that was there before.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any
    device: Any
    requires_grad: bool
    owned: Owned | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """What one call has issued.

    Attributes:
        rows: its events; shape ``(n, 6)``, columns of ``traces.rehearsal.EVENTS``, numbers relative to the
            beginning: events waited for, marks, and bytes in use.
        n_marks: marks that it made.
        changes: of memory: what, which storage, bytes, category, stream.
        results: what it leaves behind.
        forwards: calls of models from outside in it.
        told: what the script was told, and how often.
        is_closed: it waits for nothing, and frees nothing, that others have made, and transfers nothing.
    """

    rows: Rows
    n_marks: int
    changes: tuple[OwnChange, ...]
    results: tuple[Result | None, ...]
    forwards: int
    told: Mapping[str, int]
    is_closed: bool

    def frees(self, owned: Owned) -> bool:
        """Whether it frees a storage of its micro-batch."""
        return any(what == "free" and name == owned for what, name, *_ in self.changes)

    def does_the_same(self, other: Segment, tape: Tape) -> bool:
        """Whether *other* is this again, of another micro-batch."""
        if self.rows.shape != other.rows.shape or self.n_marks != other.n_marks:
            return False
        ours, theirs = (_without_numbers(one.rows, tape) for one in (self, other))
        return (
            bool(np.array_equal(ours, theirs))
            and self.changes == other.changes
            and self.results == other.results
            and self.told == other.told
        )


def relative_rows(rows: Rows, first: int, first_mark: int, base_bytes: int) -> tuple[Rows, bool]:
    """Return *rows* with numbers relative to their beginning, and whether none points before it.

    Args:
        rows: events; shape ``(n, 6)``.
        first: number of the first.
        first_mark: marks before it.
        base_bytes: memory in use before it.
    """
    found, what = rows.copy(), rows[:, 0]
    found[what == WAIT, 4] -= first
    found[(what == MARK) | (what == WAIT_MARK), 1] -= first_mark
    found[:, 5] -= base_bytes
    marks = (what == MARK) | (what == WAIT_MARK)
    is_closed = bool((found[what == WAIT, 4] >= 0).all() and (found[marks, 1] >= 0).all())
    return found, is_closed


def _without_numbers(rows: Rows, tape: Tape) -> Rows:
    """Return relative *rows* with neither micro-batches nor numbers of collectives."""
    found = rows.copy()
    found[found[:, 0] == COMMUNICATION, 4] = 0
    found[:, 2] = tape.moved(found[:, 2], 1)  # any that is there
    return found


def changes_of(log: list[Change], kind: str, owned: dict[int, Owned]) -> tuple[tuple[OwnChange, ...], bool]:
    """Return what happened to memory in the part *kind* of a micro-batch, and whether all of it was its own.

    Args:
        log: what happened.
        kind: of the part.
        owned: storages of the micro-batch by number; those that this part has made are added.
    """
    found, n_made = [], 0
    for what, number, n_bytes, category, stream in log:
        if what == "add":
            owned[number], n_made = (kind, n_made), n_made + 1
        found.append((what, owned.get(number), n_bytes, category, stream))
    return tuple(found), all(name is not None for _, name, *_ in found)
