"""Decodes a Chrome trace of any layout value by value, without holding all of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Any, Final

from foretrace.tracer.errors import IngestError
from foretrace.tracer.ingest.sources import UNREADABLE
from foretrace.tracer.ingest.trace import Trace

BLOCK_BYTES: Final = 1 << 22
"""Part of a file that is held at a time: larger ones were not faster."""

_BEGIN: Final = 4
"""Characters of a value that tell how values of a file begin: a brace, a quote, and two of the first key."""

_LARGEST_VALUE: Final = 1 << 28
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
        while (mark := self._peek()) and mark != "}":
            if mark == ",":
                self._at += 1
                continue
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
        while (mark := self._peek()) and mark != "]":
            if mark == ",":
                self._at += 1
                continue
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

    def _peek(self) -> str:
        """Return the next character that is not a space, "" at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in " \t\r\n":
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _value(self) -> object:
        """Return the next value, ``_NOTHING`` if there is none."""
        self._peek()
        while True:
            try:
                value, end = self._json.raw_decode(self._text, self._at)
            except ValueError as error:
                near_end = getattr(error, "pos", 0) >= len(self._text) - 64 or "Unterminated" in str(error)
                if not near_end or len(self._text) - self._at > _LARGEST_VALUE or not self._more():
                    return _NOTHING
                continue
            if end == len(self._text) and isinstance(value, int | float) and self._more():
                continue  # a number may go on in the next block
            self._at = end
            return value

    def _more(self) -> bool:
        """Read on; False at the end of the file."""
        if self._ended:
            return False
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
