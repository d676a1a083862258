"""One self-contained HTML page for a run, or for two runs on one time axis.

The page needs no network and no other file: the viewer of ``traces/viewer`` is written into it, with the
spans as gzip'd columns. Whatever comes from a run is data, which the page shows as text.
"""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from foretrace.traces.errors import ReportError, reason
from foretrace.traces.pack import Pack
from foretrace.traces.replacing import replacing
from foretrace.traces.report.document import document
from foretrace.traces.run import Run

_SCRIPTS: Final = (
    "format.js",
    "palette.js",
    "data.js",
    "view.js",
    "lanes.js",
    "pairs.js",
    "comm.js",
    "follow.js",
    "timeline.js",
    "tips.js",
    "selection.js",
    "overview.js",
    "search.js",
    "critical.js",
    "links.js",
    "memory.js",
    "panels.js",
    "differences.js",
    "input.js",
    "main.js",
)
"""The viewer, in the order in which its parts are put together."""

_ASKING: Final = ("served.js", "history.js", "plan.js")
"""What a page from the server has besides; a file holds no code that could ask anybody for anything."""


def report_html(run: Run, other: Run | None = None) -> str:
    """Return a report as one HTML document.

    Args:
        run: the run to explain; of two, the one above, usually the simulated one.
        other: a second run, drawn below the first on the same time axis.

    Raises:
        RunError: a run has no step with a length, or a file of it is damaged.
    """
    pack = Pack(split=True)
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
    pack = Pack(split=True)
    contents = document(run, other, pack)
    write_whole(target, _page(contents, pack))
    return {
        "report": str(target),
        "size_bytes": target.stat().st_size,
        "title": contents["title"],
        "headline": {figure["name"]: figure["value"] for figure in contents["headline"]},
        "warnings": contents["warnings"],
    }


def write_whole(target: Path, text: str) -> Path:
    """Write a page, all of it or nothing, and return where.

    Raises:
        ReportError: *target* cannot be written.
    """
    try:
        with replacing(target) as file:
            file.write(text.encode())
    except OSError as error:
        raise ReportError(f"cannot write {target}: {reason(error)}") from error
    return target


def _page(contents: Mapping[str, Any], pack: Pack) -> str:
    """Return the page with its document in it."""
    later = pack.later if pack.later is not None and pack.later.columns else None
    return filled(
        title=html.escape(contents["title"]),
        mode="file",
        meta=script_json({**contents, "columns": pack.columns, "later": later.columns if later else []}),
        columns=pack.encode(),
        later=f'<script type="text/plain" id="later">{later.encode()}</script>\n' if later else "",
    )


def served_page(title: str, mode: str, controls: str = "") -> str:
    """Return the page without a document, which it then asks the server for.

    Args:
        title: title of the window, plain text.
        mode: what the page is: ``"run"``, or ``"plan"`` with *controls*.
        controls: markup above the figures, ours alone: nothing from a run may be in it.
    """
    return filled(
        title=html.escape(title),
        mode=mode,
        meta="null",
        columns="",
        connect="; connect-src 'self'",
        scripts=(*_ASKING, *_SCRIPTS),
        icon='\n<link rel="icon" href="data:,">',  # a browser asks the server for one otherwise
        controls=controls,
    )


def filled(scripts: Sequence[str] = _SCRIPTS, template: str = "report.html", **given: str) -> str:
    """Return a template of the viewer with its parts filled in, in one pass.

    Args:
        scripts: files of the viewer, in the order in which they are put together.
        template: the page that they belong to.
        given: parts by name: markup and scripts, ours alone, or what ``html.escape`` or ``script_json`` made.
    """
    parts = {
        "connect": "",
        "icon": "",
        "controls": "",
        "later": "",
        "style": _part("style.css"),
        "script": "\n".join(_part(name) for name in scripts),
        **given,
    }
    parts["head"] = _put(parts, "head.html")
    return _put(parts, template)


def _put(parts: Mapping[str, str], template: str) -> str:
    """Return *template* with *parts* in it; what they hold is not looked at again."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _part(template))


def _part(name: str) -> str:
    """Return one file of the viewer."""
    return (files("foretrace.traces.viewer") / name).read_text("utf-8")


def script_json(value: Any) -> str:
    """Return JSON that can stand inside a script element: no ``<`` ends it, whatever a name says."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
