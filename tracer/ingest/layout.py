"""Finds events in a block of a file in Kineto's layout, by comparing eight bytes of many places at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

OPEN: Final = b'{\n    "'
"""How every event begins, those that name tracks and processes, too."""

START: Final = b'{\n    "ph": "'
"""How an event that says its phase first begins: all but the names of tracks and processes."""

COMPLETE: Final = START + b'X", "cat": "'
"""How an event with a duration begins; its category follows."""

END: Final = b"\n  }"
BETWEEN: Final = b"\n  },\n  "
"""What lies between the last value of an event and the start of the next."""

_WORD: Final = 8
_Places = NDArray[np.intp]


class NamesLeftOut(NamedTuple):
    """Events that are not read: the text from their category to their name, and eight bytes that follow."""

    before: bytes
    begin: tuple[bytes, ...]


class Events:
    """The events of one block.

    Args:
        block: bytes of whole events.
        size: how many of its bytes count.

    Attributes:
        n_events: how many begin in it, of all phases.
    """

    def __init__(self, block: bytes | bytearray, size: int) -> None:
        self._block, self._size = block, size
        padded = max(len(block) - _WORD + 1, 0)
        self._words = np.ndarray((padded,), "<u8", block, strides=(1,)) if padded else np.zeros(0, np.uint64)
        braces = np.flatnonzero(np.frombuffer(block, np.uint8, min(size, padded)) == ord("{"))
        opened = self._with(braces, OPEN, 0)
        begun = self._with(opened, START, 0)
        self.n_events = len(begun)
        self._complete = self._with(begun, COMPLETE, 0)
        self._complete = self._complete[self._complete < len(self._words) - len(COMPLETE)]
        self._category = self._words[self._complete + len(COMPLETE)]
        self._opened = np.append(opened, size)

    def texts(
        self, categories: Iterable[bytes], *, but: NamesLeftOut | None = None
    ) -> list[bytes | bytearray]:
        """Return the text of every event with a duration whose category begins with one of *categories*.

        Args:
            categories: how the category begins; the key and the value behind it may follow.
            but: events of these categories that are left out.
        """
        places = np.concatenate([self._of(category) for category in categories])
        if but is not None:
            places = places[~np.isin(places, self._named(but))]
        later = self._opened[np.searchsorted(self._opened, places, side="right")]
        known = self._words[np.maximum(later - _WORD, 0)] == _number(BETWEEN)
        ends = np.where(known, later - len(BETWEEN) + len(END), -1)
        block, size = self._block, self._size
        if not known.all():
            for i in np.flatnonzero(~known).tolist():
                ends[i] = block.find(END, int(places[i]), size) + len(END)
        whole = ends >= len(END)
        return [block[a:b] for a, b in zip(places[whole].tolist(), ends[whole].tolist(), strict=True)]

    def _named(self, names: NamesLeftOut) -> _Places:
        """Return where the events begin that *names* are of."""
        offset = len(COMPLETE) + len(names.before)
        places = self._of(names.before)
        places = places[places < len(self._words) - offset]
        return places[np.isin(self._words[places + offset], [_number(begin) for begin in names.begin])]

    def _of(self, category: bytes) -> _Places:
        """Return where the events whose category begins with *category* begin."""
        begin = category[:_WORD]
        places = self._complete[(self._category & _mask(begin)) == _number(begin)]
        return self._with(places, category[_WORD:], len(COMPLETE) + _WORD)

    def _with(self, places: _Places, text: bytes, offset: int) -> _Places:
        """Return those *places* behind which, at *offset*, the block goes on with *text*."""
        for at in range(0, len(text), _WORD):
            part = text[at : at + _WORD]
            places = places[places < len(self._words) - offset - at]
            words = self._words[places + (offset + at)]
            places = places[(words & _mask(part)) == _number(part)]
        return places


def _number(text: bytes) -> np.uint64:
    """Return up to eight bytes as the number that they are in memory."""
    return np.uint64(int.from_bytes(text, "little"))


def _mask(text: bytes) -> np.uint64:
    """Return a number whose bits are set in as many bytes as *text* has."""
    return np.uint64((1 << 8 * len(text)) - 1)
