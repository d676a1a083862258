"""Finds the files of a trace, and opens them whatever they are packed in: plain, gzip, zip, tar."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, cast

from foretrace.tracer.errors import IngestError
from foretrace.traces.errors import reason

MOST_BYTES: Final = 1 << 30  # largest file that is held: all but Chrome traces are read whole

HEAD_BYTES: Final = 1 << 20
"""Start of a file that its kind is told from; a header with the members of large groups fits in it."""

_BEHIND: Final = 64

UNREADABLE: Final = (OSError, EOFError, zlib.error, zipfile.BadZipFile, tarfile.TarError, NotImplementedError)
"""What the standard library raises on damaged archives."""

Progress = Callable[[str, int], None]
"""Called with the name of a file and how many of its stored bytes have been read since the last call."""


@dataclass(frozen=True, slots=True)
class Source:
    """One trace file, or one member of an archive."""

    path: Path  # the file on disk
    member: str  # name inside the archive, "" if the file is not one
    size_bytes: int  # what it takes on disk, for progress

    @property
    def name(self) -> str:
        """What to call it in a message."""
        return f"{self.path}:{self.member}" if self.member else str(self.path)


def find_sources(paths: Iterable[str | os.PathLike[str]]) -> list[Source]:
    """Return the files at *paths*, those in folders and archives included, in the order of their names.

    Hidden files are left out.

    Raises:
        IngestError: a path does not exist, an archive cannot be listed, or nothing is there.
    """
    found: list[Source] = []
    for given in paths:
        path = Path(given)
        if not path.exists():
            raise IngestError(f"{path} does not exist; give trace files, or a folder of them")
        files = list(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if file.is_file() and not file.name.startswith("."):
                found += _members(file)
    if not found:
        raise IngestError(f"no files in {', '.join(map(str, paths))}")
    return sorted(found, key=_in_order)


def _in_order(source: Source) -> list[tuple[int, str]]:
    """Return what files are sorted by: numbers in names as numbers, so that ``rank10`` follows ``rank9``."""
    parts = re.split(r"(\d{1,18})", source.name)
    return [(int(part) if part.isdecimal() else -1, part) for part in parts]


@contextmanager
def opened(source: Source, progress: Progress | None = None) -> Iterator[IO[bytes]]:
    """Open *source* for reading, decompressed.

    Raises:
        IngestError: it cannot be opened, or turns out to be damaged while it is read.
    """
    try:
        with source.path.open("rb") as file:
            counted = _Counted(file, source, progress)
            if source.member:
                with _opened_member(counted, source) as stream:
                    yield stream
            elif _magic(source.path)[:2] == b"\x1f\x8b":
                with gzip.GzipFile(fileobj=cast("IO[bytes]", counted)) as stream:
                    yield cast("IO[bytes]", stream)
            else:
                yield cast("IO[bytes]", counted)
    except UNREADABLE as error:
        raise IngestError(f"cannot read {source.name}: {reason(error)}") from error


def head(source: Source, until: bytes | None = None) -> bytes:
    """Return the first ``HEAD_BYTES`` of *source*; fewer if it is damaged behind them.

    Given *until*, little more is read than up to it and the ``_BEHIND`` bytes that follow.
    """
    data = bytearray()
    with opened(source) as stream:
        try:
            while len(data) < HEAD_BYTES and (part := stream.read(min(1 << 16, HEAD_BYTES - len(data)))):
                data += part
                if until is not None and until in data[:-_BEHIND]:
                    break
        except UNREADABLE:
            if not data:
                raise
    return bytes(data)


def read_whole(source: Source, progress: Progress | None = None) -> bytes:
    """Return all that *source* holds. Raises IngestError if it cannot be read, or is too large to be held."""
    with opened(source, progress) as stream:
        data = stream.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise IngestError(f"{source.name}: more than {MOST_BYTES >> 30} GiB of such a file are not read")
    return data


def read_json(data: bytes, name: str) -> Any:
    """Return the JSON value that *data*, of the file *name*, is. Raises IngestError if it is none."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise IngestError(f"{name} is not complete JSON") from error


