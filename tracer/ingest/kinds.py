"""Tells what kind of trace a file is from how it begins."""

from __future__ import annotations

import re
from typing import Final

from tracer.errors import IngestError
from tracer.ingest.sources import Source, head

_EVENT: Final = re.compile(rb'"traceEvents"\s*:|"ph"\s*:\s*"')


def kind_of(source: Source) -> str:
    """Return the kind of trace that *source* is, "" if it is none that is known."""
    try:
        start = head(source)
    except IngestError:
        return ""
    body = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not body.startswith((b"{", b"[")):
        return ""
    return "kineto" if _EVENT.search(body) else ""
