"""Tells what kind of trace a file is from how it begins."""

from __future__ import annotations

import re
from typing import Final

from foretrace.tracer.errors import IngestError
from foretrace.tracer.ingest.sources import Source, head

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
