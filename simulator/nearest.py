"""Numbers and names next to one that does not work, in words: what an error offers instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def near_name(name: str, known: Iterable[str], otherwise: str = "it takes") -> str:
    """Return the one of *known* that *name* is most like, in words; where it is like none, all of them.

    >>> near_name("modle", ["model", "cluster"]), near_name("x", ["model", "cluster"], "one of")
    ('did you mean model?', 'one of model, cluster')
    """
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]}?" if near else f"{otherwise} {', '.join(names)}"


def near_divisors(number: int, degree: int) -> str:
    """Return the divisors of *number* next to *degree*, in words.

    >>> near_divisors(64, 6), near_divisors(64, 100)
    ('4 or 8', '64')
    """
    found = [n for n in range(1, number + 1) if number % n == 0]
    below, above = [n for n in found if n < degree], [n for n in found if n > degree]
    return " or ".join(map(str, [*below[-1:], *above[:1]]))


def near_multiples(number: int, of: int) -> str:
    """Return the multiples of *of* next to *number*, in words.

    >>> near_multiples(100, 8), near_multiples(5, 8)
    ('96 or 104', '8')
    """
    below = number // of * of
    return f"{below} or {below + of}" if below else str(of)
