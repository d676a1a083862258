"""Reads what ``foretrace export`` wrote: the run itself is at the end of the file, beside its events."""

from __future__ import annotations

import base64
import zlib

import pyarrow as pa
from pyarrow import ipc

from foretrace.tracer.errors import IngestError
from foretrace.tracer.ingest.recording import Recording
from foretrace.tracer.ingest.sources import MOST_RATIO, Progress, Source, most_unpacked, read_json, read_whole
from foretrace.traces.errors import TraceError, reason
from foretrace.traces.export.chrome import WHOLE
from foretrace.traces.info import RunInfo
from foretrace.traces.timeline import checked


def read(source: Source, progress: Progress | None = None) -> Recording:
    """Return the run that an exported file holds; ``facts`` has its description and its memory.

    Raises IngestError: the file is damaged, or its end is gone.
    """
    document = read_json(read_whole(source, progress), source.name)
    try:
        kept = document[WHOLE]
        most = most_unpacked(source.size_bytes)
        tables = {name: _table(kept[name], most) for name in ("spans", "memory") if name in kept}
        info = RunInfo.from_json(kept["run"], source.name)
        return Recording(name=source.name, spans=checked(tables.pop("spans")), facts={"run": info, **tables})
    except (KeyError, TypeError, ValueError, zlib.error, pa.ArrowException, TraceError) as error:
        raise IngestError(
            f"{source.name} does not hold the run that it was made of: {reason(error)}"
        ) from error


def _table(text: str, most_bytes: int) -> pa.Table:
    """Return the table that *text* holds; raise ValueError, before it is unpacked, if it is too large."""
    unpacking = zlib.decompressobj()
    data = unpacking.decompress(base64.b64decode(text, validate=True), most_bytes)
    if not unpacking.unconsumed_tail:
        table = ipc.open_stream(data).read_all()
        if table.nbytes <= most_bytes:  # more where columns share bytes
            return table
    raise ValueError(f"it unpacks to more than {MOST_RATIO} times its size, as no trace does")
