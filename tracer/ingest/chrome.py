r"""Reads the events of a Chrome trace, as Kineto and others write it, block by block.

Kineto has written every event in one layout since 2022 (``{\n    "ph": "X", "cat": "kernel", ...\n  }``).
Where a file has it, the events that matter are found by searching bytes and parsed by Arrow; nothing else is
looked at. Any other layout is decoded event by event. Both hold one block of the file in memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any, Final

from tracer.errors import IngestError
from tracer.ingest.decoder import BLOCK_BYTES, Decoder
from tracer.ingest.events import (
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
from tracer.ingest.notes import note_of
from tracer.ingest.sources import UNREADABLE
from tracer.ingest.trace import Trace

_EVENT: Final = b'{\n    "ph": "X", "cat": "'
_END: Final = b"\n  }"
_BETWEEN: Final = b"\n  },\n  {"
_EVENTS_KEY: Final = b'"traceEvents": ['
_DEVICE: Final = (b"kernel", b"gpu_mem")
_LAUNCH: Final = (b"cuda_",)
_EARLY_DEVICE: Final = (b"Kernel", b"Mem")
_EARLY_LAUNCH: Final = (b"Runtime",)
_TODAY: Final = b'"cat": "cpu_op"'
"""Category of operators since 2022; before, they were ``Operator``, and others had capitals, too."""

_NOTES: Final = (b"user_annotation", b"gpu_user_annotation", b'cpu_op", "name": "record_param_comms')


def has_kineto_layout(start: bytes) -> bool:
    """Whether a file that begins with *start* has the layout that Kineto writes."""
    at = start.find(_EVENTS_KEY)
    return at >= 0 and start.startswith(b'\n  {\n    "ph": "', at + len(_EVENTS_KEY))


def read_kineto_layout(stream: IO[bytes], *, operators: bool = False) -> Trace:
    """Read a file in Kineto's layout.

    Args:
        stream: the decompressed file.
        operators: read CPU operators only, for a file without device events.
    """
    trace = Trace()
    with ThreadPoolExecutor(max_workers=1) as pool:  # Arrow parses one block while the next is searched
        waiting: list[Future[None]] = []
        is_early = True  # until a category of today is seen: one program writes a whole file
        for block in _blocks(stream, trace):
            trace.n_events += block.count(b'\n    "ph": "')
            is_early = is_early and _TODAY not in block
            work = _work(block, operators=operators, is_early=is_early)
            for done in waiting:
                done.result()
            waiting = [pool.submit(_parse, trace, work)]
        for done in waiting:
            done.result()
    return trace


def read_any_layout(stream: IO[bytes], *, operators: bool = False) -> Trace:
    """Read a Chrome trace of any layout: an array of events, or an object with ``traceEvents``.

    Raises:
        IngestError: the file is not JSON of that shape, or nests too deeply.
    """
    trace = Trace()
    held: dict[str, list[dict[str, Any]]] = {"device": [], "launch": []}
    try:
        for event in Decoder(stream, trace).events():
            trace.n_events += 1
            _keep(trace, held, event, operators=operators)
            if len(held["device"]) + len(held["launch"]) >= 1 << 16:
                _flush(trace, held)
    except RecursionError as error:
        raise IngestError("values are nested too deeply to be a trace") from error
    _flush(trace, held)
    return trace


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


def _blocks(stream: IO[bytes], trace: Trace) -> Iterator[bytes]:
    """Yield the file in pieces that end between two events; header and footer go into *trace*."""
    rest = b""
    begun = False
    while True:
        try:
            part = stream.read(BLOCK_BYTES)
        except UNREADABLE as error:
            trace.cut = f"damaged: {error}"
            part = b""
        rest += part
        if not begun and _EVENTS_KEY in rest:
            before, key, rest = rest.partition(_EVENTS_KEY)
            trace.header = _header(before + key + b"]}")
            begun = True
        if not part:
            break
        cut = rest.rfind(_BETWEEN)
        if cut >= 0:
            yield rest[: cut + len(_END) + 1]
            rest = rest[cut + len(_END) + 1 :]
    end = rest.rfind(b"\n  }\n  ]")
    if end < 0:
        trace.cut = trace.cut or "the file ends in the middle"
        yield rest[: rest.rfind(_END) + len(_END)] if _END in rest else b""
        return
    yield rest[: end + len(_END)]
    footer = rest[end + len(b"\n  }\n  ]") :].strip().removeprefix(b",")
    trace.header = {**_header(b"{" + footer), **trace.header}


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


def _work(block: bytes, *, operators: bool, is_early: bool) -> dict[str, list[bytes]]:
    """Return the texts of the events of *block* that matter, by what they are."""
    if operators:
        return {"operators": _texts(block, b'cpu_op"')}
    device = (*_DEVICE, *(_EARLY_DEVICE if is_early else ()))
    launches = (*_LAUNCH, *(_EARLY_LAUNCH if is_early else ()))
    return {
        "device": [found for word in device for found in _texts(block, word)],
        "launches": [found for word in launches for found in _texts(block, word)],
        "notes": [found for word in _NOTES for found in _texts(block, word)],
    }


def _texts(block: bytes, category: bytes) -> list[bytes]:
    """Return the text of every event whose category begins with *category*."""
    found = []
    start = _EVENT + category
    at = block.find(start)
    while at >= 0:
        end = block.find(_END, at)
        if end < 0:
            break
        found.append(block[at : end + len(_END)])
        at = block.find(start, end)
    return found


def _parse(trace: Trace, work: dict[str, list[bytes]]) -> None:
    """Parse the texts of one block into *trace*."""
    trace.operators += objects(work.get("operators", ()), trace.lost)
    trace.device.append(device_events(work.get("device", ()), trace.lost))
    trace.launches.append(launch_events(work.get("launches", ()), trace.lost))
    for event in objects(work.get("notes", ()), trace.lost):
        _note(trace, event)


def _note(trace: Trace, event: Mapping[str, Any]) -> None:
    """Keep what is known of *event*, an annotation."""
    if (note := note_of(event)) is not None:
        trace.notes.append(note)
