"""How much a rank sends to each other rank of an all-to-all, and gets from it.

Pure functions of an operator's arguments; importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from foretrace.tracer.operators import tensor_bytes


class Splits(NamedTuple):
    """Bytes of an all-to-all by place in the group, both empty if it is even.

    Attributes:
        sent: to each rank, itself included.
        received: from each.
    """

    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()


EVEN: Final = Splits()
"""Those of an all-to-all that sends as much to each, and of every other collective."""


class Exchange(NamedTuple):
    """What one rank hands to an all-to-all.

    Attributes:
        filled: what comes, a tensor or one from each rank.
        source: what is sent, a tensor or one for each rank.
        rows_out: rows of *filled* from each rank; empty or None: as many from each.
        rows_in: rows of *source* for each rank, in the same way.
    """

    filled: Any
    source: Any
    rows_out: Sequence[int] | None = None
    rows_in: Sequence[int] | None = None

    def splits(self, n_ranks: int) -> Splits:
        """Return the bytes among *n_ranks*.

        >>> Exchange([], []).splits(2)
        Splits(sent=(), received=())
        """
        sent = _sizes(self.source, n_ranks, self.rows_in)
        received = _sizes(self.filled, n_ranks, self.rows_out)
        return Splits(sent, received) if len({*sent, *received}) > 1 else EVEN


def exchange_of(name: str, args: Sequence[Any], out: Any = None) -> Exchange | None:
    """Return the all-to-all that a call of the operator *name* is, None if it is another collective.

    Args:
        name: without its namespace.
        args: its arguments.
        out: what it has made, where it fills nothing that is there.
    """
    if name == "alltoall_base_":
        return Exchange(args[0], args[1], args[3], args[4])
    if name == "alltoall_":
        return Exchange(args[0], args[1])
    return Exchange(out, args[0], args[1], args[2]) if name == "all_to_all_single" else None


def _sizes(tensors: Any, n_ranks: int, rows: Sequence[int] | None) -> tuple[int, ...]:
    """Return the bytes of each part of *tensors*."""
    if isinstance(tensors, list | tuple):
        return tuple(map(tensor_bytes, tensors))
    whole = tensor_bytes(tensors)
    if not rows:
        return (whole // n_ranks,) * n_ranks
    width = whole // max(int(tensors.shape[0]), 1)
    return tuple(int(n) * width for n in rows)
