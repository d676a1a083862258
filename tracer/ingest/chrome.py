r"""Reads the events of a Chrome trace, as Kineto and others write it, block by block.

Kineto has written every event in one layout since 2022 (``{\n    "ph": "X", "cat": "kernel", ...\n  }``).
Where a file has it, the events that matter are found by searching bytes and parsed by Arrow; nothing else is
looked at. Any other layout is decoded event by event. Both hold one block of the file in memory.
"""

from __future__ import annotations

import gc
import json
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import IO, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from foretrace.tracer.errors import IngestError
from foretrace.tracer.ingest.events import (
    CALL_NAMES,
    DEVICE,
    DEVICE_CATEGORIES,
    FRAME_CATEGORIES,
    LAUNCH,
    LAUNCH_CATEGORIES,
    LEAST_FRAME_US,
    MEMORY_INSTANT,
    MODULE,
    NOTE_CATEGORIES,
    OPERATOR_CATEGORIES,
    PRODUCTS,
    encoded_schema,
    from_objects,
    joined,
    number,
    objects,
    parsed,
    text,
)
from foretrace.tracer.ingest.notes import Note, note_of
from foretrace.tracer.ingest.sources import UNREADABLE


@dataclass(slots=True)
class Trace:
    """What one trace file holds."""

    header: dict[str, Any] = field(default_factory=dict)  # keys of the file beside its events
    device: list[pa.Table] = field(default_factory=list)  # kernels and copies, columns ``DEVICE``
    launches: list[pa.Table] = field(default_factory=list)  # runtime calls, columns ``LAUNCH``
    notes: list[Note] = field(default_factory=list)  # annotations and calls of collectives
    frames: list[Note] = field(default_factory=list)  # operators and Python functions that last long
    products: list[dict[str, Any]] = field(default_factory=list)  # operators that are matrix products
    memory: list[pa.Table] = field(default_factory=list)  # columns ``MEMORY_INSTANT``, whenever it changes
    # CPU operators, as JSON objects; only where the file has no device events
    operators: list[dict[str, Any]] = field(default_factory=list)
    n_events: int = 0  # number of events seen
    lost: Counter[str] = field(default_factory=Counter)  # what could not be understood, by reason
    cut: str = ""  # in which way the file is cut off, "" if it is whole

    def taken(self, schema: pa.Schema) -> pa.Table:
        """Return, and forget, all device events or, as *schema* has it, all runtime calls."""
        parts = self.device if schema is DEVICE else self.launches
        found = joined(parts, encoded_schema(schema))
        parts.clear()
        return found


BLOCK_BYTES: Final = 1 << 22  # part of a file that is held at a time: larger ones were not faster

_BEGIN: Final = 4
"""Characters of a value that tell how values of a file begin: a brace, a quote, and two of the first key."""

_SPACES: Final = re.compile(r"[^ \t\r\n]")
_SEPARATORS: Final = re.compile(r"[^ \t\r\n,]")
"""The next character behind spaces, and commas as well: a small archive can hold gigabytes of either."""

_LARGEST_VALUE: Final = 1 << 26
"""Longest single value, in characters, that is decoded; a trace has none near it."""


