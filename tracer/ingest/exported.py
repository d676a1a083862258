"""Reads what ``foretrace export`` wrote: the run itself is at the end of the file, beside its events."""

from __future__ import annotations

import base64
from typing import Final

import numpy as np
import pyarrow as pa
from pyarrow import ipc

from foretrace.tracer.errors import IngestError
from foretrace.tracer.ingest.recording import Recording
from foretrace.tracer.ingest.sources import MOST_RATIO, Progress, Source, most_unpacked, read_json, read_whole
from foretrace.traces.errors import TraceError, reason
from foretrace.traces.export.chrome import WHOLE
from foretrace.traces.info import RunInfo
from foretrace.traces.timeline import checked

_MARK_BYTES: Final = 8
"""What an Arrow file begins with; a stream of its batches follows."""

_HEADER, _DATA, _BUFFERS, _COMPRESSION = 2, 1, 2, 3
"""Numbers of fields: of a Message, a DictionaryBatch, and two of a RecordBatch (Message.fbs of Arrow)."""


def read(source: Source, progress: Progress | None = None) -> Recording:
    """Return the run that an exported file holds; ``facts`` has its description and its memory.

    Raises:
        IngestError: the file is damaged, or its end is gone.
    """
    document = read_json(read_whole(source, progress), source.name)
    try:
        kept = document[WHOLE]
        most = most_unpacked(source.size_bytes)
        tables = {name: _table(kept[name], most) for name in ("spans", "memory") if name in kept}
        info = RunInfo.from_json(kept["run"], source.name)
        return Recording(name=source.name, spans=checked(tables.pop("spans")), facts={"run": info, **tables})
    except (KeyError, TypeError, ValueError, pa.ArrowException, TraceError) as error:
        raise IngestError(
            f"{source.name} does not hold the run that it was made of: {reason(error)}"
        ) from error


def _table(text: str, most_bytes: int) -> pa.Table:
    """Return the table that *text* holds; raise ValueError, before it is unpacked, if it is too large."""
    data = pa.py_buffer(base64.b64decode(text, validate=True))[_MARK_BYTES:]
    messages = ipc.MessageReader.open_stream(data)
    if sum(map(_unpacked_bytes, messages)) > most_bytes:
        raise ValueError(f"it unpacks to more than {MOST_RATIO} times its size, as no trace does")
    return ipc.open_stream(data).read_all()  # not the file: its footer may name a batch many times


def _unpacked_bytes(message: ipc.Message) -> int:
    """Return how many bytes the buffers of *message* have once they are unpacked; nothing is.

    The description of a message is a flatbuffer, Message.fbs of Arrow. A packed buffer begins with its length
    unpacked, -1 if it is stored as it is.
    """
    view = memoryview(message.metadata)

    def number(at: int, size: int = 4) -> int:
        return int.from_bytes(view[at : at + size], "little")

    def field(table: int, index: int) -> int:
        """Return where a field of the table at *table* lies, 0 if it has its default."""
        offsets = table - int.from_bytes(view[table : table + 4], "little", signed=True)
        entry = 4 + 2 * index
        at = number(offsets + entry, 2) if entry < number(offsets, 2) else 0
        return at and table + at

    def inner(table: int, index: int) -> int:
        """Return where the table or the vector lies that a field leads to, 0 if it has none."""
        at = field(table, index)
        return at and at + number(at)

    batch = inner(number(0), _HEADER)
    if message.type == "dictionary":
        batch = inner(batch, _DATA)
    elif message.type != "record batch":
        return 0
    if not (buffers := inner(batch, _BUFFERS)):
        return 0
    places = np.frombuffer(view, "<i8", 2 * number(buffers), buffers + 4).reshape(-1, 2)
    stored = places[:, 1].tolist()
    if not field(batch, _COMPRESSION):
        return sum(stored)
    body = memoryview(message.body)
    first = [int.from_bytes(body[at : at + 8], "little", signed=True) for at in places[:, 0].tolist()]
    return sum(max(pair) if pair[1] else 0 for pair in zip(first, stored, strict=True))
