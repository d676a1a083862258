"""One self-contained HTML page for a run, or for two runs on one time axis.

The page needs no network and no other file: the viewer of ``traces/viewer`` is written into it, with the
spans as gzip'd columns. Whatever comes from a run is data, which the page shows as text.
"""

from __future__ import annotations

import html
import json
import math
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
from foretrace.traces.report.format import number
from foretrace.traces.report.kinds import palette
from foretrace.traces.run import Run

_SCRIPTS: Final = (
    "format.js", "palette.js", "data.js", "view.js", "lanes.js", "pairs.js", "comm.js", "follow.js",
    "timeline.js", "tips.js", "selection.js", "overview.js", "search.js", "critical.js", "links.js",
    "memory.js", "panels.js", "differences.js", "input.js", "main.js",
)  # fmt: skip
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

    Raises ReportError: *target* cannot be written.
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


def served_page(title: str, mode: str) -> str:
    """Return the page without a document, which it then asks the server for.

    Args:
        title: title of the window, plain text.
        mode: what the page is, ``"run"`` or ``"plan"``: the file with the markup above its figures.
    """
    return filled(
        title=html.escape(title),
        mode=mode,
        meta="null",
        columns="",
        connect="; connect-src 'self'",
        scripts=(*_ASKING, *_SCRIPTS),
        icon='\n<link rel="icon" href="data:,">',  # a browser asks the server for one otherwise
        controls=_part(f"{mode}.html"),
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


# One self-contained HTML page for many layouts: throughput or cost against memory, and a table of all.
#
# The page has the look of a report, needs no network and no other file, and knows nothing of who found the
# layouts: whoever has rows can fill it, as ``foretrace search`` prints them.
#
#     write_sweep("layouts.html", found["layouts"], title="llama3-70b on 512 × dgx-h100")

FIGURES: Final[Mapping[str, tuple[str, str]]] = {
    "tokens_per_s_per_gpu": ("tokens/s per GPU", "high"),
    "mfu": ("MFU", "high"),
    "step_time_s": ("step time", "low"),
    "usd_per_1b_tokens": ("USD per billion tokens", "low"),
}
"""Figures that the page can draw upwards, as people say them, and which end is better."""

SETTINGS: Final = (
    "cluster", "gpus", "tp", "pp", "dp", "cp", "ep", "expert_tp", "schedule", "virtual_stages", "micro_batch",
    "sharding", "recompute", "offload", "precision",
)  # fmt: skip
"""Settings that tell layouts apart, in the order of the table."""

MARKS: Final = ("rank", "tied")
"""What whoever found the layouts says of them: their place, and what they cannot be told apart from."""

MOST_ROWS: Final = 20_000  # layouts that one page holds: 4 MB

_NEEDED: Final = ("tokens_per_s_per_gpu", "peak_memory_bytes")
_NUMBERS: Final = (*FIGURES, "peak_memory_bytes", "memory_limit_bytes", "bubble_fraction")
_SWEEP_SCRIPTS: Final = ("format.js", "palette.js", "sweep_points.js", "sweep.js")


def sweep_html(rows: Sequence[Mapping[str, Any]], *, title: str, notes: Sequence[str] = ()) -> str:
    """Return a page of layouts as one HTML document.

    Args:
        rows: one per layout, the best first. Each has ``tokens_per_s_per_gpu`` and ``peak_memory_bytes``, and
            where known ``memory_limit_bytes``, ``fits``, ``name``, the other ``FIGURES`` and any of
            ``SETTINGS`` and ``MARKS``; anything else is left out.
        title: title of the page, plain text.
        notes: sentences below the title: how many layouts were looked at, why the second one loses.

    Raises:
        ReportError: no row, one without the numbers that are needed, or more than a page holds.
    """
    if not rows:
        raise ReportError("no layout to show: give rows as foretrace search --json lists them")
    if len(rows) > MOST_ROWS:
        raise ReportError(f"{len(rows):,} layouts: a page holds {MOST_ROWS:,}; give the best of them")
    layouts = [_layout(row) for row in rows]
    told = {name: list(dict.fromkeys(one[name] for one in layouts)) for name in SETTINGS}
    same = {name: values[0] for name, values in told.items() if len(values) == 1}
    document = {
        "title": title,
        "notes": list(notes),
        "same": {name: value for name, value in same.items() if value is not None},
        "settings": [name for name, values in told.items() if len(values) > 1],
        "marks": [name for name in MARKS if any(one[name] is not None for one in layouts)],
        "figures": [
            {"key": key, "label": label, "better": better}
            for key, (label, better) in FIGURES.items()
            if any(one[key] is not None for one in layouts)
        ],
        "layouts": layouts,
        "palette": palette(),
    }
    meta = script_json(document)
    return filled(_SWEEP_SCRIPTS, "sweep.html", title=html.escape(title), mode="sweep", meta=meta)


def write_sweep(
    path: str | os.PathLike[str], rows: Sequence[Mapping[str, Any]], *, title: str, notes: Sequence[str] = ()
) -> Path:
    """Write the page of ``sweep_html`` to *path*, all of it or nothing, and return it.

    Raises ReportError: as ``sweep_html``, or *path* cannot be written.
    """
    return write_whole(Path(path), sweep_html(rows, title=title, notes=notes))


def _layout(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the page takes of a row."""
    found: dict[str, Any] = {"name": str(row.get("name", ""))}
    for key in _NUMBERS:
        value = number(row.get(key))
        found[key] = value if value is not None and math.isfinite(value) else None
    for key in _NEEDED:
        if not (found[key] or 0) > 0:
            raise ReportError(f"{found['name'] or 'a layout'}: {key}={row.get(key)!r}: a number above zero")
    limit = found["memory_limit_bytes"]
    fits = row.get("fits")
    found["fits"] = fits if isinstance(fits, bool) else limit is None or found["peak_memory_bytes"] <= limit
    for name in (*SETTINGS, *MARKS):
        value = row.get(name)
        found[name] = value if isinstance(value, int | str) and not isinstance(value, bool) else None
    return found
