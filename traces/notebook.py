"""Runs and comparisons as a notebook shows them: their key figures in a small table, as HTML."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Final

from foretrace.traces.analysis.metrics import summarize
from foretrace.traces.compare import Comparison
from foretrace.traces.errors import TraceError
from foretrace.traces.report.format import format_share, format_time
from foretrace.traces.report.kinds import Kinds
from foretrace.traces.report.naming import subtitle, title
from foretrace.traces.report.words import headline, story
from foretrace.traces.run import Run

_TABLE: Final = "border-collapse:collapse;font:13px system-ui,sans-serif"
_LEFT: Final = "text-align:left;padding:2px 14px 2px 0;font-weight:400;opacity:.75"
_RIGHT: Final = "text-align:left;padding:2px 14px 2px 0"


def run_html(run: Run) -> str:
    """Return a run as HTML: what it is, its key figures, the story of a step. Names in it stay text."""
    try:
        summary = summarize(run)
        rows = [(one["name"], one["value"], one["note"]) for one in headline(run, summary)]
        said = story(run, summary, Kinds((run,)))
    except TraceError as error:  # a run without a step is a run all the same
        rows, said = [("ranks", str(run.info.world_size), "")], str(error)
    warnings = [f"{len(run.warnings)} warnings, the first: {run.warnings[0]}"] if run.warnings else []
    return _card(title(run), subtitle(run), rows, [said, *warnings])


def comparison_html(found: Comparison) -> str:
    """Return a comparison as HTML: both steps, and the causes of their difference, the largest first."""
    difference = found.b_step_ns - found.a_step_ns
    causes = sorted((c for c in found.causes if c.difference_ns), key=lambda c: -abs(c.difference_ns))
    rows = [
        ("step, first run", format_time(found.a_step_ns / 1e9), found.a_name),
        ("step, second run", format_time(found.b_step_ns / 1e9), found.b_name),
        (
            "difference",
            _signed(difference),
            f"{format_share(difference / found.a_step_ns, '+.1f')} of the first",
        ),
        *((cause.name, _signed(cause.difference_ns), "") for cause in causes),
    ]
    return _card("Two runs", "what differs, by cause; the causes add up", rows, found.warnings)


def _card(heading: str, below: str, rows: Iterable[tuple[str, str, str]], notes: Iterable[str]) -> str:
    lines = "".join(
        f'<tr><th style="{_LEFT}">{html.escape(name)}</th>'
        f'<td style="{_RIGHT}"><b>{html.escape(value)}</b></td>'
        f'<td style="{_LEFT}">{html.escape(note)}</td></tr>'
        for name, value, note in rows
    )
    said = "".join(f"<p>{html.escape(note)}</p>" for note in notes if note)
    return (
        f"<div><b>{html.escape(heading)}</b><br><small>{html.escape(below)}</small>"
        f'<table style="{_TABLE}">{lines}</table>{said}</div>'
    )


def _signed(ns: int) -> str:
    return ("+" if ns > 0 else "−" if ns < 0 else "±") + format_time(abs(ns) / 1e9)
