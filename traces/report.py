"""One self-contained HTML page for a run, or for two runs on one time axis.

The page needs no network and no other file: the viewer of ``traces/viewer`` is written into it, with the
spans as gzip'd columns. Whatever comes from a run is data, which the page shows as text.
"""

from __future__ import annotations

import html
import json
import os
import re
import tempfile
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from traces.errors import ReportError
from traces.pack import Pack
from traces.report_document import document
from traces.run import Run

_SCRIPTS: Final = (
    "format.js",
    "palette.js",
    "data.js",
    "view.js",
    "lanes.js",
    "comm.js",
    "follow.js",
    "timeline.js",
    "tips.js",
    "overview.js",
    "memory.js",
    "panels.js",
    "differences.js",
    "input.js",
    "main.js",
)
"""The viewer, in the order in which its parts are put together."""


def report_html(run: Run, other: Run | None = None) -> str:
    """Return a report as one HTML document.

    Args:
        run: the run to explain; of two, the one above, usually the simulated one.
        other: a second run, drawn below the first on the same time axis.

    Raises:
        RunError: a run has no step with a length, or a file of it is damaged.
    """
    pack = Pack()
    return _page(document(run, other, pack), pack)


def write_report(path: str | os.PathLike[str], run: Run, other: Run | None = None) -> dict[str, Any]:
    """Write a report to *path*, all of it or nothing.

    Returns:
        ``report``, the path; ``size_bytes`` of the file; ``title``, ``headline`` (name to value) and
        ``warnings``, as on the page.

    Raises:
        ReportError: *path* cannot be written.
        RunError: a run has no step with a length, or a file of it is damaged.
    """
    target = Path(path)
    pack = Pack()
    contents = document(run, other, pack)
    text = _page(contents, pack).encode("utf-8")
    try:
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.absolute().parent) as scratch:
            fresh = Path(scratch) / target.name
            fresh.write_bytes(text)
            fresh.replace(target)
    except OSError as error:
        raise ReportError(f"cannot write {target}: {error.strerror}") from error
    return {
        "report": str(target),
        "size_bytes": len(text),
        "title": contents["title"],
        "headline": {figure["name"]: figure["value"] for figure in contents["headline"]},
        "warnings": contents["warnings"],
    }


def _page(contents: Mapping[str, Any], pack: Pack) -> str:
    """Return the page: the template with its parts filled in, in one pass."""
    parts = {
        "title": html.escape(contents["title"]),
        "style": _part("style.css"),
        "script": "\n".join(_part(name) for name in _SCRIPTS),
        "meta": _json({**contents, "columns": pack.columns}),
        "columns": pack.encode(),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _part("report.html"))


def _part(name: str) -> str:
    """Return one file of the viewer."""
    return (files("traces.viewer") / name).read_text("utf-8")


def _json(value: Any) -> str:
    """Return JSON that can stand inside a script element: no ``<`` ends it, whatever a name says."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
