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
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from foretrace.traces.columns import BoolArray, Int64Array
from foretrace.traces.replay.work import Work

FORWARD: Final = ("forward",)
"""Kinds of compute that send their result to the next stage."""

BACKWARD: Final = ("backward", "backward_input")
"""Kinds of compute that send their result to the stage before."""

REDUCTIONS: Final = ("all_reduce dp", "reduce_scatter dp")
"""Collectives that no pass waits for: only the optimizer does."""

Before = defaultdict[int, list[int]]


class _Pass(NamedTuple):
    """One pass: first and last span, ``forward``, ``backward`` or neither, micro-batch and model chunk."""

    first: int
    last: int
    direction: str
    microbatch: int
    chunk: int


def dependencies(work: Work, rows: Int64Array, line: BoolArray) -> tuple[Before, dict[int, int]]:
    """Return by span of one rank in one step what it depends on, and by receive after what it was posted.

    Args:
        work: spans of the run.
        rows: rows of one rank in one step.
        line: which spans of the run are parts of passes.
    """
    before: Before = defaultdict(list)
    spans = rows[line[rows]]
    for one, other in pairwise(spans.tolist()):
        before[other].append(one)
    passes = _passes(work, spans)
    by_name: defaultdict[str, list[int]] = defaultdict(list)
    transfers = rows[work.is_transfer[rows]]
    for row in transfers.tolist():
        by_name[work.names[work.what[row]]].append(row)
    for direction in ("forward", "backward"):
        own = [one for one in passes if one.direction == direction]
        _receives(work, by_name[f"recv {direction}"], own, before)
        _sends(work, by_name[f"send {direction}"], own, before)
    _first_receive(by_name["recv backward"], passes, before)
    if len(spans):
        _others(work, rows[~line[rows] & ~work.is_transfer[rows]], spans, before)
    receives = np.array([*by_name["recv forward"], *by_name["recv backward"]], np.int64)
    return before, _posted(work, receives, spans)


def _posted(work: Work, receives: Int64Array, spans: Int64Array) -> dict[int, int]:
    """Return the part of a pass that had ended last when each receive began."""
    ended = np.maximum.accumulate(work.end_ns[spans])
    at = np.searchsorted(ended, work.start_ns[receives], side="right") - 1
    return dict(zip(receives[at >= 0].tolist(), spans[at[at >= 0]].tolist(), strict=True))


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
        if one.chunk >= 0:
            place[one.microbatch, -1].append(at)
    found = []
    for number, row in enumerate(transfers):
        named = place.get((int(work.microbatch[row]), int(work.chunk[row])), [])
        found.append(named[0] if len(named) == 1 else number + skip)
    return found


def _receives(work: Work, receives: list[int], own: list[_Pass], before: Before) -> None:
    missing = max(len(own) - len(receives), 0)  # the first stage receives nothing
    skip = missing if missing < len(own) else 0
    for row, at in zip(receives, _belonging(work, receives, own, skip=skip), strict=True):
        if at < len(own):
            before[own[at].first].append(row)
        if 0 < at <= len(own):
            before[row].append(own[at - 1].last)
    for one, other in pairwise(receives):
        before[other].append(one)


def _sends(work: Work, sends: list[int], own: list[_Pass], before: Before) -> None:
    for row, at in zip(sends, _belonging(work, sends, own, skip=0), strict=True):
        if at < len(own):
            before[row].append(own[at].last)
    for one, other in pairwise(sends):
        before[other].append(one)


def _first_receive(receives: list[int], passes: list[_Pass], before: Before) -> None:
    """Post the first receive of a gradient during the pass before the first backward one, not at once."""
    place = next((at for at, one in enumerate(passes) if one.direction == "backward"), 0)
    if receives and place >= 2:
        before[receives[0]].append(passes[place - 2].last)


def _others(work: Work, rest: Int64Array, spans: Int64Array, before: Before) -> None:
    """Connect what is neither pass nor transfer: before the first pass, after the last, or between."""
    begin, end = work.start_ns[spans], work.end_ns[spans]
    ended = int(np.argmax(end))
    start = work.start_ns[rest]
    head, tail = rest[start < begin[0]].tolist(), rest[start >= begin[ended]].tolist()
    between = rest[(start >= begin[0]) & (start < begin[ended])]
    for one, other in pairwise(head):
        before[other].append(one)
    if head:
        before[int(spans[0])].append(head[-1])
    for one, other in pairwise([int(spans[ended]), *tail]):
        before[other].append(one)
    after = np.searchsorted(np.maximum.accumulate(end), work.start_ns[between], side="right") - 1
    until = np.searchsorted(begin, work.end_ns[between])
    reduced: dict[int, int] = {}
    for row, done, later in zip(between.tolist(), after.tolist(), until.tolist(), strict=True):
        if done >= 0:
            before[row].append(int(spans[done]))
        what = int(work.what[row])
        if work.names[what] in REDUCTIONS:
            if what in reduced:
                before[row].append(reduced[what])
            reduced[what] = row
        elif later < len(spans):
            before[int(spans[later])].append(row)
    if tail:
        before[tail[0]] += reduced.values()
