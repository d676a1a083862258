"""Results of operators on numbers of which only the mean is known: counts, sums, comparisons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from tracer.rehearse.values.chances import COMPARES, DRAWS, EVENLY, compared, drawn
from tracer.rehearse.values.known import COUNTS, SCATTERS, SUMS, Known

OF_MEANS: Final = COUNTS | SUMS | DRAWS | COMPARES | SCATTERS | {EVENLY, "aten.eq", "aten.ne"}
"""Operators that have a rule here."""


def made(name: str, args: Sequence[Any], first: Any, result: Any, of: Callable[[Any], Known]) -> Known | None:
    """Return what is known of the *result* of an operator, None if nothing is known.

    Args:
        name: of the operator, one of ``OF_MEANS``.
        args: its arguments.
        first: the first tensor among them.
        result: its result.
        of: returns what is known of a tensor.
    """
    n_made = max(result.numel(), 1)
    if name in COUNTS:
        return Known(mean=first.numel() / n_made)
    if name in SCATTERS:
        before, share = of(first).mean, args[2].numel() / n_made
        is_number = len(args) > 3 and isinstance(args[3], int | float) and before is not None
        return Known(mean=args[3] * share + before * (1 - share)) if is_number else None
    if name in SUMS:
        known = of(first)
        factor = first.numel() / n_made
        return None if known.mean is None else replace(known, mean=known.mean * factor, is_drawn=False)
    if name in DRAWS or name == EVENLY:
        return drawn(name, args)
    mean = _truths(name, args, of(first), result.numel())
    return None if mean is None else Known(mean=mean)


def _truths(name: str, args: Sequence[Any], known: Known, n: int) -> float | None:
    """Return which share of *n* truths holds: a comparison *name* of *args*, the first of them *known*."""
    if name in COMPARES:
        return compared(name, args, known, n)
    if name == "aten.ne":
        return 1.0
    return 1 / known.n_values if known.n_values else None
