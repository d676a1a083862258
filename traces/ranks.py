"""Ranks as a person writes them: ``0-7,9``."""

from __future__ import annotations

from typing import Final

from foretrace.traces.errors import LayoutError

MOST_RANKS: Final = 1 << 20  # largest world that is believed
_MOST_DIGITS: Final = 9  # of a number, so many are read: more than any world needs


def ranks_in(text: str, *, below: int = MOST_RANKS) -> tuple[int, ...]:
    """Return the ranks that a list of numbers and ranges names, both ends of a range included, in order.

    Args:
        text: the list.
        below: size of the world.

    Raises:
        LayoutError: it is no such list, or names ranks that are not there.

    >>> ranks_in("9,0-3")
    (0, 1, 2, 3, 9)
    """
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise LayoutError(f"{text!r} is not a list of ranks: give numbers and ranges, e.g. 0,8-11")
        begin, end = (int(number[:_MOST_DIGITS]) for number in (first, last or first))
        if end < begin:
            raise LayoutError(f"{part.strip()} in {text!r} goes down and names no rank: write {last}-{first}")
        if end >= below:
            raise LayoutError(f"{text!r} names rank {last or first}; there are 0 to {below - 1}")
        found.update(range(begin, end + 1))
    return tuple(sorted(found))
