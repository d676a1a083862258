"""What all ranks of an all-to-all send each other, from what those that were rehearsed send and get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Splits(NamedTuple):
    """Bytes of one rank in an all-to-all, by place in the group.

    Attributes:
        sent: to each rank, itself included.
        received: from each.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]


def splits_of(message: Mapping[str, Any]) -> Splits | None:
    """Return how uneven an all-to-all is, None if it is even or something else."""
    found = Splits(tuple(message["sent_bytes"]), tuple(message["received_bytes"]))
    return found if found.sent else None


def even(size_bytes: int, n_ranks: int) -> Splits:
    """Return the splits of a rank that sends *size_bytes*, as much to each of *n_ranks*, and gets as much."""
    each = (size_bytes // n_ranks,) * n_ranks
    return Splits(each, each)


def sent_bytes(
    ranks: Sequence[int], known: Mapping[int, Splits], stands_for: Sequence[int]
) -> list[list[int]]:
    """Return what each of *ranks* sends to each of them; shape ``(n, n)``.

    What a rehearsed rank sends and gets is as it says; where two that were rehearsed do not agree, as where
    this rank was told to be the one with the fullest experts, the larger counts. Of ranks that were not, one
    sends to another in proportion to what the rank that stands for it sends to the other, and gets from it.
    That is so where all send alike, as to experts that all routers choose alike, and on their way back, where
    all get alike.

    Args:
        ranks: the group.
        known: those of its ranks that were rehearsed.
        stands_for: index rank, value the rehearsed rank that stands for it.

    >>> sent_bytes((4, 5), {4: Splits((9, 3), (9, 7))}, [0] * 4 + [4, 4])
    [[9, 3], [7, 2]]
    """
    first = next(iter(known))
    rows = []
    for place, rank in enumerate(ranks):
        stands = rank if rank in known else stands_for[rank]
        stands = stands if stands in known else first
        row = list(known[rank].sent) if rank in known else _alike(known[stands], ranks.index(stands), place)
        for other, to in enumerate(ranks):
            if to in known:
                got = known[to].received[place]
                row[other] = max(row[other], got) if rank in known else got
        rows.append(row)
    return rows


def _alike(splits: Splits, own: int, place: int) -> list[int]:
    """Return what the rank at *place* sends to each, if the one at *own* with *splits* stands for it."""
    got, kept = splits.received[place], max(splits.sent[own], splits.received[own])
    return [round(sent * got / kept) if kept else max(sent, got) for sent in splits.sent]
