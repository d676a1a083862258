"""Comparisons of random numbers: of one number the likelier answer, of many the share that is true.

A layer that is dropped with a probability of 10 % is run, as in nine of ten steps; one that is never dropped
is always run. No number is drawn, so that two rehearsals never differ. A script that reads one random number
gets the middle of the range: an index that it computes from this is valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import erf, sqrt
from typing import Any, Final

from foretrace.tracer.rehearse.values.known import Known

DRAWS: Final = frozenset({"aten.rand", "aten.rand_like"})
"""Operators that draw numbers evenly from 0 (included) to 1 (not included)."""

NORMALLY: Final = frozenset({"aten.randn", "aten.randn_like"})
"""Operators that draw numbers from the standard normal distribution, whose mean no script is told."""

EVENLY: Final = "aten.uniform_"
"""Operator that draws numbers evenly between two bounds, 0 and 1 unless it is told others."""

COMPARES: Final = frozenset({"aten.lt", "aten.le", "aten.gt", "aten.ge"})
"""Operators that compare numbers with a bound."""

ABOVE: Final = frozenset({"aten.gt", "aten.ge"})

POSITIVE: Final = ABOVE | {"aten.ne"}
NOT_POSITIVE: Final = frozenset({"aten.lt", "aten.le", "aten.eq"})
"""What compares positive numbers with zero, and is true, or false."""

VANISHING: Final = 1e-6
"""Bounds up to which a script asks whether a number is as good as zero: a curvature, what it divides by."""


def is_vanishing(name: str, bound: Any) -> bool:
    """Whether the operator *name* asks if a number is above a *bound* that only excludes zero.

    >>> is_vanishing("aten.gt", 1e-10), is_vanishing("aten.gt", 0.5), is_vanishing("aten.lt", 1e-10)
    (True, False, False)
    """
    return name in ABOVE and isinstance(bound, float) and 0.0 < bound <= VANISHING


def positive(name: str, bound: Any) -> bool | None:
    """Return what the operator *name* says of a positive number and a *bound* next to zero.

    None of another bound or operator.

    >>> positive("aten.lt", 1e-11), positive("aten.ge", 0), positive("aten.ge", 1)
    (False, True, None)
    """
    is_zero = isinstance(bound, int | float) and 0 <= bound <= VANISHING
    return name in POSITIVE if is_zero and name in POSITIVE | NOT_POSITIVE else None


def chance(name: str, bound: float, *, is_one: bool) -> float:
    """Return the probability that a number drawn evenly from 0 to 1 compares with *bound* as *name* asks.

    Args:
        name: of the operator.
        bound: with which the number is compared.
        is_one: whether a single number is compared; the answer is then the likelier one, 0 or 1.

    >>> chance("aten.gt", 0.0, is_one=True), chance("aten.lt", 0.15, is_one=False)
    (1.0, 0.15)
    """
    below = min(max(float(bound), 0.0), 1.0)
    found = below if name in {"aten.lt", "aten.le"} else 1.0 - below
    return float(found >= 0.5) if is_one else found


def normal(bound: float) -> float:
    """Return the probability that a number from the standard normal distribution is below *bound*.

    >>> normal(0.0), round(normal(1.96), 3)
    (0.5, 0.975)
    """
    return (1.0 + erf(bound / sqrt(2.0))) / 2.0


def drawn(name: str, args: Sequence[Any]) -> Known | None:
    """Return what is known of numbers that the operator *name* draws evenly; nothing of those around zero.

    A parameter is drawn around zero, as a rule, and a number next to zero is a divisor that nobody has.

    >>> drawn("aten.uniform_", (None, 0.0, 3.0)).mean, drawn("aten.uniform_", (None, -0.1, 0.1))
    (1.5, None)
    """
    if name in NORMALLY:
        return Known(is_normal=True)
    low, high = (*args[1:3], *(0.0, 1.0)[len(args[1:3]) :]) if name == EVENLY else (0.0, 1.0)
    mean = (low + high) / 2
    return Known(mean=mean, is_drawn=(low, high) == (0.0, 1.0)) if mean else None


def compared(name: str, args: Sequence[Any], known: Known, n: int) -> float | None:
    """Return the share of true results when *name* compares *n* numbers with a bound, its *args*.

    None if unknown. It is known for random numbers, for one unknown number and a bound next to zero, and for
    a number of which the mean is known, such as how many truths of a random mask hold.
    """
    is_number = isinstance(args[1], int | float)
    if known.is_normal:
        return chance(name, normal(args[1]), is_one=n == 1) if is_number else None
    if known.mean is None and not known.n_values:
        return 1.0 if n == 1 and is_vanishing(name, args[1]) else None
    if known.is_drawn:
        return chance(name, args[1], is_one=n == 1) if is_number else None
    if known.mean is None or n > 1 or not is_number:
        return None
    return float(known.mean > args[1] if name in ABOVE else known.mean < args[1])