class Decoder:
    """Decodes a Chrome trace value by value, holding little more than one block of its text."""

    def __init__(self, stream: IO[bytes], trace: Trace) -> None:
        self._stream = stream
        self._trace = trace
        self._json = json.JSONDecoder()
        self._text = ""
        self._at = 0
        self._tail = b""
        self._ended = False
        self._tried: str | None = None  # text in which values were decoded together already

    def events(self) -> Iterator[object]:
        """Yield the events, whatever the order of the other keys."""
        opening = self._peek()
        if opening == "[":
            self._at += 1
            yield from self._array()
        elif opening == "{":
            self._at += 1
            yield from self._object()
        else:
            raise IngestError(f"not a trace: begins with {opening or 'nothing'!r}, not with [ or {{")

    def _object(self) -> Iterator[object]:
        while (mark := self._peek(_SEPARATORS)) and mark != "}":
            key = self._value()
            if key is None or self._peek() != ":":
                break
            self._at += 1
            if key == "traceEvents" and self._peek() == "[":
                self._at += 1
                yield from self._array()
            elif (value := self._value()) is not _NOTHING:
                self._trace.header[str(key)] = value
        if self._peek() != "}":
            self._trace.cut = self._trace.cut or "the file ends in the middle"

    def _array(self) -> Iterator[object]:
        between = ""
        end = 0
        while (mark := self._peek(_SEPARATORS)) and mark != "]":
            if 0 < end < self._at:  # how two values are told apart in this file, and how the second begins
                between = self._text[end - 1 : self._at + _BEGIN]
            yield from self._many(between)
            end = 0
            value = self._value()
            if value is _NOTHING:
                self._trace.cut = self._trace.cut or f"not JSON after event {self._trace.n_events}"
                return
            yield value
            end = self._at
        if mark == "]":
            self._at += 1
        else:
            self._trace.cut = self._trace.cut or "the file ends in the middle"

    def _many(self, between: str) -> list[Any]:
        """Return the values up to the last *between* in the text, all at once; none if that is not JSON.

        A *between* in the middle of a value leaves brackets or quotes open: nothing wrong is returned.
        """
        cut = self._text.rfind(between, self._at + 1) if between and self._text is not self._tried else -1
        if cut < 0:
            return []
        self._tried = self._text
        try:
            found = json.loads(f"[{self._text[self._at : cut + 1]}]")
        except (ValueError, RecursionError):
            return []
        self._at = cut + 1 + between[1:].index(between[-_BEGIN:])
        return found if isinstance(found, list) else []

    def _peek(self, skipped: re.Pattern[str] = _SPACES) -> str:
        """Return the next character that is not *skipped*, "" at the end."""
        while (found := skipped.search(self._text, self._at)) is None:
            self._at = len(self._text)
            if not self._more():
                return ""
        self._at = found.start()
        return found[0]

    def _value(self) -> object:
        self._peek()
        while True:
            try:
                value, end = self._json.raw_decode(self._text, self._at)
            except ValueError as error:
                # An error near the end may be a value that goes on in the next block, as may a text without
                # its end.
                near_end = getattr(error, "pos", 0) >= len(self._text) - 64 or "Unterminated" in str(error)
                if not near_end or len(self._text) - self._at > _LARGEST_VALUE or not self._more():
                    return _NOTHING
                continue
            if end == len(self._text) and isinstance(value, int | float) and self._more():
                continue  # a number may go on in the next block
            self._at = end
            return value

    def _more(self) -> bool:
        if self._ended:
            return False
        # As much again as is held: a value of many blocks is tried from its start each time, and so only
        # seldom.
        wanted = max(BLOCK_BYTES, len(self._text) - self._at)
        try:
            part = self._stream.read(wanted)
        except UNREADABLE as error:
            self._trace.cut = f"damaged: {error}"
            part = b""
        self._ended = not part
        data = self._tail + part
        keep = 0 if self._ended else _incomplete(data)
        self._tail = data[len(data) - keep :]
        self._text = self._text[self._at :] + data[: len(data) - keep].decode("utf-8", "replace")
        self._at = 0
        return bool(data)


_NOTHING: Final = object()


