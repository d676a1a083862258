"""Between which values a measurement is likely to lie, and how that is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from foretrace.traces.report.format import format_si, format_time, number
from foretrace.traces.run import Run

_HOW: Final = (
    "how far predictions of measured runs were off, class by class. Where runs of a class take longer or "
    "hold more than predicted, or less, the prediction lies near the end of its range, or outside it"
)

_RANGES: Final[tuple[tuple[str, str, str, Callable[[float], str]], ...]] = (
    ("step time", "step_time_s", "step_time_from", format_time),
    ("peak memory", "peak_memory_bytes", "peak_memory_from", lambda size: format_si(size, "B")),
)
"""Name, figure, where its range comes from, and how a value of it is written."""


def likely(run: Run, key: str, said: Callable[[float], str]) -> str:
    """Return between which values a measurement of *key* is likely to lie, "" if the writer does not say.

    Args:
        run: the run; ``info.summary["intervals"]`` has two values by the name of a figure.
        key: key of the figure; where the run's own value lies outside, the words say on which side.
        said: writes a value.
    """
    ends = _ends(run, key)
    if ends is None:
        return ""
    low, high = ends
    predicted = number(run.info.summary.get(key))
    words = f"likely {said(low)} to {said(high)}"
    if predicted is None or low <= predicted <= high:
        return words
    return f"{words}: {'more' if predicted < low else 'less'} than predicted"


def likely_section(run: Run) -> dict[str, Any] | None:
    """Return the part of what a page rests on that says where ranges come from, None if there are none."""
    lines = [
        [name, f"{said(ends[0])} to {said(ends[1])}", str(_known(run).get(source, ""))]
        for name, key, source, said in _RANGES
        if (ends := _ends(run, key)) is not None
    ]
    return {"title": "Likely ranges", "notes": [_HOW], "lines": lines} if lines else None


def _known(run: Run) -> Mapping[str, Any]:
    known = run.info.summary.get("intervals")
    return known if isinstance(known, Mapping) else {}


def _ends(run: Run, key: str) -> tuple[float, float] | None:
    """Return the two ends of the range of *key*, None if the writer does not say, or says something else."""
    ends = _known(run).get(key)
    if not isinstance(ends, list | tuple) or len(ends) != 2:
        return None
    low, high = (number(end) for end in ends)
    return None if low is None or high is None else (low, high)
