"""Random numbers that are compared: of one the likelier truth is told, of many the share that is true.

A layer that is left out with a chance of 10 % is run then, as in nine of ten steps, and one that is left out
never is run always. Which numbers a generator would have drawn does not matter, and no two rehearsals differ.
"""

from __future__ import annotations

from typing import Any, Final

DRAWS: Final = frozenset({"aten.rand", "aten.rand_like"})
"""Operators that draw numbers evenly from 0 (included) to 1 (not included)."""

COMPARES: Final = frozenset({"aten.lt", "aten.le", "aten.gt", "aten.ge"})
"""Operators that compare numbers with a bound."""

ABOVE: Final = frozenset({"aten.gt", "aten.ge"})

VANISHING: Final = 1e-6
"""Bounds up to which a script asks whether a number is as good as zero: a curvature, what it divides by."""


def is_vanishing(name: str, bound: Any) -> bool:
    """Whether the operator *name* asks if a number is above a *bound* that keeps it from zero only.

    >>> is_vanishing("aten.gt", 1e-10), is_vanishing("aten.gt", 0.5), is_vanishing("aten.lt", 1e-10)
    (True, False, False)
    """
    return name in ABOVE and isinstance(bound, float) and 0.0 < bound <= VANISHING


def chance(name: str, bound: float, *, is_one: bool) -> float:
    """Return the chance from 0 to 1 that such a number compares with *bound* as the operator *name* asks.

    Args:
        name: of the operator.
        bound: with which the number is compared.
        is_one: whether one number is compared: told is what is likelier then, 0 or 1.

    >>> chance("aten.gt", 0.0, is_one=True), chance("aten.lt", 0.15, is_one=False)
    (1.0, 0.15)
    """
    below = min(max(float(bound), 0.0), 1.0)
    found = below if name in {"aten.lt", "aten.le"} else 1.0 - below
    return float(found >= 0.5) if is_one else found
