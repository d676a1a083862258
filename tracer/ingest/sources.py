"""Finds the files of a trace, and opens them whatever they are packed in: plain, gzip, zip, tar."""

from __future__ import annotations

import functools
import gzip
import io
import json
import os
import re
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final, cast

from foretrace.door import MOST_FILES, files_in, open_regular, opener
from foretrace.tracer.errors import IngestError
from foretrace.traces.errors import reason
from foretrace.traces.replacing import scratch_folder

MOST_BYTES: Final = 1 << 30  # largest file that is held: all but Chrome traces are read whole

MOST_RATIO: Final = 100  # unpacked over stored bytes; traces have 10 to 40
_FLOOR_BYTES: Final = 1 << 26  # what any file may unpack to

HEAD_BYTES: Final = 1 << 20
"""Start of a file that its kind is told from; a header with the members of large groups fits in it."""

_BEHIND: Final = 64
_BUFFER_BYTES: Final = 1 << 16

UNREADABLE: Final = (OSError, EOFError, zlib.error, zipfile.BadZipFile, tarfile.TarError, NotImplementedError)
"""What the standard library raises on damaged archives."""

Progress = Callable[[str, int], None]
"""Called with the name of a file and how many of its stored bytes have been read since the last call."""


@dataclass(frozen=True, slots=True)
class Source:
    """One trace file, or one member of an archive."""

    path: Path  # the file on disk, or an archive as it was unpacked
    name: str  # what to call it in a message
    size_bytes: int  # what it takes on disk, for progress
    member: zipfile.ZipInfo | tarfile.TarInfo | None = field(default=None, compare=False)
    """Where it is in an archive, so that the archive is not searched anew for each of its members."""


@contextmanager
def found_sources(paths: Iterable[str | os.PathLike[str]], output: Path) -> Iterator[list[Source]]:
    """Give the files at *paths*, those in folders and archives included, in the order of their names.

    Hidden files are left out. A packed tar archive can only be read from its beginning, so it is unpacked
    beside *output* for as long as its members are read. Raises IngestError: a path does not exist, an archive
    cannot be listed, or nothing is there; OSError: it cannot be unpacked there.
    """
    found: list[Source] = []
    with ExitStack() as unpacked:
        for given in paths:
            path = Path(given)
            if not path.exists():
                raise IngestError(f"{path} does not exist; give trace files, or a folder of them")
            for file in list(files_in(path, IngestError)) if path.is_dir() else [path]:
                if not file.name.startswith("."):
                    found += _members(file, lambda: unpacked.enter_context(scratch_folder(output))[0])
        if not found:
            raise IngestError(f"no files in {', '.join(map(str, paths))}")
        yield sorted(found, key=_in_order)


def _in_order(source: Source) -> list[tuple[int, str]]:
    """Return what files are sorted by: numbers in names as numbers, so that ``rank10`` follows ``rank9``."""
    parts = re.split(r"(\d{1,18})", source.name)
    return [(int(part) if part.isdecimal() else -1, part) for part in parts]


@contextmanager
def opened(source: Source, progress: Progress | None = None) -> Iterator[IO[bytes]]:
    """Open *source* for reading, decompressed.

    Raises IngestError: it cannot be opened, or turns out to be damaged while it is read.
    """
    try:
        with io.BufferedReader(_Counted(source, progress), _BUFFER_BYTES) as file:
            if source.member is not None:
                with _opened_member(file, source, source.member) as stream:
                    yield stream
            else:
                yield _inside(file, source.size_bytes)
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


def read_whole(source: Source, progress: Progress | None = None, most_bytes: int = MOST_BYTES) -> bytes:
    """Return all that *source* holds. Raises IngestError if it cannot be read, or is too large to be held."""
    with opened(source, progress) as stream:
        data = stream.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise IngestError(f"{source.name}: more than {most_bytes >> 20} MiB of such a file are not read")
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


