"""Two runs in one report: what differs, by cause, and how well single operations were predicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from foretrace.traces.analysis.activity import UNNAMED_AXIS
from foretrace.traces.analysis.communications import COMMUNICATION
from foretrace.traces.columns import Int64Array, factorized, int64, labels
from foretrace.traces.compare import RANK_SPREAD, Cause, Comparison
from foretrace.traces.pack import Pack
from foretrace.traces.report.format import format_share, format_signed, format_time
from foretrace.traces.report.kinds import Kinds, axis_label
from foretrace.traces.report.lanes import COMPUTE_CATEGORIES
from foretrace.traces.report.words import figure

_NAMED: Final = 3  # causes that the sentence about a difference names
MOST_POINTS: Final = 6_000  # joined operations in the picture; of more, every n-th is drawn


def comparison(found: Comparison, names: Sequence[str], kinds: Kinds, pack: Pack) -> dict[str, Any]:
    """Return the comparison as the page takes it: causes that add up, and operations joined one by one.

    Args:
        found: the comparison.
        names: what the page calls the two runs.
        kinds: the kinds of the report.
        pack: gets the joined operations.
    """
    a, b = names
    return {
        "words": _sentence(found, names, kinds),
        "caption": f"Mean over ranks of step {found.a_step} ({a}) and step {found.b_step} ({b}); "
        "every column adds up to its step time.",
        "lines": [_line(cause, kinds) for cause in found.causes if cause.a_ns or cause.b_ns],
        "total": {"name": "step", "kind": None, "a_ns": found.a_step_ns, "b_ns": found.b_step_ns},
        "operations": pack_operations(found, kinds, pack),
        "operations_caption": _coverage(found),
    }


def comparison_headline(found: Comparison, names: Sequence[str], kinds: Kinds) -> list[dict[str, str]]:
    """Return the key figures of two runs."""
    difference = found.b_step_ns - found.a_step_ns
    share = difference / found.b_step_ns
    tone = ""
    if (found.a_origin == "simulated") != (found.b_origin == "simulated"):
        tone = "bad" if abs(share) > 0.1 else "good"  # a prediction within 10 % ranks layouts well
    figures = [
        figure(f"Step time, {names[0]}", format_time(found.a_step_ns / 1e9), found.a_name),
        figure(f"Step time, {names[1]}", format_time(found.b_step_ns / 1e9), found.b_name),
        figure(
            "Difference",
            format_signed(difference),
            f"{format_share(share, '+.1f')} of {names[1]}".replace("-", "−", 1),
            tone,
        ),
    ]
    if faster := found.faster(names):
        figures[-1] = figure("The same work", f"{found.ratio_per_work:.3f}", faster)
    for name, cause in zip(("Largest cause", "Next cause"), _largest(found), strict=False):
        figures.append(figure(name, cause_name(cause, kinds), format_signed(cause.difference_ns)))
    return figures


def _sentence(found: Comparison, names: Sequence[str], kinds: Kinds) -> str:
    """Say in one sentence what makes the difference."""
    difference = found.b_step_ns - found.a_step_ns
    named = [f"{cause_name(c, kinds)} {format_signed(c.difference_ns)}" for c in _largest(found)[:_NAMED]]
    relation = "longer than" if difference > 0 else "shorter than" if difference < 0 else "as long as"
    text = (
        f"The {names[1]} step takes {format_time(found.b_step_ns / 1e9)}, "
        f"{format_time(abs(difference) / 1e9)} {relation} the {names[0]} one."
    )
    if faster := found.faster(names):
        text += f" P{faster[1:]}."
    return f"{text} Most of it: {', '.join(named)}." if named else text


def _line(cause: Cause, kinds: Kinds) -> dict[str, Any]:
    return {
        "name": cause_name(cause, kinds),
        "kind": _kind_of(cause, kinds),
        "a_ns": cause.a_ns,
        "b_ns": cause.b_ns,
    }


def _kind_of(cause: Cause, kinds: Kinds) -> int | None:
    """Return the kind whose colour the cause has, None for the spread between ranks."""
    head, _, tail = cause.name.partition(":")
    if head == RANK_SPREAD:
        return None
    return kinds.compute(tail) if head == "compute" else kinds.state(cause.name)


def cause_name(cause: Cause, kinds: Kinds) -> str:
    """Return a cause as the legend names it."""
    head, _, tail = cause.name.partition(":")
    if head == RANK_SPREAD:
        return "Spread between ranks"
    if head == "compute" and kinds.entries[kinds.compute(tail)]["id"] != tail:
        return tail.replace("_", " ") or "Other compute"
    kind = _kind_of(cause, kinds)
    return str(kinds.entries[kind]["label"]) if kind is not None else cause.name


def _largest(found: Comparison) -> list[Cause]:
    """Return the causes that differ, the largest difference first."""
    return sorted((c for c in found.causes if c.difference_ns), key=lambda cause: -abs(cause.difference_ns))


def pack_operations(found: Comparison, kinds: Kinds, pack: Pack) -> list[dict[str, Any]]:
    """Add joined operations to *pack*, as many as a picture can show; return a line for each kind of them.

    Args:
        found: the comparison.
        kinds: the kinds of the report.
        pack: gets the columns ``ratio.a``, ``ratio.b`` (ns) and ``ratio.kind``, of equal length.
    """
    a_ns, b_ns, colour, lines = operations(found, kinds)
    pack.add("ratio.a", a_ns.astype(np.float64))
    pack.add("ratio.b", b_ns.astype(np.float64))
    pack.add("ratio.kind", colour)
    return lines


def operations(
    found: Comparison, kinds: Kinds
) -> tuple[Int64Array, Int64Array, NDArray[np.uint8], list[dict[str, Any]]]:
    """Return joined operations, as many as a picture can show, and a line for each kind of them.

    Communication counts from the last arrival: waiting is not the operation's own time.

    Returns:
        durations in both runs in ns and the number of the kind, each of shape ``(n_drawn,)``; and the lines.
    """
    table = found.joined
    own_ns = [int64(table, f"{run}_duration_ns") - int64(table, f"{run}_waiting_ns") for run in "ab"]
    columns = [labels(table, name) for name in ("category", "kind", "axis")]
    key = factorized(*(codes for codes, _ in columns))
    colour = np.zeros(table.num_rows, np.uint8)
    known = np.zeros(table.num_rows, np.bool_)
    lines = []
    for number in range(int(key.max(initial=-1)) + 1):
        rows = np.flatnonzero(key == number)
        category, kind, axis = (names[codes[rows[0]]] for codes, names in columns)
        if category not in COMPUTE_CATEGORIES + COMMUNICATION:
            continue
        known[rows] = True
        communicates = category in COMMUNICATION
        colour[rows] = kinds.axis(axis or UNNAMED_AXIS) if communicates else kinds.compute(kind)
        lines.append(_operation(kind, axis, [ns[rows] for ns in own_ns]) | {"colour": int(colour[rows[0]])})
    # A ratio needs a length in both runs.
    drawn = np.flatnonzero((own_ns[0] > 0) & (own_ns[1] > 0) & known)
    drawn = drawn[:: max(1, -(-len(drawn) // MOST_POINTS))]
    lines.sort(key=lambda line: -line["b_total_s"])
    return own_ns[0][drawn], own_ns[1][drawn], colour[drawn], lines


def _operation(kind: str, axis: str, own_ns: Sequence[Int64Array]) -> dict[str, Any]:
    """Return the numbers of one kind of operation: how many, how long in each run, median of b / a."""
    a_ns, b_ns = own_ns
    measured = a_ns > 0
    words = kind.replace("_", " ") or "unnamed"
    return {
        "name": f"{words}, {axis_label(axis)}" if axis else words,
        "n_joined": len(a_ns),
        "a_total_s": int(a_ns.sum()) / 1e9,
        "b_total_s": int(b_ns.sum()) / 1e9,
        "median_ratio": float(np.median(b_ns[measured] / a_ns[measured])) if measured.any() else None,
    }


def _coverage(found: Comparison) -> str:
    """Say how many spans were joined, how many found no partner, and whether both communicate the same."""
    spans = found.spans
    said = "" if spans.communicated is None else spans.communicated.words("the first run", "the second")
    said = f" {said[0].upper()}{said[1:]}." if said else ""
    left = spans.a_unjoined + spans.b_unjoined
    n_ranks = len(spans.rank_pairs)
    ranks = f"{n_ranks} rank{'s' if n_ranks != 1 else ''}"
    text = f"{spans.table.num_rows:,} spans joined one to one on {ranks}, without waiting"
    alone = f"; {spans.a_unjoined:,} and {spans.b_unjoined:,} have no partner" if left else ""
    return f"{text}{alone}.{said}"
