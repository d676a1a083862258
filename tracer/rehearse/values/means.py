"""Results of operators on numbers of which only the mean is known: counts, sums, comparisons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from foretrace.tracer.rehearse.values.chances import (
    COMPARES,
    DRAWS,
    EVENLY,
    NORMALLY,
    compared,
    drawn,
    positive,
)
from foretrace.tracer.rehearse.values.known import COUNTS, SCATTERS, SUMS, Known

ALL_OR_ANY: Final = frozenset({"aten.all", "aten.any"})

OF_MEANS: Final = (
    ALL_OR_ANY | COUNTS | SUMS | DRAWS | COMPARES | SCATTERS | NORMALLY | {EVENLY, "aten.eq", "aten.ne"}
)
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
    if name in DRAWS | NORMALLY or name == EVENLY:
        return drawn(name, args)
    known = of(first)
    is_positive = known.is_positive if name in ALL_OR_ANY else positive(name, args[1])
    if name in ALL_OR_ANY:
        mean = None if known.mean is None else _of_each(name, known.mean, first.numel() / n_made, n_made)
    else:
        mean = _truths(name, args, known, result.numel())
    return Known(mean=mean, is_positive=is_positive) if mean is not None or is_positive is not None else None


def _of_each(name: str, share: float, n_each: float, n_made: int) -> float:
    """Return which share of *n_made* results holds, each of *n_each* truths of which a *share* holds."""
    none = (1 - min(share, 1.0)) ** n_each
    found = min(share, 1.0) ** n_each if name == "aten.all" else 1 - none
    return float(found >= 0.5) if n_made == 1 else found


def _truths(name: str, args: Sequence[Any], known: Known, n: int) -> float | None:
    """Return which share of *n* truths holds: a comparison *name* of *args*, the first of them *known*."""
    if name in COMPARES:
        return compared(name, args, known, n)
    if name == "aten.ne":
        return 1.0
    return 1 / known.n_values if known.n_values else None