def rank_in_name(name: str) -> int | None:
    """Return the rank that the name of a file tells, None if it does not.

    >>> names = ("trace_rank-12.json.gz", "worker3_step_12.169.pt.trace.json", "a.json")
    >>> [rank_in_name(name) for name in names]
    [12, 3, None]
    """
    base = name.rpartition("/")[2].rpartition(":")[2]
    found = re.search(r"(?:rank|worker|gpu)[-_ ]?(\d{1,6})(?!\d)", base, re.IGNORECASE)
    return int(found[1]) if found else None


class _Counted(io.RawIOBase):
    """A file that says how much of it has been read."""

    def __init__(self, file: IO[bytes], source: Source, progress: Progress | None) -> None:
        super().__init__()
        self._file = file
        self._name = source.name
        self._progress = progress

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        if self._progress is not None and data:
            self._progress(self._name, len(data))
        return data

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _members(path: Path) -> list[Source]:
    """Return the files that *path* is made of."""
    size_bytes = path.stat().st_size
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                return [
                    Source(path, info.filename, info.compress_size)
                    for info in archive.infolist()
                    if not info.is_dir()
                ]
        if path.name.endswith((".tar", ".tar.gz", ".tgz")):
            with tarfile.open(path) as tar:
                return [
                    Source(path, info.name, info.size)
                    for info in tar
                    if info.isfile() and not Path(info.name).name.startswith(".")
                ]
    except UNREADABLE as error:
        raise IngestError(f"cannot read {path}: {reason(error)}") from error
    return [Source(path, "", size_bytes)]


@contextmanager
def _opened_member(file: _Counted, source: Source) -> Iterator[IO[bytes]]:
    """Open a member of a zip or tar archive; one that is gzipped itself is decompressed, too."""
    if zipfile.is_zipfile(source.path):
        with zipfile.ZipFile(cast("IO[bytes]", file)) as archive, archive.open(source.member) as stream:
            yield from _unzipped(stream, source.member)
        return
    with tarfile.open(fileobj=cast("IO[bytes]", file)) as tar:
        member = tar.extractfile(source.member)
        if member is None:
            raise IngestError(f"{source.name} is not a file")
        yield from _unzipped(member, source.member)


def _unzipped(stream: IO[bytes], name: str) -> Iterator[IO[bytes]]:
    if name.endswith(".gz"):
        with gzip.GzipFile(fileobj=stream) as inner:
            yield cast("IO[bytes]", inner)
    else:
        yield stream


def _magic(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(4)


_PARQUET: Final = b"PAR1"
_TIMER: Final = re.compile(rb'"ph"\s*:\s*"B"')
_SPAN: Final = re.compile(rb'"ph"\s*:\s*"X"')
_GRAPH: Final = re.compile(rb'"workload_graph"\s*:|"schema"\s*:\s*"1\.')
_FLIGHT: Final = re.compile(rb'"entries"\s*:')
_COLLECTIVES: Final = re.compile(rb'"comms"\s*:\s*"')
_TEXTS: Final = {"chakra": _GRAPH, "param": _COLLECTIVES, "flight recorder": _FLIGHT}
"""Kinds of JSON beside events, and what is in them; the first that is found counts."""

_EVENT: Final = re.compile(rb'"traceEvents"\s*:|"ph"\s*:\s*"')


def kind_of(source: Source) -> str:
    """Return the kind of trace that *source* is, "" if it is none that is known."""
    try:
        start = head(source)
    except IngestError:
        return ""
    if start.startswith(_PARQUET):
        return "operations"
    body = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not body.startswith((b"{", b"[")):
        return _binary(start)
    if _EVENT.search(body):
        return "timers" if _TIMER.search(body) and not _SPAN.search(body) else "kineto"
    return next((kind for kind, found in _TEXTS.items() if found.search(body)), "")


def _binary(start: bytes) -> str:
    """Return the kind of a file that is no text: a pickle, or messages that begin with Chakra's metadata."""
    if start.startswith(b"\x80") and b"entries" in start:
        return "flight recorder"
    return "chakra" if b"\x06schema" in start[:32] else ""
