"""Checksums of the files of a run: an Arrow file, each batch of a stream. That of JSON is ``door``'s.

The CRC-32 stands in metadata that every reader of Arrow skips. It is that of the bytes with ``????????`` in
the place of its eight digits. So a file has no other file beside it, and can be copied.
"""

from __future__ import annotations

import mmap
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyarrow import ipc

from foretrace.door import open_regular
from foretrace.traces.errors import RunError, reason

KEY: Final = b"foretrace.checksum"  # key of the metadata, of a schema or of a batch, that holds the checksum
BLANK: Final = b"foretrace.crc32:????????"  # value of the metadata before the checksum is known

ID: Final = b"foretrace.id"  # key of the metadata of a schema that holds of which run the file is

_DIGITS: Final = 8
_MARK: Final = re.compile(rb"foretrace\.crc32:([0-9a-f?]{8})")

ARROW_MAGIC: Final = b"ARROW1"  # at both ends of an Arrow file


class Sealed(NamedTuple):
    """What the checksum in some bytes says of them."""

    is_whole: bool
    has_checksum: bool


WAY_OUT: Final = "copy it again, or move it away and read the other ranks with --partial"
"""What can be done about the file of a rank that is damaged."""


def named(schema: pa.Schema, of: str) -> pa.Schema:
    """Return *schema* with *of* which run it is in its metadata, as ``RunInfo.files`` has it."""
    return schema.with_metadata({**(schema.metadata or {}), ID: of.encode()}) if of else schema


def look(data: Any) -> Sealed:
    """Return whether *data*, an Arrow file or a part of a stream, is as it was written."""
    found = list(_places(memoryview(data)))
    if not found:
        return Sealed(is_whole=True, has_checksum=False)
    said = f"{_sum(memoryview(data), [at for at, _ in found]):08x}".encode()
    return Sealed(is_whole=all(digits == said for _, digits in found), has_checksum=True)


def sealed(data: bytearray) -> bytearray:
    """Put the checksum of *data* where ``BLANK`` is in it; return *data*."""
    places = [at for at, digits in _places(memoryview(data)) if digits == BLANK[-_DIGITS:]]
    digits = f"{_sum(memoryview(data), [at for at, _ in _places(memoryview(data))]):08x}".encode()
    for at in places:
        data[at : at + _DIGITS] = digits
    return data


def write_file(
    path: Path, schema: pa.Schema, parts: Iterable[pa.Table | pa.RecordBatch], rows: int | None = None
) -> None:
    """Write *parts* to *path*, an Arrow file with a checksum: zstd, one dictionary per column.

    Args:
        path: the file.
        schema: its columns; the metadata of it is kept.
        parts: its rows.
        rows: most of them in a batch; None leaves them as they are.

    Raises:
        OSError, ArrowException: it cannot be written.
    """
    schema = schema.with_metadata({**(schema.metadata or {}), KEY: BLANK})
    options = ipc.IpcWriteOptions(compression="zstd", unify_dictionaries=True)
    with ipc.new_file(str(path), schema, options=options) as writer:
        for part in parts:
            if isinstance(part, pa.Table):
                writer.write_table(part.cast(schema), max_chunksize=rows)
            else:
                writer.write_batch(part)
    # The checksum is known only when all is written: its digits take the place of the blanks.
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        with memoryview(data) as view:
            places = [at for at, _ in _places(view)]
            digits = f"{_sum(view, places):08x}".encode()
        for at in places:
            file.seek(at)
            file.write(digits)


