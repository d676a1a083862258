"""What tools other than Kineto tell of a device, in the columns of a Kineto trace, to be read alike."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa

from foretrace.tracer.errors import IngestError
from foretrace.tracer.ingest.chrome import Trace
from foretrace.tracer.ingest.events import DEVICE, LAUNCH, encoded_schema
from foretrace.tracer.ingest.kineto import translated
from foretrace.tracer.ingest.notes import AS, Note
from foretrace.tracer.ingest.recording import Recording

KERNEL, COPY, SET = "kernel", "gpu_memcpy", "gpu_memset"

MOST_EVENTS: Final = 50_000_000  # of one file, which are held together; a kernel a microsecond for 50 s

_STEP: Final = re.compile(r"(?:train\w*[ _:]?)?(?:step|iter(?:ation)?)[ _#:]*(\d{1,9})", re.IGNORECASE)
"""How scripts name the range of a step in annotations of their own: ``step 3``, ``iteration_12``."""


class DeviceEvents:
    """Gathers the events of one rank; times in ns on any clock."""

    def __init__(self, device: str = "") -> None:
        self.device = device
        self._rows: defaultdict[str, list[Any]] = defaultdict(list)
        self._calls: defaultdict[str, list[Any]] = defaultdict(list)
        self._notes: list[tuple[int, int, int, str]] = []
        self.lost: dict[str, int] = defaultdict(int)

    def __len__(self) -> int:
        return len(self._rows["start"])

    def add(
        self, kind: str, name: str, start_ns: int, end_ns: int, *, stream: int, device: int = 0,
        correlation: int = 0, size_bytes: int | None = None,
    ) -> None:  # fmt: skip
        """Add a kernel or copy; *correlation* is that of the call that launched it, 0 if unknown.

        One without usable times, of ``_TIME_BITS``, or places is counted as lost; so are calls and notes.
        """
        if len(self) >= MOST_EVENTS:
            raise IngestError(f"more than {MOST_EVENTS:,} events on one device: record fewer steps")
        if not (_whole(start_ns, end_ns, bits=_TIME_BITS) and _whole(stream, device)):
            self.lost["device event without a usable time"] += 1
            return
        number, size = (one if _whole(one) else None for one in (correlation, size_bytes))
        values = (kind, name, start_ns, end_ns, stream, device, number or 0, size)
        for column, value in zip(_COLUMNS, values, strict=True):
            self._rows[column].append(value)

    def add_call(self, name: str, start_ns: int, end_ns: int, *, thread: int, correlation: int) -> None:
        """Add a call of the runtime on the host."""
        if not (_whole(start_ns, end_ns, bits=_TIME_BITS) and _whole(thread, correlation)):
            self.lost["call without a usable time"] += 1
            return
        for column, value in zip(_CALLS, (name, start_ns, end_ns, thread, correlation), strict=True):
            self._calls[column].append(value)

    def add_note(self, name: str, start_ns: int, end_ns: int, *, thread: int) -> None:
        """Add an annotation of the host; one that is named after a step marks it."""
        if _whole(start_ns, end_ns, bits=_TIME_BITS) and _whole(thread):
            self._notes.append((start_ns, end_ns, thread, name))
        else:
            self.lost["annotation without a usable time"] += 1

    def trace(self, rank: int, world_size: int) -> Trace:
        """Return them as the trace of *rank*."""
        base_ns = min(
            [*self._rows["start"], *self._calls["start"], *(note[0] for note in self._notes)], default=0
        )
        header: dict[str, Any] = {"baseTimeNanoseconds": base_ns}
        if self.device:
            header["deviceProperties"] = [{"name": self.device}]
        if world_size > 1:
            header["distributedInfo"] = {"rank": rank, "world_size": world_size}
        rows, calls = self._rows, self._calls
        device = _table(
            DEVICE, base_ns, rows,
            {"cat": "kind"} | {one: one for one in ("name", "stream", "device", "correlation", "bytes")},
        )  # fmt: skip
        launches = _table(
            LAUNCH, base_ns, calls, {"name": "name", "tid": "thread", "correlation": "correlation"}
        )
        steps = [
            Note(*_times(base_ns, start, end), thread, True, f"ProfilerStep#{int(match[1])}", {AS: name})  # noqa: FBT003
            for start, end, thread, name in self._notes
            if (match := _STEP.fullmatch(name.strip()))
        ]
        notes = [
            Note(*_times(base_ns, start, end), thread, True, name, {})  # noqa: FBT003 - of the host
            for start, end, thread, name in self._notes
        ]
        trace = Trace(header=header, device=[device], launches=[launches], notes=[*notes, *steps])
        trace.lost.update(self.lost)
        return trace


_COLUMNS: Final = ("kind", "name", "start", "end", "stream", "device", "correlation", "bytes")
_CALLS: Final = ("name", "start", "end", "thread", "correlation")


_TIME_BITS: Final = 62  # of times that are read: no sum or difference of two then overflows 64 bits


def _whole(*values: object, bits: int = 63) -> bool:
    return all(isinstance(value, int) and abs(value) < 1 << bits for value in values)


def _times(base_ns: int, start_ns: int, end_ns: int) -> tuple[float, float]:
    return (start_ns - base_ns) / 1000, (end_ns - start_ns) / 1000


def _table(
    schema: pa.Schema, base_ns: int, rows: Mapping[str, list[Any]], names: Mapping[str, str]
) -> pa.Table:
    start, end = (np.array(rows.get(name, []), np.int64) for name in ("start", "end"))
    # Counted from the base: as a float, microseconds of a date have lost their last 256 ns.
    times = {"ts": (start - base_ns) / 1000, "dur": (end - start) / 1000}
    columns = []
    for field in encoded_schema(schema):
        if field.name in times:
            columns.append(pa.array(times[field.name], pa.float64()))
        elif field.name in names:
            plain = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
            column = pa.array(rows.get(names[field.name], []), plain)
            columns.append(column.dictionary_encode() if pa.types.is_dictionary(field.type) else column)
        else:
            columns.append(pa.nulls(len(start), field.type))
    return pa.table(columns, schema=encoded_schema(schema))


def recordings(ranks: Mapping[Any, DeviceEvents], name: str, what: str) -> list[Recording]:
    """Return the recording of each of *ranks*, which are on one clock; *what* a rank of the file *name* is.

    Raises IngestError: none has an event on a device.
    """
    filled = [events for events in ranks.values() if len(events)]
    if not filled:
        lost = sum(sum(events.lost.values()) for events in ranks.values())
        said = f": {lost} without a usable time" if lost else ""
        raise IngestError(f"{name} holds no kernel and no copy of a device{said}")
    found = []
    for rank, events in enumerate(filled):
        one = translated(events.trace(rank, len(filled)), name)
        # A single process may be any rank of its job, and the name of its file may tell.
        one.rank, one.world_size, one.one_clock = rank if len(filled) > 1 else None, len(filled), True
        if len(filled) > 1:
            one.evidence["rank"] = f"order of {what}"
        found.append(one)
    return found
