"""Reads SQLite exports of Nsight Systems: ``nsys export --type sqlite``.

Columns: https://docs.nvidia.com/nsight-systems/UserGuide (SQLite Schema Reference). A process is a rank.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any, Final

from foretrace.tracer.errors import IngestError
from foretrace.tracer.ingest.device_events import COPY, KERNEL, SET, DeviceEvents, recordings
from foretrace.tracer.ingest.recording import Recording
from foretrace.tracer.ingest.sources import SQLITE, Progress, Source, head

_KERNELS: Final = "CUPTI_ACTIVITY_KIND_KERNEL"
_NEEDED: Final = {
    _KERNELS: ("start", "end", "deviceId", "streamId", "correlationId", "demangledName"),
    "StringIds": ("id", "value"),
}
"""Tables and columns without which nothing is read."""

_COPIES: Final = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}
"""``CUpti_ActivityMemcpyKind`` as the names of copies in Kineto write it."""

_PLACES: Final = {0: "Pageable", 1: "Pinned", 2: "Device"}  # ``ENUM_CUDA_MEM_KIND``
_RANGES: Final = (59, 60)  # ``eventType`` of NVTX ranges: pushed and popped, started and ended
_PROCESS: Final = 0xFFFFFF << 24  # bits of ``globalTid`` and ``globalPid`` that tell the process

_STEPS_PER_CHECK, _MOST_CHECKS = 10_000_000, 100_000
"""Instructions of SQLite after which it asks whether to go on, and how often it may: every file must end."""


def read(source: Source, progress: Progress | None = None) -> list[Recording]:
    """Read an export; a rank for each process that ran kernels.

    Raises IngestError: it is no such export, packed, damaged, or lacks what is needed.
    """
    with source.path.open("rb") as file:
        is_packed = source.member is not None or file.read(2) == b"\x1f\x8b"
    if is_packed or not head(source)[:16].startswith(SQLITE):
        raise IngestError(f"{source.name}: a database is read from a file of its own: unpack it first")
    try:
        # As a file that nobody changes: SQLite takes no lock, and makes no file beside it. It opens only
        # names, those of ``/proc/self/fd`` too. Who can put another file in the place of this one since it
        # was looked at could as well have written into it: nothing in it is believed anyway.
        where = f"{source.path.absolute().as_uri()}?mode=ro&immutable=1"
        with closing(sqlite3.connect(where, uri=True)) as database:
            return _read(_Database(database, source.name), source, progress)
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise IngestError(f"{source.name} is damaged: {error}") from error


class _Database:
    """An export: tables, not views, so that reading one cannot cost more than its size."""

    def __init__(self, database: sqlite3.Connection, name: str) -> None:
        self._database, self._left = database, _MOST_CHECKS
        # The file may be anybody's: what its schema wants to run is not run.
        database.execute("PRAGMA trusted_schema = OFF")
        database.execute("PRAGMA query_only = ON")
        database.set_progress_handler(self._goes_on_too_long, _STEPS_PER_CHECK)
        listed = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        self.columns = {
            str(table): {str(row[1]) for row in database.execute(f"PRAGMA table_info({_quoted(str(table))})")}
            for (table,) in listed
        }
        for table, columns in _NEEDED.items():
            if table not in self.columns:
                raise IngestError(
                    f"{name} has no table {table}: of nsys export --type sqlite, recorded with --trace cuda?"
                )
            if missing := set(columns) - self.columns[table]:
                raise IngestError(
                    f"{name}: {table} has no column {min(missing)}: export it with a newer nsys"
                )

    def _goes_on_too_long(self) -> bool:
        self._left -= 1
        return self._left < 0

    def rows(self, table: str, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """Yield *columns* of *table*, None in those that it lacks; nothing if there is no such table."""
        known = self.columns.get(table, set())
        if not known:
            return
        asked = ", ".join(_quoted(one) if one in known else "NULL" for one in columns)
        yield from self._database.execute(f"SELECT {asked} FROM {_quoted(table)}")


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _read(database: _Database, source: Source, progress: Progress | None) -> list[Recording]:
    strings = {
        number: text for number, text in database.rows("StringIds", ("id", "value")) if isinstance(text, str)
    }
    devices = dict(database.rows("TARGET_INFO_GPU", ("id", "name")))
    ranks: defaultdict[int, DeviceEvents] = defaultdict(DeviceEvents)

    def of(process: Any, device: Any = None) -> DeviceEvents:
        events = ranks[process & _PROCESS if isinstance(process, int) else 0]
        events.device = events.device or str(devices.get(device) or "")
        return events

    where = ("start", "end", "globalPid", "deviceId", "streamId", "correlationId")
    for *at, name in database.rows(_KERNELS, (*where, "demangledName")):
        _add(of(at[2], at[3]), KERNEL, strings.get(name, "kernel"), at)
    columns = (*where, "bytes", "copyKind", "srcKind", "dstKind")
    for *at, size, kind, begin, end in database.rows("CUPTI_ACTIVITY_KIND_MEMCPY", columns):
        places = f" ({_PLACES.get(begin, '?')} -> {_PLACES.get(end, '?')})" if begin is not None else ""
        _add(of(at[2], at[3]), COPY, f"Memcpy {_COPIES.get(kind, '')}{places}", at, size)
    for *at, size in database.rows("CUPTI_ACTIVITY_KIND_MEMSET", (*where, "bytes")):
        _add(of(at[2], at[3]), SET, "Memset (Device)", at, size)
    calls = ("start", "end", "globalTid", "correlationId", "nameId")
    for start, end, thread, number, name in database.rows("CUPTI_ACTIVITY_KIND_RUNTIME", calls):
        called = strings.get(name, "").partition("_v")[0]  # cudaLaunchKernel_v7000
        of(thread).add_call(called, start, end, thread=thread, correlation=number)
    ranges = ("start", "end", "globalTid", "text", "textId", "eventType")
    for start, end, thread, text, number, kind in database.rows("NVTX_EVENTS", ranges):
        said = text if isinstance(text, str) else strings.get(number)
        if kind in _RANGES and said:
            of(thread).add_note(said, start, end, thread=thread)
    if progress is not None:
        progress(source.name, source.size_bytes)
    return recordings(ranks, source.name, "its processes")


def _add(events: DeviceEvents, kind: str, name: str, at: Sequence[Any], size: Any = None) -> None:
    start, end, _, device, stream, number = at
    events.add(kind, name, start, end, stream=stream, device=device, correlation=number, size_bytes=size)
