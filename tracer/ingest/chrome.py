r"""Reads the events of a Chrome trace, as Kineto and others write it, block by block.

Kineto has written every event in one layout since 2022 (``{\n    "ph": "X", "cat": "kernel", ...\n  }``).
Where a file has it, the events that matter are found by searching bytes and parsed by Arrow; nothing else is
looked at. Any other layout is decoded event by event. Both hold one block of the file in memory.
"""

from __future__ import annotations

import gc
import json
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import IO, Any, Final, NamedTuple

import pyarrow as pa

from foretrace.tracer.errors import IngestError
from foretrace.tracer.ingest.decoder import BLOCK_BYTES, Decoder
from foretrace.tracer.ingest.events import (
    CALL_NAME,
    DEVICE,
    DEVICE_CATEGORIES,
    LAUNCH,
    LAUNCH_CATEGORIES,
    NOTE_CATEGORIES,
    device_events,
    from_objects,
    launch_events,
    objects,
)
from foretrace.tracer.ingest.layout import Events, NamesLeftOut
from foretrace.tracer.ingest.notes import note_of
from foretrace.tracer.ingest.sources import UNREADABLE
from foretrace.tracer.ingest.trace import Trace

MOST_WAITING: Final = 2
"""Blocks of which the events are held until Arrow has parsed them."""

_END: Final = b"\n  }"
_BETWEEN: Final = b"\n  },\n  {"
EVENTS_KEY: Final = b'"traceEvents": ['
_DEVICE: Final = (b"kernel", b"gpu_mem")
_LAUNCH: Final = (b"cuda_",)
_EARLY_DEVICE: Final = (b"Kernel", b"Mem")
_EARLY_LAUNCH: Final = (b"Runtime",)
_TODAY: Final = b'"cat": "cpu_op"'
"""Category of operators since 2022; before, they were ``Operator``, and others had capitals, too."""

NEITHER: Final = NamesLeftOut(
    b'cuda_runtime", "name": "cuda',
    tuple(
        b"DeviceGe EventCre EventDes EventRec FuncGetA FuncSetA GetDevic GetLastE Occupanc PeekAtLa PointerG "
        b"SetDevic StreamGe StreamIs StreamWa".split()
    ),
)
"""Runtime calls that neither launch nor block, a third to a half of all; eight letters tell them apart."""

_NOTES: Final = (b"user_annotation", b"gpu_user_annotation", b'cpu_op", "name": "record_param_comms')


def has_kineto_layout(start: bytes) -> bool:
    """Whether a file that begins with *start* has the layout that Kineto writes."""
    at = start.find(EVENTS_KEY)
    return at >= 0 and start.startswith(b'\n  {\n    "ph": "', at + len(EVENTS_KEY))


def read_kineto_layout(stream: IO[bytes], *, operators: bool = False) -> Trace:
    """Read a file in Kineto's layout.

    Args:
        stream: the decompressed file.
        operators: read CPU operators only, for a file without device events.
    """
    trace = Trace()
    with ThreadPoolExecutor(max_workers=1) as pool:  # Arrow parses what was found while the next is searched
        parsing: deque[Future[_Parsed]] = deque()
        is_early = True  # until a category of today is seen: one program writes a whole file
        for block, size in _blocks(stream, trace):
            events = Events(block, size)
            trace.n_events += events.n_events
            if operators:
                trace.operators += objects(events.texts((b'cpu_op"',)), trace.lost)
                continue
            is_early = is_early and block.find(_TODAY, 0, size) < 0
            for event in objects(events.texts(_NOTES), trace.lost):
                _note(trace, event)
            parsing.append(pool.submit(_parsed, *_texts(events, is_early=is_early)))
            if len(parsing) > MOST_WAITING:
                parsing.popleft().result().added_to(trace)
        for done in parsing:
            done.result().added_to(trace)
    return trace


def read_any_layout(stream: IO[bytes], *, operators: bool = False) -> Trace:
    """Read a Chrome trace of any layout: an array of events, or an object with ``traceEvents``.

    Raises:
        IngestError: the file is not JSON of that shape, or nests too deeply.
    """
    trace = Trace()
    held: dict[str, list[dict[str, Any]]] = {"device": [], "launch": []}
    try:
        with _uncollected():
            for event in Decoder(stream, trace).events():
                trace.n_events += 1
                _keep(trace, held, event, operators=operators)
                if len(held["device"]) + len(held["launch"]) >= 1 << 16:
                    _flush(trace, held)
    except RecursionError as error:
        raise IngestError("values are nested too deeply to be a trace") from error
    _flush(trace, held)
    return trace