def _incomplete(data: bytes) -> int:
    """Return how many bytes at the end of *data* are the beginning of a character in UTF-8."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:
            length = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return back if length > back else 0
    return 0


OPEN: Final = b'{\n    "'  # how every event begins, those that name tracks and processes, too

START: Final = b'{\n    "ph": "'
"""How an event that says its phase first begins: all but the names of tracks and processes."""

COMPLETE: Final = START + b'X", "cat": "'  # how an event with a duration begins; its category follows

INSTANT: Final = START + b'i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]"'
"""How an instant begins at which the allocator takes or gives back memory."""

END: Final = b"\n  }"
BETWEEN: Final = b"\n  },\n  "  # what lies between the last value of an event and the start of the next

_WORD: Final = 8
_Places = NDArray[np.intp]


class NamesLeftOut(NamedTuple):
    """Events that are not read: the text from their category to their name, and eight bytes that follow."""

    before: bytes
    begin: tuple[bytes, ...]


class Events:
    """The events of one block."""

    def __init__(self, block: bytes | bytearray, size: int) -> None:
        self._block, self._size = block, size
        padded = max(len(block) - _WORD + 1, 0)
        # From each place on eight bytes as one number: a view with a step of one byte, nothing is copied.
        self._words = np.ndarray((padded,), "<u8", block, strides=(1,)) if padded else np.zeros(0, np.uint64)
        braces = np.flatnonzero(np.frombuffer(block, np.uint8, min(size, padded)) == ord("{"))
        opened = self._with(braces, OPEN, 0)
        begun = self._with(opened, START, 0)
        self.n_events = len(begun)  # how many begin in it, of all phases
        self._complete = self._with(begun, COMPLETE, 0)
        self._complete = self._complete[self._complete < len(self._words) - len(COMPLETE)]
        self._category = self._words[self._complete + len(COMPLETE)]
        self._opened = np.append(opened, size)
        self._instant = self._with(begun, INSTANT, 0)

    def texts(
        self,
        categories: Iterable[bytes],
        *,
        but: NamesLeftOut | None = None,
        lasting: re.Pattern[bytes] | None = None,
    ) -> list[bytes | bytearray]:
        """Return the text of every event with a duration whose category begins with one of *categories*.

        Args:
            categories: how the category begins; the key and the value behind it may follow.
            but: events of these categories that are left out.
            lasting: what an event must hold to count.
        """
        places = np.concatenate([self._of(category) for category in categories])
        if but is not None:
            places = places[~np.isin(places, self._named(but))]
        if lasting is not None:
            held = [found.start() for found in lasting.finditer(self._block, 0, self._size)]
            # What was found lies in the last event that begins before it.
            owner = np.searchsorted(self._opened, np.array(held, np.int64), side="right") - 1
            places = places[np.isin(places, self._opened[owner[owner >= 0]])]
        return self._texts_at(places)

    def instants(self) -> list[bytes | bytearray]:
        """Return the text of every instant at which memory changes."""
        return self._texts_at(self._instant)

    def _texts_at(self, places: _Places) -> list[bytes | bytearray]:
        later = self._opened[np.searchsorted(self._opened, places, side="right")]
        # An event ends right before the next, if nothing else lies between. Where the text there says
        # otherwise, its end is searched for.
        known = self._words[np.maximum(later - _WORD, 0)] == _number(BETWEEN)
        ends = np.where(known, later - len(BETWEEN) + len(END), -1)
        block, size = self._block, self._size
        if not known.all():
            for i in np.flatnonzero(~known).tolist():
                ends[i] = block.find(END, int(places[i]), size) + len(END)
        # Where `find` has found nothing it returns -1, and the end lies below this.
        whole = ends >= len(END)
        return [block[a:b] for a, b in zip(places[whole].tolist(), ends[whole].tolist(), strict=True)]

    def _named(self, names: NamesLeftOut) -> _Places:
        offset = len(COMPLETE) + len(names.before)
        places = self._of(names.before)
        places = places[places < len(self._words) - offset]
        return places[np.isin(self._words[places + offset], [_number(begin) for begin in names.begin])]

    def _of(self, category: bytes) -> _Places:
        begin = category[:_WORD]
        places = self._complete[(self._category & _mask(begin)) == _number(begin)]
        return self._with(places, category[_WORD:], len(COMPLETE) + _WORD)

    def _with(self, places: _Places, text: bytes, offset: int) -> _Places:
        """Return those *places* behind which, at *offset*, the block goes on with *text*."""
        for at in range(0, len(text), _WORD):
            part = text[at : at + _WORD]
            places = places[places < len(self._words) - offset - at]
            words = self._words[places + (offset + at)]
            places = places[(words & _mask(part)) == _number(part)]
        return places


def _number(text: bytes) -> np.uint64:
    """Return up to eight bytes as the number that they are in memory."""
    return np.uint64(int.from_bytes(text, "little"))


def _mask(text: bytes) -> np.uint64:
    """Return a number whose bits are set in as many bytes as *text* has."""
    return np.uint64((1 << 8 * len(text)) - 1)


MOST_WAITING: Final = 2  # blocks of which the events are held until Arrow has parsed them

_BETWEEN: Final = b"\n  },\n  {"
EVENTS_KEY: Final = b'"traceEvents": ['
_DEVICE: Final = tuple(f'{category}"'.encode() for category in sorted(DEVICE_CATEGORIES))
_LAUNCH: Final = tuple(f'{category}"'.encode() for category in sorted(LAUNCH_CATEGORIES))

NEITHER: Final = NamesLeftOut(
    b'cuda_runtime", "name": "cuda',
    tuple(
        b"DeviceGe EventCre EventDes EventRec FuncGetA FuncSetA GetDevic GetLastE Occupanc PeekAtLa PointerG "
        b"SetDevic StreamGe StreamIs StreamWa".split()
    ),
)
"""Runtime calls that neither launch nor block, a third to a half of all; eight letters tell them apart."""

_NOTES: Final = (
    b"user_annotation",
    b"gpu_user_annotation",
    b"cuda_sync",
    *(f'cpu_op", "name": "{name}'.encode() for name in CALL_NAMES),
)
_FRAMES: Final = tuple(category.encode() + b'"' for category in sorted(FRAME_CATEGORIES))
_PRODUCTS: Final = tuple(f'cpu_op", "name": "{name}"'.encode() for name in PRODUCTS)
_OPERATORS: Final = (b'cpu_op"', b'Operator"', f'python_function", "name": "{MODULE}'.encode())
_LONG: Final = re.compile(rb'"dur": [1-9]\d\d')  # as many digits as ``LEAST_FRAME_US`` has


def has_kineto_layout(start: bytes) -> bool:
    """Whether a file that begins with *start* has the layout that Kineto writes."""
    at = start.find(EVENTS_KEY)
    return at >= 0 and start.startswith(b'\n  {\n    "ph": "', at + len(EVENTS_KEY))


def read_kineto_layout(stream: IO[bytes], *, operators: bool = False) -> Trace:
    """Read a decompressed file in Kineto's layout; nothing but operators of the host if *operators*."""
    trace = Trace()
    with ThreadPoolExecutor(max_workers=1) as pool:  # Arrow parses what was found while the next is searched
        parsing: deque[Future[tuple[list[pa.Table], Counter[str]]]] = deque()
        for block, size in _blocks(stream, trace):
            events = Events(block, size)
            trace.n_events += events.n_events
            if operators:
                trace.operators += objects(events.texts(_OPERATORS), trace.lost)
                continue
            for event in objects(events.texts(_NOTES), trace.lost):
                _note(trace, event)
            for event in objects(events.texts(_FRAMES, lasting=_LONG), trace.lost):
                _frame(trace, event)
            trace.products += objects(events.texts(_PRODUCTS), trace.lost)
            texts = events.texts(_DEVICE), events.texts(_LAUNCH, but=NEITHER), events.instants()
            # The texts are copies: the next block overwrites the buffer while they are parsed.
            parsing.append(pool.submit(_parsed, texts))
            if len(parsing) > MOST_WAITING:
                _append(trace, *parsing.popleft().result())
        for done in parsing:
            _append(trace, *done.result())
    return trace


