"""Reads XPlane, the protobuf of XLA's profiler (JAX, TensorFlow, PyTorch/XLA). A device is a rank.

Messages: https://github.com/openxla/xla, ``xla/tsl/profiler/protobuf/xplane.proto``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from foretrace.tracer.errors import IngestError
from foretrace.tracer.ingest.device_events import COPY, KERNEL, SET, DeviceEvents, recordings
from foretrace.tracer.ingest.protobuf import Fields, fields, number_of, text_of
from foretrace.tracer.ingest.recording import Recording
from foretrace.tracer.ingest.sources import Progress, Source, read_whole

_PLANES, _NAME, _LINES, _EVENT_NAMES, _STAT_NAMES = 1, 2, 3, 4, 5
_LINE_ID, _LINE_START_NS, _EVENTS = 1, 3, 4
_EVENT_ID, _OFFSET_PS, _DURATION_PS, _STATS = 1, 2, 3, 4

_DEVICE: Final = re.compile(r"/device:(?P<kind>[A-Za-z_]+):\d+")
_STREAM: Final = re.compile(r"Stream #(\d+)")
_OPERATIONS: Final = re.compile(r"XLA Ops|Async XLA Ops")
"""Lines of a device on which it runs: streams of a GPU, operations of a TPU. Others say the same again, by
module, by step or by framework operator."""

_STEPS: Final = "Steps"
_COPY: Final = re.compile(r"Memcpy(?P<kind>[HDP])2(?P<to>[HDP])")


class _Line(NamedTuple):
    """A line of a plane: its name, number, and events as name, start and end in ns, correlation number."""

    name: str
    number: int
    events: list[tuple[str, int, int, int]]


def read(source: Source, progress: Progress | None = None) -> list[Recording]:
    """Read one file; a rank for each of its devices.

    Raises IngestError: it is cut off, is no such file, or nothing in it ran on a device.
    """
    data = read_whole(source, progress)
    try:
        planes = [fields(value) for tag, value in fields(data) if tag == _PLANES and isinstance(value, bytes)]
        ranks = _ranks(planes)
    except (IndexError, ValueError, KeyError) as error:
        raise IngestError(f"{source.name} is no XPlane, or ends in the middle of a message") from error
    return recordings(ranks, source.name, "its devices")


def _ranks(planes: list[Fields]) -> dict[str, DeviceEvents]:
    """Return what ran on each device; calls of the host are those of the devices that they launched on."""
    ranks: dict[str, DeviceEvents] = {}
    owner: dict[int, DeviceEvents] = {}
    hosts = []
    for plane in planes:
        name = next((text_of(value) for tag, value in plane if tag == _NAME), "")
        if name == "/host:CPU":
            hosts.append(plane)
        elif match := _DEVICE.fullmatch(name):
            ranks[name] = events = DeviceEvents()
            lines = _lines(plane)
            # where streams are told, operations say again what their kernels did
            streamed = any(_STREAM.match(line.name) for line in lines)
            for line in lines:
                if not (streamed and _OPERATIONS.fullmatch(line.name)):
                    _add_line(line, events, owner, is_gpu=match["kind"] == "GPU")
    for plane in hosts:
        for line in _lines(plane):
            for name, start, end, number in line.events:
                if number in owner:
                    owner[number].add_call(name, start, end, thread=line.number, correlation=number)
    return ranks


def _add_line(line: _Line, events: DeviceEvents, owner: dict[int, DeviceEvents], *, is_gpu: bool) -> None:
    stream = _STREAM.match(line.name)
    if line.name == _STEPS:
        for name, start, end, _ in line.events:
            events.add_note(f"step {name}" if name.isdecimal() else name, start, end, thread=-1)
    elif stream is None and not _OPERATIONS.fullmatch(line.name):
        return
    for name, start, end, launch in line.events if line.name != _STEPS else ():
        copy = _COPY.search(name)
        kind = COPY if copy else SET if name.startswith("Memset") else KERNEL
        shown = f"Memcpy {copy['kind']}to{copy['to']}" if copy else name
        number = launch if is_gpu else 0
        events.add(
            kind, shown, start, end, stream=int(stream[1]) if stream else line.number, correlation=number
        )
        if number:
            owner[number] = events


def _lines(plane: Fields) -> list[_Line]:
    names = _table(plane, _EVENT_NAMES)
    correlation = next((k for k, name in _table(plane, _STAT_NAMES).items() if name == "correlation_id"), -1)
    return [
        _line(fields(value), names, correlation)
        for tag, value in plane
        if tag == _LINES and isinstance(value, bytes)
    ]


def _line(said: Fields, names: Mapping[int, str], correlation: int) -> _Line:
    start_ns, number = number_of(said, _LINE_START_NS), number_of(said, _LINE_ID)
    name = next((text_of(value) for tag, value in said if tag == _NAME), "")
    events = [
        _event(fields(value), start_ns, names, correlation)
        for tag, value in said
        if tag == _EVENTS and isinstance(value, bytes)
    ]
    return _Line(name, number, events)


def _event(
    said: Fields, line_ns: int, names: Mapping[int, str], correlation: int
) -> tuple[str, int, int, int]:
    offset_ps, duration_ps = number_of(said, _OFFSET_PS), number_of(said, _DURATION_PS)
    number = 0
    for tag, value in said:
        if tag == _STATS and isinstance(value, bytes):
            stat = fields(value)
            if number_of(stat, 1) == correlation:
                # An XStat holds an unsigned number in field 3, a signed one in field 4.
                number = number_of(stat, 3) or number_of(stat, 4)
    start_ns = line_ns + round(offset_ps / 1000)
    # The end is rounded, not the length, so that what follows without a pause still does.
    end_ns = line_ns + round((offset_ps + max(duration_ps, 0)) / 1000)
    return names.get(number_of(said, _EVENT_ID), "event"), start_ns, end_ns, number


def _table(plane: Fields, tag: int) -> dict[int, str]:
    """Return names by number, of events or of what is said of them: a map of messages with both."""
    found = {}
    for one, value in plane:
        if one == tag and isinstance(value, bytes):
            inner = dict(fields(value)).get(2, b"")
            said = fields(inner) if isinstance(inner, bytes) else []
            found[number_of(said, 1)] = text_of(dict(said).get(2, b""))
    return found
