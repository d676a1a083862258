"""The lanes of one rank in one step, as the viewer draws them.

The first lane covers the step exactly: work as it ran, and between it the states of
``traces.analysis.activity``. Below it lie a lane for every further stream on which the device works, lanes
for the communication of each axis, as few as keep spans from overlapping, and one for what the host does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from foretrace.traces.analysis.activity import HOST, UNNAMED_AXIS, Activity
from foretrace.traces.analysis.communications import COMMUNICATION
from foretrace.traces.columns import Int64Array, bounds, factorized, int64, is_one_of, labels, lanes
from foretrace.traces.layout import AXES

COMPUTE_CATEGORIES: Final = ("compute", "copy")
"""Categories of spans during which a rank computes, copies of ``offloaded.KINDS`` aside."""

LaneKey = tuple[str, str, int]
"""Axis, direction (``send``, ``recv`` or none), and level: 0 unless spans of that axis overlap. Of a stream:
its name, ``STREAM``, 0."""

STREAM: Final = "stream"

_MOST_STREAMS: Final = 8
"""Further streams that have lanes: more are tens of streams that loaders and libraries open."""

_MOST_LEVELS: Final = 12
"""Lanes that the overlapping spans of one axis may take; what does not fit there is left out."""

_DIRECTIONS: Final = ("send", "recv")  # kinds of point-to-point transfers, which get lanes of their own
STATE_ROW: Final = -1  # in ``Pieces.row``: nothing ran, or nothing that the timeline names


@dataclass(frozen=True, slots=True)
class Pieces:
    """Intervals of one lane, in order, without overlap. Arrays have shape ``(n_pieces,)``."""

    # bounds
    start_ns: Int64Array
    end_ns: Int64Array
    row: Int64Array  # row of the rank's timeline that each is a part of, or ``STATE_ROW``
    state: NDArray[np.int16]  # index into the states of the run; 0, compute, where ``row`` says what ran


def compute_lane(spans: pa.Table, activity: Activity) -> Pieces:
    """Return what *activity* is made of: the spans that were computing, and the states between them.

    Where several streams compute at once, the one named ``compute`` is shown, else the busiest.

    Args:
        spans: the timeline of the rank.
        activity: what the rank does in the step.
    """
    start, end = bounds(spans)
    edges = np.append(activity.start_ns, activity.end_ns[-1:])
    low, high = int(edges[0]), int(edges[-1])
    rows = np.flatnonzero(is_one_of(spans, "category", COMPUTE_CATEGORIES) & (end > low) & (start < high))
    points = np.unique(np.concatenate([edges, start[rows].clip(low, high), end[rows].clip(low, high)]))
    state = activity.state[np.searchsorted(activity.start_ns, points[:-1], side="right") - 1]
    owner = np.full(len(points) - 1, STATE_ROW, np.int64)
    # Backwards, so that the stream that is to be shown is written last.
    for chosen in reversed(list(_by_stream(spans, rows))):
        ordered = chosen[np.argsort(start[chosen], kind="stable")]
        position = np.searchsorted(start[ordered], points[:-1], side="right") - 1
        found = ordered[position.clip(0)]
        running = (position >= 0) & (end[found] > points[:-1])
        owner[running] = found[running]
    # Copies of what is offloaded run there, too, and are no work.
    owner[state != 0] = STATE_ROW
    first = np.flatnonzero((np.diff(owner, prepend=-2) != 0) | (np.diff(state, prepend=-1) != 0))
    return Pieces(points[first], np.append(points[first[1:]], points[-1:]), owner[first], state[first])


def communication_lanes(spans: pa.Table, low: int, high: int) -> dict[LaneKey, Int64Array]:
    """Return the rows of each communication lane in the window from *low* to *high*, in order of start."""
    start, end = bounds(spans)
    inside = (end > low) & (start < high)
    found: dict[LaneKey, Int64Array] = {}
    communication = np.flatnonzero(inside & is_one_of(spans, "category", COMMUNICATION))
    host = np.flatnonzero(inside & is_one_of(spans, "category", (HOST,)))
    for rows, axis_of in ((communication, None), (host, HOST)):
        for axis, direction, chosen in _by_axis_and_direction(spans, rows, axis_of):
            ordered = chosen[np.argsort(start[chosen], kind="stable")]
            for level, part in enumerate(_without_overlap(ordered, start, end)):
                found[axis, direction, level] = part
    return found


def stream_lanes(spans: pa.Table, low: int, high: int) -> dict[LaneKey, Int64Array]:
    """Return the rows of each stream that works in the window, but for the main one of `compute_lane`."""
    start, end = bounds(spans)
    inside = is_one_of(spans, "category", COMPUTE_CATEGORIES) & (end > low) & (start < high)
    codes, names = labels(spans, "stream")
    found: dict[LaneKey, Int64Array] = {}
    for rows in list(_by_stream(spans, np.flatnonzero(inside)))[1 : 1 + _MOST_STREAMS]:
        ordered = rows[np.argsort(start[rows], kind="stable")]
        found[names[codes[rows[0]]], STREAM, 0] = ordered.astype(np.int64)
    return found


def lane_order(key: LaneKey) -> tuple[int, str, bool, int]:
    """Sort lanes: streams, then from the innermost axis outwards, sends before receives, the host last."""
    axis, direction, level = key
    if direction == STREAM:
        # By the numbers in names: stream 10 comes behind stream 9.
        return -1, re.sub(r"\d+", lambda number: number[0].zfill(9), axis), False, level
    place = AXES.index(axis) if axis in AXES else len(AXES) + (axis == HOST)
    return place, axis, direction == "recv", level


def hidden_ns(lane: Pieces, start_ns: Int64Array, end_ns: Int64Array) -> Int64Array:
    """Return how much of each interval from *start_ns* to *end_ns* passes while *lane* computes."""
    if not len(lane.start_ns):
        return np.zeros(len(start_ns), np.int64)
    length = np.where(lane.state == 0, lane.end_ns - lane.start_ns, 0)
    before = np.concatenate([[0], np.cumsum(length)])

    def computed_until(t: Int64Array) -> Int64Array:
        inside = t.clip(lane.start_ns[0], lane.end_ns[-1])
        piece = np.searchsorted(lane.start_ns, inside, side="right") - 1
        partial = np.where(lane.state[piece] == 0, inside - lane.start_ns[piece], 0)
        found: Int64Array = before[piece] + partial
        return found

    return computed_until(end_ns) - computed_until(start_ns)


def _by_stream(spans: pa.Table, rows: NDArray[np.intp]) -> Iterator[NDArray[np.intp]]:
    """Yield the compute rows of each stream: the one named compute, then the busiest; copies last."""
    codes, names = labels(spans, "stream")
    duration = int64(spans, "duration_ns")
    copies = is_one_of(spans, "category", ("copy",))
    found = []
    for code in np.unique(codes[rows]):
        chosen = rows[codes[rows] == code]
        rank = (bool(copies[chosen].all()), names[code] != "compute", -int(duration[chosen].sum()))
        found.append((rank, int(code), chosen))
    for _, _, chosen in sorted(found, key=lambda item: item[:2]):
        yield chosen


def _by_axis_and_direction(
    spans: pa.Table, rows: NDArray[np.intp], axis: str | None
) -> Iterator[tuple[str, str, NDArray[np.intp]]]:
    """Yield axis, direction and rows of each lane, before overlaps; *axis* if given instead of the column."""
    if not len(rows):
        return
    axis_codes, axis_names = labels(spans, "axis")
    kind_codes, kind_names = labels(spans, "kind")
    is_directed = np.array([name in _DIRECTIONS for name in kind_names], np.bool_)
    direction = np.where(is_directed[kind_codes], kind_codes, -1)[rows]
    key = factorized(axis_codes[rows], direction)
    for lane in range(key.max() + 1):
        chosen = rows[key == lane]
        first = chosen[0]
        kind = kind_names[kind_codes[first]]
        named = axis or axis_names[axis_codes[first]] or UNNAMED_AXIS
        yield named, kind if kind in _DIRECTIONS else "", chosen


def _without_overlap(ordered: NDArray[np.intp], start: Int64Array, end: Int64Array) -> list[Int64Array]:
    """Split rows, in order of start, into as few lanes as keep them from overlapping."""
    level, _ = lanes(start[ordered], end[ordered], 0, _MOST_LEVELS)
    return [ordered[level == number] for number in range(int(level.max(initial=-1)) + 1)]
