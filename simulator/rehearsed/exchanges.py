"""What all ranks of an all-to-all send each other, from what those that were rehearsed send and get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Splits(NamedTuple):
    """Bytes of one rank in an all-to-all, by place in the group.

    Attributes:
        sent: to each rank, itself included.
        received: from each.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]


def even(size_bytes: int, n_ranks: int) -> Splits:
    """Return the splits of a rank that sends *size_bytes*, as much to each of *n_ranks*, and gets as much."""
    each = (size_bytes // n_ranks,) * n_ranks
    return Splits(each, each)


def sent_bytes(
    ranks: Sequence[int], known: Mapping[int, Splits], stands_for: Sequence[int]
) -> list[list[int]]:
    """Return what each of *ranks* sends to each of them; shape ``(n, n)``.

    What a rehearsed rank sends and gets is as it says; where two that were rehearsed do not agree, as where
    this rank was told to be the one with the fullest experts, the larger counts. One that was not rehearsed
    sends to each place of the group what the rank that stands for it does, or the first that is known.

    Args:
        ranks: the group.
        known: those of its ranks that were rehearsed.
        stands_for: index rank, value the rehearsed rank that stands for it.

    >>> sent_bytes((4, 5), {4: Splits((0, 3), (0, 7))}, [0] * 4 + [4, 4])
    [[0, 3], [7, 3]]
    """
    first = next(iter(known.values()))
    rows = []
    for place, rank in enumerate(ranks):
        row = list(known.get(rank, known.get(stands_for[rank], first)).sent)
        for other, splits in ((at, known[to]) for at, to in enumerate(ranks) if to in known):
            row[other] = max(row[other], splits.received[place]) if rank in known else splits.received[place]
        rows.append(row)
    return rows
