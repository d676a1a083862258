"""One self-contained HTML page for many layouts: throughput or cost against memory, and a table of all.

The page has the look of a report, needs no network and no other file, and knows nothing of who found the
layouts: whoever has rows can fill it, as ``foretrace search`` prints them.

    write_sweep("layouts.html", found["layouts"], title="llama3-70b on 512 × dgx-h100")
"""

from __future__ import annotations

import html
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from foretrace.traces.errors import ReportError
from foretrace.traces.report.format import number
from foretrace.traces.report.html import filled, script_json, write_whole
from foretrace.traces.report.kinds import palette

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
_SCRIPTS: Final = ("format.js", "palette.js", "sweep_points.js", "sweep.js")


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
    return filled(_SCRIPTS, "sweep.html", title=html.escape(title), mode="sweep", meta=meta)


def write_sweep(
    path: str | os.PathLike[str], rows: Sequence[Mapping[str, Any]], *, title: str, notes: Sequence[str] = ()
) -> Path:
    """Write the page of ``sweep_html`` to *path*, all of it or nothing, and return it.

    Raises:
        ReportError: as ``sweep_html``, or *path* cannot be written.
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