@contextmanager
def _uncollected() -> Iterator[None]:
    """Look for no garbage meanwhile: decoded JSON has no circles, and looking takes a quarter of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _keep(trace: Trace, held: dict[str, list[dict[str, Any]]], event: object, *, operators: bool) -> None:
    """Put *event* where it belongs; what is not an event is counted."""
    if not isinstance(event, dict):
        trace.lost["malformed event"] += 1
        return
    category = event.get("cat")
    if event.get("ph") != "X" or not isinstance(category, str):
        return
    if operators:
        if category == "cpu_op":
            trace.operators.append(event)
    elif category in DEVICE_CATEGORIES:
        held["device"].append(event)
    elif category in LAUNCH_CATEGORIES:
        held["launch"].append(event)
    elif category in NOTE_CATEGORIES or event.get("name") == CALL_NAME:
        _note(trace, event)


def _flush(trace: Trace, held: dict[str, list[dict[str, Any]]]) -> None:
    trace.device.append(from_objects(held["device"], DEVICE))
    trace.launches.append(from_objects(held["launch"], LAUNCH))
    held["device"], held["launch"] = [], []


def _blocks(stream: IO[bytes], trace: Trace) -> Iterator[tuple[bytearray, int]]:
    """Yield the file in pieces that end between two events, each as a buffer and how much of it counts.

    The next piece overwrites the buffer. Header and footer go into *trace*.
    """
    buffer, filled, begun = bytearray(2 * BLOCK_BYTES), 0, False
    while True:
        if filled > len(buffer) // 2:  # one event larger than a block
            buffer = buffer + bytearray(len(buffer))
        read = _read_into(stream, memoryview(buffer)[filled : filled + BLOCK_BYTES], trace)
        filled += read
        if not begun and (at := buffer.find(EVENTS_KEY, 0, filled)) >= 0:
            trace.header = _header(bytes(buffer[: at + len(EVENTS_KEY)]) + b"]}")
            filled = _dropped(buffer, at + len(EVENTS_KEY), filled)
            begun = True
        if not read:
            break
        cut = buffer.rfind(_BETWEEN, 0, filled)
        if cut >= 0:
            yield buffer, cut + len(_END)
            filled = _dropped(buffer, cut + len(_END) + 1, filled)
    end = buffer.rfind(b"\n  }\n  ]", 0, filled)
    if end < 0:
        trace.cut = trace.cut or "the file ends in the middle"
        yield buffer, max(buffer.rfind(_END, 0, filled), -len(_END)) + len(_END)
        return
    footer = bytes(buffer[end + len(b"\n  }\n  ]") : filled]).strip().removeprefix(b",")
    trace.header = {**_header(b"{" + footer), **trace.header}
    yield buffer, end + len(_END)


def _read_into(stream: IO[bytes], place: memoryview, trace: Trace) -> int:
    """Read the next bytes of the file into *place*; return how many, 0 at its end or where it is damaged."""
    done = 0
    try:
        while done < len(place) and (n := stream.readinto(place[done:])):  # type: ignore[attr-defined]
            done += n
    except UNREADABLE as error:
        trace.cut = f"damaged: {error}"
    return done


def _dropped(buffer: bytearray, start: int, filled: int) -> int:
    """Move what lies between *start* and *filled* to the front of *buffer*; return how much it is."""
    rest = buffer[start:filled]
    buffer[: len(rest)] = rest
    return len(rest)


def _header(data: bytes) -> dict[str, Any]:
    """Return the keys of a JSON object, none if it cannot be read."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return (
        {name: value for name, value in found.items() if name != "traceEvents"}
        if isinstance(found, dict)
        else {}
    )


def _texts(events: Events, *, is_early: bool) -> tuple[list[bytes | bytearray], list[bytes | bytearray]]:
    """Return the texts of device events, and of the launches that matter."""
    device = events.texts((*_DEVICE, *(_EARLY_DEVICE if is_early else ())))
    return device, events.texts((*_LAUNCH, *(_EARLY_LAUNCH if is_early else ())), but=NEITHER)


class _Parsed(NamedTuple):
    """Device events and launches of one block, and what of them was lost."""

    device: pa.Table
    launches: pa.Table
    lost: Counter[str]

    def added_to(self, trace: Trace) -> None:
        """Add it to *trace*."""
        trace.device.append(self.device)
        trace.launches.append(self.launches)
        trace.lost.update(self.lost)


def _parsed(device: list[bytes | bytearray], launches: list[bytes | bytearray]) -> _Parsed:
    """Parse the texts of device events and launches."""
    lost: Counter[str] = Counter()
    return _Parsed(device_events(device, lost), launch_events(launches, lost), lost)


def _note(trace: Trace, event: Mapping[str, Any]) -> None:
    """Keep what is known of *event*, an annotation."""
    if (note := note_of(event)) is not None:
        trace.notes.append(note)