def read_any_layout(stream: IO[bytes], *, operators: bool = False) -> Trace:
    """Read a Chrome trace of any layout: an array of events, or an object with ``traceEvents``.

    Raises IngestError: the file is not JSON of that shape, or nests too deeply.
    """
    trace = Trace()
    held: dict[str, list[dict[str, Any]]] = {name: [] for name in _SCHEMAS}
    try:
        with _uncollected():
            for event in Decoder(stream, trace).events():
                trace.n_events += 1
                _keep(trace, held, event, operators=operators)
                if sum(map(len, held.values())) >= 1 << 16:
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
    if event.get("ph") == "i" and event.get("name") == "[memory]":
        held["memory"].append(event)
    if event.get("ph") != "X" or not isinstance(category, str):
        return
    if operators:
        if category in OPERATOR_CATEGORIES or text(event.get("name")).startswith(MODULE):
            trace.operators.append(event)
    elif category in DEVICE_CATEGORIES:
        held["device"].append(event)
    elif category in LAUNCH_CATEGORIES:
        held["launch"].append(event)
    elif category in NOTE_CATEGORIES or event.get("name") in CALL_NAMES:
        _note(trace, event)
    elif category in FRAME_CATEGORIES:
        _frame(trace, event)
        if text(event.get("name")) in PRODUCTS:
            trace.products.append(event)


