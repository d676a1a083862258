"""Ranks that do the same in a replay, so that one of them is played for all.

Two ranks start and end their spans at the same times if their own work is the same, and if whoever they meet
does the same in turn. Such ranks are found by refinement: each has a colour, at first by its own work; then
by its colour and those of all that it meets, channel by channel, until no two of one colour can be told
apart. Every sum and maximum of the replay is then the same number for all ranks of a colour, and the replay
of one rank of each is that of all, to the last digit.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.typing import NDArray

from foretrace.traces.analysis.communications import Communications, communications
from foretrace.traces.columns import Int64Array, int64, is_one_of
from foretrace.traces.run import Run

Colours = NDArray[np.uint64]

_ODD: Final = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
"""Multipliers of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), which spreads numbers over 64 bits."""


class Meetings:
    """Who meets whom: the channels of each stored rank, and the slot in which it has each of them.

    Args:
        joined: communications of a run.
        ranks: its stored ranks.
    """

    def __init__(self, joined: Communications, ranks: tuple[int, ...]) -> None:
        channels = [joined.of(rank).channels for rank in ranks]
        counts = [len(own) for own in channels]
        self._n_channels = len(joined.channels)
        self._channel = np.concatenate(channels)
        self._who = np.repeat(np.arange(len(ranks)), counts)
        self._slot = np.concatenate([np.arange(n, dtype=np.uint64) for n in counts])
        self._at = np.cumsum([0, *counts])

    def refined(self, colour: Colours) -> Colours:
        """Return the coarsest colours, finer than *colour*, of which equal ones meet equal ones."""
        n = len(np.unique(colour))
        while True:
            met = np.zeros_like(colour)
            # A sum does not depend on the order in which a rank meets others.
            np.add.at(met, self._who, spread(self._met(colour)[self._channel], self._slot))
            colour = spread(colour, met)
            if (n_colours := len(np.unique(colour))) == n:
                return colour
            n = n_colours

    def channels(self, colour: Colours, place: int) -> Colours:
        """Return by slot of the rank at *place* what tells its channel from others, by refined colours."""
        return self._met(colour)[self._channel[self._at[place] : self._at[place + 1]]]

    def _met(self, colour: Colours) -> Colours:
        """Return by channel who takes part in which slot."""
        met = np.zeros(self._n_channels, np.uint64)
        np.add.at(met, self._channel, spread(colour[self._who], self._slot))
        return met


def coloured(run: Run) -> tuple[Meetings, Colours]:
    """Return who meets whom in *run*, and the colours of its stored ranks in a replay of what it recorded."""
    joined = communications(run, by_step=True)
    meetings = Meetings(joined, run.stored_ranks)
    numbers = [number_of(run.like(part.rank), part.slot, _upward(run, part.rank)) for part in joined]
    return meetings, meetings.refined(np.array(numbers, np.uint64))


def first_of_each(colour: Colours) -> tuple[NDArray[np.intp], Int64Array]:
    """Return the place of the first rank of each colour, by colour, and how many ranks have it."""
    _, first, count = np.unique(colour, return_index=True, return_counts=True)
    return first, count.astype(np.int64)


def _upward(run: Run, rank: int) -> NDArray[np.bool_]:
    """Return which spans are transfers with a higher rank: it may say in which direction they go."""
    table = run.spans([rank], ["category", "peer"])
    return is_one_of(table, "category", ("p2p",)) & (int64(table, "peer") > rank)


def number_of(*values: object) -> int:
    """Return 64 bits that are the same for equal *values*, and hardly ever for others."""
    whole = blake2b(digest_size=8)
    for value in values:
        whole.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
        whole.update(b"|")
    return int.from_bytes(whole.digest(), "little")


def spread(one: Colours, other: Colours) -> Colours:
    """Return 64 bits for each pair of numbers, different ones for different pairs but by a rare accident."""
    mixed = one * _ODD[0] + (other + np.uint64(1)) * _ODD[1]
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _ODD[1]
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _ODD[2]
    spread_out: Colours = mixed ^ (mixed >> np.uint64(31))
    return spread_out