def mapped(path: str | Path) -> pa.NativeFile:
    """Open a file, mapped into memory. Raises RunError if it is no regular file, OSError as ``open``."""
    with open_regular(path, RunError) as file:
        is_empty = not os.fstat(file.fileno()).st_size
        return pa.BufferReader(b"" if is_empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def read_file(source: str | Path | pa.NativeFile, name: str = "") -> tuple[pa.Table, bool]:
    """Return the rows of an Arrow file, and whether it has a checksum.

    Args:
        source: its path, or the file, opened.
        name: what to call it in an error; by default its path.

    Raises:
        RunError: it is not an Arrow file, or is not as it was written.
    """
    name = name or str(source)
    try:
        file = source if isinstance(source, pa.NativeFile) else mapped(source)
        file.seek(0)
        data = file.read_buffer()
        if data.slice(max(0, data.size - len(ARROW_MAGIC))).to_pybytes() != ARROW_MAGIC:
            raise pa.ArrowInvalid("its end is missing")  # nothing is summed that a file only pretends to hold
        said = look(data)
        if not said.is_whole:
            raise RunError(f"{name} is damaged: its checksum differs; {WAY_OUT}")
        return ipc.open_file(data).read_all(), said.has_checksum
    except (OSError, pa.ArrowException) as error:
        raise RunError(f"{name} is not an Arrow file, or is damaged: {reason(error)}") from error


class Pieces:
    """A file in memory that gives away what was written to it, with its checksum."""

    def __init__(self) -> None:
        self._parts = bytearray()
        self.closed = False

    def write(self, data: Any) -> int:
        """Take *data*."""
        self._parts += data
        return len(data)

    def taken(self) -> bytearray:
        """Return what was written since this was last called."""
        found, self._parts = self._parts, bytearray()
        return sealed(found)

    def tell(self) -> int:
        """Return where it is; Arrow only asks for differences."""
        return len(self._parts)

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def segments(source: pa.NativeFile) -> Iterator[tuple[int, int]]:
    """Yield where each batch of a stream lies, with the dictionaries, or the schema, before it.

    Nothing is decoded. Raises ArrowException, OSError: what follows the last one is no whole message, or
    messages without a batch.
    """
    messages, start = ipc.MessageReader.open_stream(source), source.tell()
    begin, kinds = start, list[str]()
    while True:
        try:
            kinds.append(messages.read_next_message().type)
        except StopIteration:
            if kinds and (begin, kinds) != (start, ["schema"]):  # one flipped bit makes a batch another kind
                raise pa.ArrowInvalid("no batch follows its last messages") from None
            return
        if kinds[-1] == "record batch":
            yield begin, source.tell()
            begin, kinds = source.tell(), []


def read_batches(
    data: pa.Buffer, places: Sequence[tuple[int, int]]
) -> tuple[pa.Schema, list[pa.RecordBatch | None], bool]:
    """Return the schema and the batches of a stream, None for one that is damaged; whether it has checksums.

    Args:
        data: the stream.
        places: its ``segments``.

    Raises:
        ArrowException: the first batch, and with it the schema, is damaged, or the stream cannot be decoded.
    """
    said = [look(memoryview(data)[begin:end]) for begin, end in places]
    has_checksums = any(one.has_checksum for one in said)
    # In a stream with checksums a batch without one is damaged, too.
    good = [one.is_whole and one.has_checksum is has_checksums for one in said]
    if not good[0]:
        raise pa.ArrowInvalid("its first batch is damaged, and with it the columns; nothing can be read")
    if not all(good):
        kept = [data[begin:end] for (begin, end), is_good in zip(places, good, strict=True) if is_good]
        data = pa.py_buffer(b"".join(kept))
    reader = ipc.open_stream(data)
    found: list[pa.RecordBatch | None] = []
    for is_good in good:
        batch = reader.read_next_batch() if is_good else None
        if batch is not None and not all(good):
            try:
                batch.validate(full=True)
            except pa.ArrowInvalid:  # its labels stood in one that is damaged
                batch = None
        found.append(batch)
    return reader.schema, found, has_checksums


def _places(data: memoryview) -> Iterator[tuple[int, bytes]]:
    """Yield where digits of a checksum are, and the digits.

    Of a file only its schema at the beginning, and that in its footer, are searched.
    """
    size = len(data)
    ranges = [(0, size)]
    if bytes(data[: len(ARROW_MAGIC)]) == ARROW_MAGIC and size > 64:
        # An Arrow file begins with ARROW1, two zeros, four bytes of a marker and four of the length of the
        # schema. It ends with its footer, four bytes of the footer's length, and ARROW1.
        head = 16 + max(int.from_bytes(data[12:16], "little", signed=True), 0)
        foot = size - 10 - max(int.from_bytes(data[size - 10 : size - 6], "little", signed=True), 0)
        # The lengths in a damaged file may be anything: then all of it is searched.
        ranges = [(0, size)] if head >= max(foot, 0) else [(0, head), (foot, size)]
    for begin, end in ranges:
        for found in _MARK.finditer(data[begin:end]):
            yield begin + found.start(1), bytes(found[1])


def _sum(data: memoryview, places: Iterable[int]) -> int:
    """Return the checksum of *data* with blanks at *places*."""
    crc = begin = 0
    for at in places:
        crc = zlib.crc32(BLANK[-_DIGITS:], zlib.crc32(data[begin:at], crc))
        begin = at + _DIGITS
    return zlib.crc32(data[begin:], crc)
