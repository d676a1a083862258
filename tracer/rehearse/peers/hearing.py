"""Integers that one rank sends to another in tensors: the sender writes them, the receiver reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foretrace.tracer.internals import makers
from foretrace.tracer.rehearse.peers.letters import ALL, MOST_NUMBERS, Address

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.values.stated import Stated


def leave(stated: Stated, address: Address, tensor: Any) -> None:
    """Write the numbers of *tensor*, which is sent to *address*, for other ranks, if they are few.

    Numbers that other ranks are only assumed to have sent are not written.
    """
    if tensor.is_floating_point() or tensor.numel() > MOST_NUMBERS or stated.numbers.is_shared(tensor):
        return
    own = stated.numbers.of(tensor)
    if own is not None:
        with stated.numbers.really():
            stated.letters.leave(address, own.flatten().tolist())


def arrive(stated: Stated, address: Address, tensor: Any) -> None:
    """Give *tensor* the numbers that were sent to *address*, if the sender has been rehearsed.

    If the sender will not be rehearsed, it gets those of a similar transfer.
    """
    letters = stated.letters
    found = letters.read(address)
    is_like, is_awaited = found is None, found is None and address.sender in letters.coming
    if found is None and not is_awaited:
        found = letters.alike(address)
    if found is not None and len(found) == tensor.numel():
        with stated.numbers.really():
            real = makers().tensor(found, dtype=tensor.dtype).reshape(tensor.shape)
        if stated.numbers.write_part(tensor, real):
            return
        stated.forget([tensor])
        if stated.numbers.fill([tensor], real, is_shared=is_like):
            return
    if is_awaited or address.receiver != ALL:
        stated.is_from(address.sender, tensor)