def _flush(trace: Trace, held: dict[str, list[dict[str, Any]]]) -> None:
    _append(trace, [from_objects(held[name], schema) for name, schema in _SCHEMAS.items()])
    for events in held.values():
        events.clear()


_SCHEMAS: Final = {"device": DEVICE, "launch": LAUNCH, "memory": MEMORY_INSTANT}


def _append(trace: Trace, tables: Iterable[pa.Table], lost: Mapping[str, int] = MappingProxyType({})) -> None:
    """Add tables of device events, of launches, and of instants at which memory changes."""
    for place, table in zip((trace.device, trace.launches, trace.memory), tables, strict=True):
        place.append(table)
    trace.lost.update(lost)


def _blocks(stream: IO[bytes], trace: Trace) -> Iterator[tuple[bytearray, int]]:
    """Yield the file in pieces that end between two events, each as a buffer and how much of it counts.

    The next piece overwrites the buffer. Header and footer go into *trace*.
    """
    buffer, filled, begun = bytearray(2 * BLOCK_BYTES), 0, False
    while True:
        if filled > len(buffer) // 2:  # one event larger than a block
            # A new one: views of the last block may refer to the old one, and would not let it grow.
            buffer = buffer + bytearray(len(buffer))
        read = _read_into(stream, memoryview(buffer)[filled : filled + BLOCK_BYTES], trace)
        filled += read
        if not begun and (at := buffer.find(EVENTS_KEY, 0, filled)) >= 0:
            trace.header = _header(bytes(buffer[: at + len(EVENTS_KEY)]) + b"]}")
            filled = _dropped(buffer, at + len(EVENTS_KEY), filled)
            begun = True
        if filled > _LARGEST_VALUE:
            trace.cut = f"{filled:,} bytes in which no event ends"
        if not read or trace.cut:
            break
        cut = buffer.rfind(_BETWEEN, 0, filled)
        if cut >= 0:
            yield buffer, cut + len(END)
            # Behind the comma.
            filled = _dropped(buffer, cut + len(END) + 1, filled)
    end = buffer.rfind(b"\n  }\n  ]", 0, filled)
    if end < 0:
        trace.cut = trace.cut or "the file ends in the middle"
        yield buffer, max(buffer.rfind(END, 0, filled), -len(END)) + len(END)
        return
    footer = bytes(buffer[end + len(b"\n  }\n  ]") : filled]).strip().removeprefix(b",")
    trace.header = {**_header(b"{" + footer), **trace.header}
    yield buffer, end + len(END)


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


def _parsed(texts: Iterable[list[bytes | bytearray]]) -> tuple[list[pa.Table], Counter[str]]:
    """Return tables as `_append` takes them, parsed on another thread, and what was lost of them."""
    lost: Counter[str] = Counter()
    return [parsed(one, schema, lost) for one, schema in zip(texts, _SCHEMAS.values(), strict=True)], lost


def _note(trace: Trace, event: Mapping[str, Any]) -> None:
    if (note := note_of(event)) is not None:
        trace.notes.append(note)


def _frame(trace: Trace, event: Mapping[str, Any]) -> None:
    if (number(event.get("dur")) or 0) >= LEAST_FRAME_US and (note := note_of(event)) is not None:
        trace.frames.append(note)
