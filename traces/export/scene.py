"""What trace viewers draw: tracks of slices that do not overlap, with names, arguments and arrows.

A communication becomes two slices: one of waiting for the others, named ``wait: ...``, and one of moving
data. Arrows go from the moving part of a send to that of its receive, which begin together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapreplace
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from foretrace.traces.analysis.communications import arrivals
from foretrace.traces.columns import BoolArray, Int64Array, bounds, int64, is_one_of, labels
from foretrace.traces.layout import Coord
from foretrace.traces.run import Run

STREAMS: Final = ("compute", "tp", "cp", "ep", "dp", "pp.send", "pp.recv", "copy", "host", "step", "phase")
"""Streams in the order in which they are drawn; others follow by name."""

ARGUMENTS: Final = (
    "step", "microbatch", "layer", "stage", "size_bytes", "flops", "peer", "group", "sequence",
)  # fmt: skip
"""Columns shown with a slice where they say something."""

WAITING: Final = "waiting"  # category of the part of a communication in which its rank waits for others

_NOTHING_IF_ZERO: Final = ("size_bytes", "flops")
_LANES_PER_RANK: Final = 4096


class Track(NamedTuple):
    """One line of slices."""

    id: int  # number, unique over all ranks; never 0
    parent: int  # number of the track of its rank; 0 for that track itself, which holds the compute slices
    name: str  # what it is called
    order: int  # place below its parent, or among the ranks
    is_send: bool  # whether its arrows begin here


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """The slices of one rank, ordered by track and start. Arrays have shape ``(n_slices,)``."""

    rank: int  # global rank
    tracks: tuple[Track, ...]  # the track of the rank first, then its children
    track: NDArray[np.int64]  # index into ``tracks``
    name: NDArray[np.int64]  # index into ``names``
    names: tuple[str, ...]  # what slices are called
    category: NDArray[np.int64]  # index into ``categories``
    categories: tuple[str, ...]  # those of the timeline, and ``WAITING``
    # bounds
    start_ns: Int64Array
    end_ns: Int64Array
    arguments: dict[str, Int64Array]  # by name; -1 where there is nothing to say
    arrow: NDArray[np.uint64]  # number that a send shares with its receive, 0 if none
    arrow_ends: BoolArray  # whether the arrow ends at this slice


def scene(run: Run, rank: int, drawn: frozenset[int]) -> Scene:
    """Return the slices of *rank*; arrows only to and from the ranks that are *drawn*."""
    table = run.spans([rank])
    stored = run.source(rank)
    start, end = bounds(table)
    moving = arrivals(run).last_ns[stored]
    tracks, track = _tracks(run, rank, table, start, end)
    name, names = _names(table)
    category, categories = labels(table, "category")
    waits = np.flatnonzero(moving > start)
    # Behind all spans, a second slice of each that waits.
    rows = np.concatenate([np.arange(len(start)), waits])
    is_wait = np.arange(len(rows)) >= len(start)
    begin = np.where(is_wait, start[rows], moving[rows])
    # Of a communication the waiting comes before the moving that begins where it ends.
    order = np.lexsort((~is_wait, begin, track[rows]))
    rows, is_wait = rows[order], is_wait[order]
    arrow, arrow_ends = _arrows(table, rank, drawn)
    return Scene(
        rank=rank,
        tracks=tracks,
        track=track[rows],
        name=name[rows] + np.where(is_wait, len(names), 0),
        names=(*names, *(f"wait: {label}" for label in names)),
        category=np.where(is_wait, len(categories), np.asarray(category, np.int64)[rows]),
        categories=(*categories, WAITING),
        start_ns=begin[order],
        end_ns=np.where(is_wait, moving[rows], end[rows]),
        arguments=_arguments(table, rows),
        arrow=np.where(is_wait, np.uint64(0), arrow[rows]),
        arrow_ends=arrow_ends[rows],
    )


def origin_ns(run: Run) -> int:
    """Return what to subtract from times, so that none is negative; 0 unless clocks were moved."""
    first = (int(int64(run.spans([rank]), "start_ns").min(initial=0)) for rank in run.stored_ranks)
    return min(0, *first)


def counters(run: Run, ranks: tuple[int, ...]) -> list[tuple[int, str, Int64Array, Int64Array]]:
    """Return memory over time as ``(rank, name, t_ns, bytes)``; the total alone where there is one."""
    table = run.memory()
    codes, names = labels(table, "category") if table.num_rows else (np.zeros(0, np.int32), [])
    stored, t_ns, size = (int64(table, name) for name in ("rank", "t_ns", "bytes"))
    found = []
    for rank in ranks:
        mine = stored == run.source(rank)
        present = [names[code] for code in np.unique(codes[mine])]
        for name in [name for name in present if name == "total"] or present:
            rows = mine & (codes == names.index(name))
            found.append((rank, f"memory {name}", t_ns[rows], size[rows]))
    return found


def by_arguments(drawn: Scene) -> Iterator[tuple[NDArray[np.intp], tuple[str, ...]]]:
    """Yield the slices that have the same arguments, as rows and names."""
    names = tuple(drawn.arguments)
    present = np.zeros(len(drawn.track), np.int64)
    for bit, name in enumerate(names):
        present |= (drawn.arguments[name] >= 0).astype(np.int64) << bit
    for mask in np.unique(present).tolist():
        chosen = tuple(name for bit, name in enumerate(names) if mask >> bit & 1)
        yield np.flatnonzero(present == mask), chosen


def rank_name(run: Run, rank: int) -> str:
    """Return what to call the track of *rank*: its number, and its place along the axes that matter."""
    layout = run.info.layout
    if layout is None or layout.world_size == 1:
        return f"rank {rank}"
    coord = layout.coord(rank)._asdict()
    places = [f"{axis} {coord[axis]}" for axis in Coord._fields if getattr(layout, axis) > 1]
    return f"rank {rank} ({', '.join(places)})"


def track_id(rank: int) -> int:
    """Return the number of the track of *rank*; those of its children follow."""
    return _LANES_PER_RANK * (rank + 1)


def _tracks(
    run: Run, rank: int, table: pa.Table, start: Int64Array, end: Int64Array
) -> tuple[tuple[Track, ...], NDArray[np.int64]]:
    """Return the tracks of a rank, and the track of each span; overlapping spans get more tracks."""
    codes, streams = labels(table, "stream")
    first = track_id(rank)
    tracks = [Track(first, 0, rank_name(run, rank), rank, is_send=False)]
    track = np.zeros(len(codes), np.int64)
    for stream in sorted({streams[code] for code in np.unique(codes)}, key=_stream_order):
        rows = np.flatnonzero(codes == streams.index(stream))
        rows = rows[np.lexsort((end[rows], start[rows]))]
        lanes = _lanes(start[rows], end[rows])
        for lane in range(int(lanes.max(initial=0)) + 1):
            if stream == "compute" and lane == 0:
                continue  # on the track of the rank itself: children are collapsed when a trace is opened
            track[rows[lanes == lane]] = len(tracks)
            name = stream if lane == 0 else f"{stream} ({lane + 1})"
            tracks.append(
                # Streams of other writers have other names with `send` in them.
                Track(first + len(tracks), first, name, len(tracks), is_send="send" in stream.split("."))
            )
    return tuple(tracks), track


def _lanes(start: Int64Array, end: Int64Array) -> NDArray[np.int64]:
    """Return for each span, ordered by start, the first lane that is free: all 0 where none overlap."""
    lanes = np.zeros(len(start), np.int64)
    if not len(start) or (start[1:] >= np.maximum.accumulate(end)[:-1]).all():
        return lanes
    busy = [(int(end[0]), 0)]
    for i in range(1, len(start)):
        free_at, lane = busy[0]
        if free_at <= start[i]:
            lanes[i] = lane
            heapreplace(busy, (int(end[i]), lane))
        else:
            lanes[i] = len(busy)
            busy.append((int(end[i]), len(busy)))
            # A sorted list is a heap.
            busy.sort()
    return lanes


def _stream_order(stream: str) -> tuple[int, str]:
    known = [place for place, name in enumerate(STREAMS) if f"{stream}.".startswith(f"{name}.")]
    return (known[0] if known else len(STREAMS), stream)


def _names(table: pa.Table) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Return names as index and list: the kind, and what the span is called besides; the number of a step."""
    kind, kinds = labels(table, "kind")
    name, names = labels(table, "name")
    pair = kind.astype(np.int64) * max(len(names), 1) + name
    distinct, index = np.unique(pair, return_inverse=True)
    said = []
    for number in distinct.tolist():
        what, which = kinds[number // max(len(names), 1)], names[number % max(len(names), 1)]
        said.append(which if what in which or not what else f"{what} {which}".strip())
    is_step = is_one_of(table, "category", ("step",))
    steps, numbered = np.unique(int64(table, "step")[is_step], return_inverse=True)
    index[is_step] = len(said) + numbered
    return index.astype(np.int64), (*said, *(f"step {step}" for step in steps.tolist()))


def _arguments(table: pa.Table, rows: NDArray[np.intp]) -> dict[str, Int64Array]:
    """Return the arguments of slices made of *rows*, -1 where there is nothing to say."""
    found = {}
    for name in ARGUMENTS:
        value = int64(table, name)[rows]
        found[name] = np.where(value > 0, value, -1) if name in _NOTHING_IF_ZERO else value
    return found


def _arrows(table: pa.Table, rank: int, drawn: frozenset[int]) -> tuple[NDArray[np.uint64], BoolArray]:
    """Return a number per p2p span that both ends compute alike, 0 for others, and which of them receive."""
    peer, sequence = int64(table, "peer"), int64(table, "sequence")
    is_send = is_one_of(table, "kind", ("send",))
    sender = np.where(is_send, rank, peer)
    receiver = np.where(is_send, peer, rank)
    number = np.zeros(len(peer), np.uint64)
    for part in (int64(table, "group"), sender, receiver, sequence):
        number = (number ^ part.astype(np.uint64)) * np.uint64(0x9E37_79B9_7F4A_7C15)  # Fibonacci hashing
        number ^= number >> np.uint64(32)
    joined = is_one_of(table, "category", ("p2p",)) & (sequence >= 0) & np.isin(peer, list(drawn))
    # An odd number is never 0, which stands for no arrow.
    return np.where(joined, number | np.uint64(1), np.uint64(0)), ~is_send
