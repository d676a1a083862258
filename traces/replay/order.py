"""What each span of a pipeline step depends on, rank by rank.

- Forward and backward passes of a rank run in their recorded order; so do the spans that a pass is made of.
- A pass needs the transfer that brings its input, a send follows its pass, and a receive can be posted after
  the pass before of its direction; transfers of one direction keep their order. When the recording posted it
  is kept apart: a replay with the recorded delays waits for that, too.
- Collectives before the first pass precede it; what follows the last pass runs in its recorded order.
- Any other span follows what had ended on its rank when it began, and precedes the next part of a pass:
  reductions of gradients do not, they precede what follows the last pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from foretrace.traces.columns import BoolArray, Int64Array
from foretrace.traces.replay.work import Work

FORWARD: Final = ("forward",)  # kinds of compute that send their result to the next stage

BACKWARD: Final = ("backward", "backward_input")
"""Kinds of compute that send their result to the stage before."""

REDUCTIONS: Final = ("all_reduce dp", "reduce_scatter dp")
"""Collectives that no pass waits for: only the optimizer does."""


class Pairs:
    """Spans, and what each of them depends on."""

    def __init__(self) -> None:
        self._found: list[tuple[Int64Array, Int64Array]] = []

    def add(self, after: Sequence[int] | Int64Array, before: Sequence[int] | Int64Array) -> None:
        """Note that each of the spans *after* depends on the one of *before* at its place."""
        self._found.append((np.asarray(after, np.int64), np.asarray(before, np.int64)))

    def in_order(self, rows: Sequence[int] | Int64Array) -> None:
        """Note that each of *rows* depends on the one before it."""
        self.add(rows[1:], rows[:-1])

    def joined(self) -> tuple[Int64Array, Int64Array]:
        """Return all of them: what depends, and on what."""
        none = np.empty(0, np.int64)
        after, before = zip((none, none), *self._found, strict=True)
        return np.concatenate(after), np.concatenate(before)


class _Pass(NamedTuple):
    """One pass: first and last span, ``forward``, ``backward`` or neither, micro-batch and model chunk."""

    first: int
    last: int
    direction: str
    microbatch: int
    chunk: int


def dependencies(work: Work, rows: Int64Array, line: BoolArray, needs: Pairs, posted: Pairs) -> None:
    """Add to *needs* what the spans of one rank in one step depend on, to *posted* what receives come after.

    Args:
        work: spans of the run.
        rows: rows of one rank in one step.
        line: which spans of the run are parts of passes.
        needs: dependencies.
        posted: after what each receive was posted.
    """
    spans = rows[line[rows]]
    needs.in_order(spans)
    passes = _passes(work, spans)
    by_name: defaultdict[str, list[int]] = defaultdict(list)
    transfers = rows[work.is_transfer[rows]]
    for row in transfers.tolist():
        by_name[work.names[work.what[row]]].append(row)
    for direction in ("forward", "backward"):
        own = [one for one in passes if one.direction == direction]
        _receives(work, by_name[f"recv {direction}"], own, needs)
        _sends(work, by_name[f"send {direction}"], own, needs)
    _first_receive(by_name["recv backward"], passes, needs)
    if len(spans):
        _others(work, rows[~line[rows] & ~work.is_transfer[rows]], spans, needs)
    receives = np.array([*by_name["recv forward"], *by_name["recv backward"]], np.int64)
    ended = np.maximum.accumulate(work.end_ns[spans])
    at = np.searchsorted(ended, work.start_ns[receives], side="right") - 1
    posted.add(receives[at >= 0], spans[at[at >= 0]])


def _passes(work: Work, spans: Int64Array) -> list[_Pass]:
    """Return the passes that *spans* make: neighbours of one direction, micro-batch and chunk are one."""
    if not len(spans):
        return []
    names = np.array([_direction(name) for name in work.names])[work.what[spans]]
    microbatch, chunk = work.microbatch[spans], work.chunk[spans]
    is_new = np.ones(len(spans), np.bool_)
    is_new[1:] = (names[1:] != names[:-1]) | (microbatch[1:] != microbatch[:-1]) | (chunk[1:] != chunk[:-1])
    if not (work.layer[spans] >= 0).any():  # whole passes, one span each
        is_new[:] = True
    first = np.flatnonzero(is_new)
    last = np.append(first[1:], len(spans)) - 1
    return [
        _Pass(int(spans[a]), int(spans[b]), str(names[a]), int(microbatch[a]), int(chunk[a]))
        for a, b in zip(first.tolist(), last.tolist(), strict=True)
    ]


def _direction(name: str) -> str:
    return "forward" if name in FORWARD else "backward" if name in BACKWARD else name


def _belonging(work: Work, transfers: list[int], own: list[_Pass], *, skip: int) -> list[int]:
    """Return the place in *own* of the pass of each transfer: by micro-batch, else in order after *skip*."""
    place: dict[tuple[int, int], list[int]] = defaultdict(list)
    for at, one in enumerate(own):
        place[one.microbatch, one.chunk].append(at)
        # A transfer may not say its chunk: then the micro-batch tells, if it has only one pass.
        if one.chunk >= 0:
            place[one.microbatch, -1].append(at)
    found = []
    for number, row in enumerate(transfers):
        named = place.get((int(work.microbatch[row]), int(work.chunk[row])), [])
        found.append(named[0] if len(named) == 1 else number + skip)
    return found


def _receives(work: Work, receives: list[int], own: list[_Pass], needs: Pairs) -> None:
    missing = max(len(own) - len(receives), 0)  # the first stage receives nothing
    skip = missing if missing < len(own) else 0
    belonging = list(zip(receives, _belonging(work, receives, own, skip=skip), strict=True))
    fed = [(own[at].first, row) for row, at in belonging if at < len(own)]
    needs.add([first for first, _ in fed], [row for _, row in fed])
    later = [(row, own[at - 1].last) for row, at in belonging if 0 < at <= len(own)]
    needs.add([row for row, _ in later], [last for _, last in later])
    needs.in_order(receives)


def _sends(work: Work, sends: list[int], own: list[_Pass], needs: Pairs) -> None:
    belonging = zip(sends, _belonging(work, sends, own, skip=0), strict=True)
    sent = [(row, own[at].last) for row, at in belonging if at < len(own)]
    needs.add([row for row, _ in sent], [last for _, last in sent])
    needs.in_order(sends)


def _first_receive(receives: list[int], passes: list[_Pass], needs: Pairs) -> None:
    """Post the first receive of a gradient during the pass before the first backward one, not at once."""
    place = next((at for at, one in enumerate(passes) if one.direction == "backward"), 0)
    if receives and place >= 2:
        needs.add([receives[0]], [passes[place - 2].last])


def _others(work: Work, rest: Int64Array, spans: Int64Array, needs: Pairs) -> None:
    """Connect what is neither pass nor transfer: before the first pass, after the last, or between."""
    begin, end = work.start_ns[spans], work.end_ns[spans]
    ended = int(np.argmax(end))
    start = work.start_ns[rest]
    tail = rest[start >= begin[ended]]
    needs.in_order(np.append(rest[start < begin[0]], spans[0]))
    needs.in_order(np.append(spans[ended], tail))
    between = rest[(start >= begin[0]) & (start < begin[ended])]
    after = np.searchsorted(np.maximum.accumulate(end), work.start_ns[between], side="right") - 1
    needs.add(between[after >= 0], spans[after[after >= 0]])
    reduces = np.isin(work.what[between], [work.names.index(one) for one in REDUCTIONS if one in work.names])
    for what in np.unique(work.what[between[reduces]]).tolist():
        alike = between[reduces & (work.what[between] == what)]
        needs.in_order(np.append(alike, tail[:1]))
    until = np.searchsorted(begin, work.end_ns[between])
    precedes = ~reduces & (until < len(spans))
    needs.add(spans[until[precedes]], between[precedes])
