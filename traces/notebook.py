"""Runs and comparisons as a notebook shows them, as HTML: key figures in a table, and a step as a picture.

Whoever makes a run gives it ``run_html``: what this loads needs the module of runs, and only a notebook pays.
"""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from foretrace.traces.errors import TraceError

if TYPE_CHECKING:
    from foretrace.traces.run import Run
    from foretrace.traces.text_picture import Piece

_TABLE: Final = "border-collapse:collapse;font:13px system-ui,sans-serif"
_LEFT: Final = "text-align:left;padding:2px 14px 2px 0;font-weight:400;opacity:.75"
_RIGHT: Final = "text-align:left;padding:2px 14px 2px 0"
_MOST_LINES, _LETTERS = 8, 72  # rows of the picture, and letters in each: about the width of the table


def run_html(run: Run) -> str:
    """Return a run as HTML: what it is, its key figures, the story of a step. Names in it stay text."""
    from foretrace.traces.analysis.metrics import summarize
    from foretrace.traces.report.kinds import Kinds
    from foretrace.traces.report.words import headline, story, subtitle, title

    try:
        summary = summarize(run)
        rows = [(one["name"], one["value"], one["note"]) for one in headline(run, summary)]
        said, drawn = story(run, summary, Kinds((run,))), _picture(run)
    except TraceError as error:  # a run without a step is a run all the same
        rows, said, drawn = [("ranks", str(run.info.world_size), "")], str(error), ""
    warnings = [f"{len(run.warnings)} warnings, the first: {run.warnings[0]}"] if run.warnings else []
    return card(title(run), subtitle(run), rows, [said, *warnings], drawn)


def _picture(run: Run) -> str:
    """Return the first step of *run* as letters, and what they mean: a kind covers its share of the time."""
    from foretrace.traces.text_picture import picture

    found = picture(run, _LETTERS)
    if found is None:
        return ""
    lines = found.lines[:_MOST_LINES]
    wide = max(len(line.name) for line in lines)
    rows = [html.escape(line.name.ljust(wide + 2)) + "".join(map(_piece, line.pieces)) for line in lines]
    if len(found.lines) > len(lines):
        rows.append(f"and {len(found.lines) - len(lines)} more")
    legend = "  ".join(f"{_piece(piece)} {html.escape(meaning)}" for piece, meaning in found.legend)
    return '<pre style="white-space:pre-wrap">' + "\n".join([*rows, f"{found.length}  {legend}"]) + "</pre>"


def _piece(piece: Piece) -> str:
    text = html.escape(piece.text)
    if not piece.colour:
        return text
    style = f"background:{piece.colour};color:#fff" if piece.works else f"color:{piece.colour}"
    return f'<span style="{style}">{text}</span>'


def card(
    heading: str, below: str, rows: Iterable[tuple[str, str, str]], notes: Iterable[str], drawn: str = ""
) -> str:
    """Return a table of names, values and notes as HTML, with words above and below; all of it is text."""
    lines = "".join(
        f'<tr><th style="{_LEFT}">{html.escape(name)}</th>'
        f'<td style="{_RIGHT}"><b>{html.escape(value)}</b></td>'
        f'<td style="{_LEFT}">{html.escape(note)}</td></tr>'
        for name, value, note in rows
    )
    said = "".join(f"<p>{html.escape(note)}</p>" for note in notes if note)
    return (
        f"<div><b>{html.escape(heading)}</b><br><small>{html.escape(below)}</small>"
        f'<table style="{_TABLE}">{lines}</table>{drawn}{said}</div>'
    )
