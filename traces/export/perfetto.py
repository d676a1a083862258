"""Perfetto's native trace format, written with NumPy alone; opens at https://ui.perfetto.dev.

Field numbers are those of perfetto/protos/perfetto/trace/perfetto_trace.proto. What makes a trace good to
look at there: compute slices lie on the track of the rank itself, because children are collapsed at first;
tracks are ordered explicitly; sends are written before receives, because an arrow whose two ends share a
timestamp is lost when its end comes first.
"""

from __future__ import annotations

from typing import BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from foretrace.traces.columns import BoolArray, Int64Array
from foretrace.traces.export.protobuf import (
    ByteMatrix,
    fixed64s,
    interleaved,
    message,
    messages,
    number,
    numbers,
)
from foretrace.traces.export.scene import ARGUMENTS, Scene, by_arguments, counters, origin_ns, scene, track_id
from foretrace.traces.run import Run

# Trace
_PACKET: Final = 1
# TracePacket
_TIMESTAMP, _SEQUENCE_ID, _TRACK_EVENT, _INTERNED_DATA, _SEQUENCE_FLAGS, _TRACK_DESCRIPTOR = (
    8, 10, 11, 12, 13, 60,
)  # fmt: skip
# TrackDescriptor
_UUID, _TRACK_NAME, _PARENT_UUID, _COUNTER, _CHILD_ORDERING, _SIBLING_ORDER_RANK, _PROCESS_ORDERING = (
    1, 2, 5, 8, 11, 12, 19,
)  # fmt: skip
# CounterDescriptor
_UNIT: Final = 3
# TrackEvent
_ANNOTATION, _TYPE, _NAME_IID, _TRACK_UUID, _COUNTER_VALUE, _FLOW, _LAST_FLOW = 4, 9, 10, 11, 30, 47, 48
# InternedData, and its entries
_EVENT_NAMES, _ANNOTATION_NAMES, _IID, _NAME = 2, 3, 1, 2
# DebugAnnotation
_ANNOTATION_IID, _UINT_VALUE = 1, 3

_BEGIN, _END, _COUNTER_TYPE = 1, 2, 4  # TrackEvent.Type
_EXPLICIT: Final = 3  # TrackDescriptor.ChildTracksOrdering
_SIZE_BYTES: Final = 3  # CounterDescriptor.Unit.UNIT_SIZE_BYTES
_CLEARED, _NEEDED = 1, 2  # TracePacket.SequenceFlags: interned data starts here; is needed to read this
_SEQUENCE: Final = number(_SEQUENCE_ID, 1)  # one writer, one sequence
_TIME_BYTES: Final = 9  # a varint of 63 bits: every nanosecond that the timeline can hold
_COUNTER_TRACKS: Final = 1 << 40  # numbers of counter tracks start above those of slice tracks


def write_perfetto(run: Run, ranks: tuple[int, ...], file: BinaryIO) -> None:
    """Write the spans of *ranks*: a track per rank with one child per stream, memory as a counter."""
    zero_ns = origin_ns(run)
    root = message(
        _TRACK_DESCRIPTOR,
        number(_UUID, 0) + number(_CHILD_ORDERING, _EXPLICIT) + number(_PROCESS_ORDERING, 1),
    )
    file.write(message(_PACKET, _SEQUENCE + root))
    interned = _ANNOTATION_NAMES, dict(zip(ARGUMENTS, range(1, len(ARGUMENTS) + 1), strict=True))
    file.write(_interned(*interned, flags=_CLEARED | _NEEDED))
    known: dict[str, int] = {}
    later: list[bytes] = []
    for rank in ranks:
        drawn = scene(run, rank, frozenset(ranks))
        file.write(_descriptors(drawn))
        fresh = {name: len(known) + i for i, name in enumerate((n for n in drawn.names if n not in known), 1)}
        known |= fresh
        if fresh:
            file.write(_interned(_EVENT_NAMES, fresh, flags=_NEEDED))
        name = np.array([known[label] for label in drawn.names], np.int64)[drawn.name]
        is_send = np.array([track.is_send for track in drawn.tracks], np.bool_)[drawn.track]
        file.write(_slices(drawn, name, is_send, zero_ns))
        later.append(_slices(drawn, name, ~is_send, zero_ns))
    for part in later:
        file.write(part)
    file.write(_counters(run, ranks, zero_ns))