class _Packed:
    """A file that ends in an error in a long row of zeros that are read one by one, as gzip reads padding."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._left = file, _MOST_PADDING_BYTES

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._left = self._left - 1 if data == b"\0" else _MOST_PADDING_BYTES
        if self._left < 0:
            raise gzip.BadGzipFile(f"more than {_MOST_PADDING_BYTES:,} zeros follow what is packed")
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _Unpacked(gzip.GzipFile):
    """A gzip file that ends in an error where it unpacks to more than any trace does."""

    def __init__(self, file: IO[bytes], stored_bytes: int) -> None:
        super().__init__(fileobj=cast("IO[bytes]", _Packed(file)), mode="rb")
        self._left = most_unpacked(stored_bytes)

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(self._left + 1 if size is None or size < 0 else size)
        self._left -= len(data)
        if self._left < 0:
            raise gzip.BadGzipFile(f"it unpacks to more than {MOST_RATIO} times its size, as no trace does")
        return data


_MOST_PADDING_BYTES: Final = 1 << 16
"""Zeros behind what is packed: more than the 10,240 bytes of a block of a tape."""


def most_unpacked(stored_bytes: int) -> int:
    """Return the most bytes that a file of *stored_bytes* may unpack to."""
    return max(_FLOOR_BYTES, MOST_RATIO * stored_bytes)


class _Counted(io.FileIO):
    """A file that says how much of it has been read; for a buffer above it, which asks in these two ways."""

    def __init__(self, source: Source, progress: Progress | None) -> None:
        super().__init__(source.path, opener=opener(source.path, IngestError))
        self._read = functools.partial(progress or (lambda name, n_bytes: None), source.name)

    def readinto(self, buffer: Any) -> int:
        n_bytes = super().readinto(buffer) or 0
        self._read(n_bytes)
        return n_bytes

    def readall(self) -> bytes:
        data = super().readall() or b""
        self._read(len(data))
        return data


def _members(path: Path, scratch: Callable[[], Path]) -> list[Source]:
    """Return the file at *path*, or the files in it; *scratch* gives a folder to unpack it in."""
    try:
        with open_regular(path, IngestError) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            if zipfile.is_zipfile(file):
                return _zipped(path, file)
            file.seek(0)
            if not path.name.endswith((".tar", ".tar.gz", ".tgz")):
                return [Source(path, str(path), size_bytes)]
            if (inside := _inside(file, size_bytes)) is file:
                return _tarred(path, path, file)
            unpacked = scratch() / "unpacked.tar"
            with unpacked.open("x+b") as out:
                shutil.copyfileobj(inside, out)
                out.seek(0)
                return _tarred(path, unpacked, out)
    except UNREADABLE as error:
        raise IngestError(f"cannot read {path}: {reason(error)}") from error


def _tarred(path: Path, unpacked: Path, file: IO[bytes]) -> list[Source]:
    """Return the members of the tar archive *path*, which lies *unpacked* and open as *file*."""
    with tarfile.open(fileobj=file, mode="r:") as tar:
        members = [info for info in tar if info.isfile() and not Path(info.name).name.startswith(".")]
    return _few([Source(unpacked, f"{path}:{info.name}", info.size, info) for info in members], path)


def _few(members: list[Source], path: Path) -> list[Source]:
    """Return *members* unless they are more than a folder may hold."""
    if len(members) > MOST_FILES:
        raise IngestError(f"{path} holds more than {MOST_FILES:,} files: give the archive of one run")
    return members


_ENCRYPTED: Final = 1
"""Bit of the flags of a member of a zip archive (APPNOTE.TXT, section 4.4.4)."""


def _zipped(path: Path, file: IO[bytes]) -> list[Source]:
    with zipfile.ZipFile(file) as archive:
        members = [info for info in archive.infolist() if not info.is_dir()]
    for info in members:
        if info.flag_bits & _ENCRYPTED:
            raise IngestError(f"{path}:{info.filename} is encrypted: unpack it first")
        if info.file_size > most_unpacked(info.compress_size):
            raise IngestError(
                f"{path}:{info.filename} unpacks to more than {MOST_RATIO} times its size, as no trace does"
            )
    return _few([Source(path, f"{path}:{info.filename}", info.compress_size, info) for info in members], path)


@contextmanager
def _opened_member(
    file: IO[bytes], source: Source, member: zipfile.ZipInfo | tarfile.TarInfo
) -> Iterator[IO[bytes]]:
    """Open a member of a zip or tar archive; one that is gzipped itself is decompressed, too."""
    if isinstance(member, zipfile.ZipInfo):
        # Opened as one without members: to open the archive itself is to read its whole directory.
        with zipfile.ZipFile(io.BytesIO(_NO_MEMBERS)) as archive:
            archive.fp = file
            with archive.open(member) as stream:
                yield from _unzipped(stream, member.filename, source.size_bytes)
        return
    with tarfile.open(fileobj=file, mode="r:") as tar:
        inside = tar.extractfile(member)
        if inside is None:
            raise IngestError(f"{source.name} is not a file")
        yield from _unzipped(inside, member.name, source.size_bytes)


_NO_MEMBERS: Final = b"PK\x05\x06" + bytes(18)
"""A zip archive without members: the record of its end (APPNOTE.TXT, section 4.3.16)."""


def _inside(file: IO[bytes], size_bytes: int) -> IO[bytes]:
    """Return what *file* holds, decompressed if it is gzipped."""
    begins = file.read(2)
    file.seek(0)
    return cast("IO[bytes]", _Unpacked(file, size_bytes)) if begins == b"\x1f\x8b" else file


def _unzipped(stream: IO[bytes], name: str, size_bytes: int) -> Iterator[IO[bytes]]:
    if name.endswith(".gz"):
        with _Unpacked(stream, size_bytes) as inner:
            yield cast("IO[bytes]", inner)
    else:
        yield stream


PACKED: Final = (b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18", b"7z\xbc\xaf", b"Rar!")
"""How files begin that no reader here unpacks: bzip2, xz, zstd, lz4, 7-Zip, RAR."""

SQLITE: Final = b"SQLite format 3\x00"  # how every database of SQLite 3 begins
_PARQUET: Final = b"PAR1"
_TIMER: Final = re.compile(rb'"ph"\s*:\s*"B"')
_SPAN: Final = re.compile(rb'"ph"\s*:\s*"X"')
_GRAPH: Final = re.compile(rb'"workload_graph"\s*:|"schema"\s*:\s*"1\.')
_FLIGHT: Final = re.compile(rb'"entries"\s*:')
_COLLECTIVES: Final = re.compile(rb'"comms"\s*:\s*"')
_ROCPROF: Final = re.compile(rb'"rocprofiler-sdk-tool"\s*:')
_CHAKRA: Final = re.compile(rb"[\x80-\xff]{0,3}[\x00-\x7f]\x0a[\x01-\x20]\d+\.\d+")
"""A message of metadata after its length: its first field is the version of the schema."""

GROUPS: Final = "groups"
"""Kind of a file that is no trace, but says which ranks are in the groups of traces beside it."""

_MEMBERS: Final = re.compile(rb'\A\{\s*"\d+"\s*:\s*\[\s*\d')

_TEXTS: Final = {
    GROUPS: _MEMBERS,
    "rocprof": _ROCPROF,
    "chakra": _GRAPH,
    "param": _COLLECTIVES,
    "flight recorder": _FLIGHT,
}
"""Kinds of JSON beside events, and what is in them; the first that is found counts."""

_EXPORTED: Final = re.compile(rb'"otherData"\s*:\s*\{"foretrace": true')
_EVENT: Final = re.compile(rb'"traceEvents"\s*:|"ph"\s*:\s*"')


_PLANE: Final = re.compile(rb"\x12.(?:/host:|/device:)")  # name of a plane, as field 2


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
    # An exported run holds events as well, so that this question comes first.
    if _EXPORTED.search(body):
        return "exported"
    if _EVENT.search(body):
        return "timers" if _TIMER.search(body) and not _SPAN.search(body) else "kineto"
    return next((kind for kind, found in _TEXTS.items() if found.search(body)), "")


def _binary(start: bytes) -> str:
    """Return the kind of a file that is no text: a pickle, a database, or messages of protobuf."""
    if start.startswith(SQLITE):
        return "nsight"
    if start.startswith(b"\x0a") and _PLANE.search(start):
        return "xplane"
    if start.startswith(b"\x80") and b"entries" in start:  # a pickle from protocol 2 on
        return "flight recorder"
    return "chakra" if b"\x06schema" in start[:32] or _CHAKRA.match(start) else ""
