"""Integers that all ranks of a group send each other, if all of these ranks have been rehearsed.

If not, all ranks are assumed to send what this one does. A rank writes what it sends to a file; if the
numbers of ranks differ, they are rehearsed again and read each other's (``together``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer.internals import makers
from foretrace.tracer.rehearse.operators.calls import tensors_in
from foretrace.tracer.rehearse.peers.letters import Address
from foretrace.tracer.rehearse.peers.splits import Exchange

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.values.stated import Stated

KINDS: Final = frozenset({"all_gather", "all_to_all"})
"""Kinds of messages by which all ranks tell all others something."""

MOST_GATHERED: Final = 1 << 16
"""Elements above which numbers are not left for others."""


def gathered(stated: Stated, group: Any, rank: int, source: Any, outputs: Sequence[Any]) -> None:
    """Follow an all-gather of *source* in *group*, from which *rank* gets *outputs*.

    These are one tensor per member, or one tensor for all.
    """
    heard = _heard(stated, "all_gather", group, rank, own_numbers(stated, source))
    if heard is None:
        return
    parts = heard if len(outputs) == len(heard) else [[n for one in heard for n in one]]
    _fill(stated, outputs, parts)


def exchanged(stated: Stated, group: Any, rank: int, exchange: Exchange) -> bool:
    """Follow an all-to-all in *group*; return whether the outputs are what others have sent to *rank*."""
    source, outputs = exchange.source, tensors_in(exchange.filled)
    heard = _heard(
        stated, "all_to_all", group, rank, _parts(stated, source, len(group.ranks), exchange.rows_in)
    )
    if heard is None:
        return False
    mine = [one[group.ranks.index(rank)] for one in heard]
    parts = mine if isinstance(source, list | tuple) else [[n for one in mine for n in one]]
    return _fill(stated, outputs, parts)


def _heard(stated: Stated, kind: str, group: Any, rank: int, content: Any) -> list[Any] | None:
    """Leave *content* for the others of *group*; return what each has left, None if one has not."""
    letters, found = stated.letters, []
    own = letters.next(kind, group.id, rank)
    if content is not None:
        letters.leave(own, content)
    for member in group.ranks:
        address = Address(*own[:2], member, *own[3:])
        found.append(content if member == rank else letters.read(address))
    return None if len(found) < 2 or any(one is None for one in found) else found


def own_numbers(stated: Stated, tensor: Any) -> list[int] | None:
    """Return the integers of *tensor*; None if they are not this rank's own, or too many."""
    numbers = stated.numbers
    if tensor.is_floating_point() or tensor.numel() > MOST_GATHERED or numbers.is_shared(tensor):
        return None
    own = numbers.of(tensor)
    if own is None:
        return None
    with numbers.really():
        found: list[int] = own.flatten().tolist()
    return found


def _parts(stated: Stated, source: Any, n_ranks: int, rows: Sequence[int] | None) -> list[Any] | None:
    """Return the numbers that are sent to each of *n_ranks*."""
    if isinstance(source, list | tuple):
        listed = [own_numbers(stated, one) for one in source]
        return None if any(one is None for one in listed) else listed
    whole, n_rows = own_numbers(stated, source), source.shape[0] if source.dim() else 0
    if whole is None or not n_rows:
        return None
    counts, width = rows or [n_rows // n_ranks] * n_ranks, len(whole) // n_rows
    ends = [sum(counts[: at + 1]) * width for at in range(n_ranks)]
    return [whole[end - n * width : end] for n, end in zip(counts, ends, strict=True)]


def _fill(stated: Stated, outputs: Sequence[Any], parts: Sequence[Sequence[int]]) -> bool:
    """Let *outputs* have the numbers of *parts*, where all of them fit; return whether they do."""
    sizes = [len(part) for part in parts]
    if [one.numel() for one in outputs] != sizes or any(one.is_floating_point() for one in outputs):
        return False
    with stated.numbers.really():
        real = [
            makers().tensor(part, dtype=tensor.dtype).reshape(tensor.shape)
            for tensor, part in zip(outputs, parts, strict=True)
        ]
    stated.forget(outputs)
    return stated.numbers.fill(outputs, real, is_shared=False)