def _descriptors(drawn: Scene) -> bytes:
    """Return the packets that describe the tracks of a rank."""
    packets = []
    for track in drawn.tracks:
        text = (
            number(_UUID, track.id)
            + message(_TRACK_NAME, track.name)
            + number(_SIBLING_ORDER_RANK, track.order)
        )
        text += number(_PARENT_UUID, track.parent) if track.parent else number(_CHILD_ORDERING, _EXPLICIT)
        packets.append(message(_PACKET, _SEQUENCE + message(_TRACK_DESCRIPTOR, text)))
    return b"".join(packets)


def _interned(field: int, names: dict[str, int], *, flags: int) -> bytes:
    """Return the packet that gives *names* their numbers, used by later packets instead of the text."""
    entries = b"".join(
        message(field, number(_IID, iid) + message(_NAME, name)) for name, iid in names.items()
    )
    return message(_PACKET, _SEQUENCE + number(_SEQUENCE_FLAGS, flags) + message(_INTERNED_DATA, entries))


def _slices(drawn: Scene, name: Int64Array, chosen: BoolArray, zero_ns: int) -> bytes:
    """Return the begin and end packets of the *chosen* slices, in their order.

    The end of a slice stands before the begin of the next on its track, so that they do not nest.
    """
    track_id = np.array([track.id for track in drawn.tracks], np.int64)[drawn.track]
    records: list[tuple[NDArray[np.intp], ByteMatrix]] = []
    for rows, arguments in by_arguments(drawn):
        for arrow, field in ((0, None), (1, _FLOW), (2, _LAST_FLOW)):
            # 0: no arrow, 1: one begins here, 2: one ends here.
            kind = (drawn.arrow[rows] > 0).astype(np.int64) * (1 + drawn.arrow_ends[rows])
            some = rows[chosen[rows] & (kind == arrow)]
            if len(some):
                extra = [] if field is None else [fixed64s(field, drawn.arrow[some])]
                extra += [_annotation(argument, drawn.arguments[argument][some]) for argument in arguments]
                begin = _event(
                    _BEGIN,
                    drawn.start_ns[some] - zero_ns,
                    track_id[some],
                    [numbers(_NAME_IID, name[some]), *extra],
                )
                end = _event(_END, drawn.end_ns[some] - zero_ns, track_id[some], [])
                records.append((some, np.hstack([begin, end])))
    order = np.full(len(chosen), -1, np.intp)
    order[chosen] = np.arange(int(chosen.sum()))
    return interleaved([(order[rows], matrix) for rows, matrix in records], int(chosen.sum()))


def _event(kind: int, t_ns: Int64Array, track_id: Int64Array, parts: list[ByteMatrix]) -> ByteMatrix:
    """Return one packet per row with an event on a track."""
    n_rows = len(t_ns)
    track = numbers(_TRACK_UUID, track_id)
    event = messages(_TRACK_EVENT, [number(_TYPE, kind), track, *parts], n_rows)
    flags = number(_SEQUENCE_FLAGS, _NEEDED)
    return messages(_PACKET, [numbers(_TIMESTAMP, t_ns, _TIME_BYTES), _SEQUENCE, flags, event], n_rows)


def _annotation(argument: str, value: Int64Array) -> ByteMatrix:
    """Return the field that shows an argument of a slice."""
    iid = number(_ANNOTATION_IID, ARGUMENTS.index(argument) + 1)
    return messages(_ANNOTATION, [iid, numbers(_UINT_VALUE, value)], len(value))


def _counters(run: Run, ranks: tuple[int, ...], zero_ns: int) -> bytes:
    """Return memory over time: one counter track below the track of each rank."""
    parts = []
    for i, (rank, name, t_ns, size_bytes) in enumerate(counters(run, ranks)):
        uuid = _COUNTER_TRACKS + i
        text = number(_UUID, uuid) + message(_TRACK_NAME, name) + number(_PARENT_UUID, track_id(rank))
        text += message(_COUNTER, number(_UNIT, _SIZE_BYTES)) + number(_SIBLING_ORDER_RANK, 1 << 20)
        parts.append(message(_PACKET, _SEQUENCE + message(_TRACK_DESCRIPTOR, text)))
        value = numbers(_COUNTER_VALUE, size_bytes)
        track = np.full(len(t_ns), uuid, np.int64)
        parts.append(_event(_COUNTER_TYPE, t_ns - zero_ns, track, [value]).tobytes())
    return b"".join(parts)
