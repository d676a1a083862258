"""Numbers that are held of a storage, and how a tensor that looks at it sees them."""
# ruff: noqa: SLF001 - torch has no public name for a negative view

from __future__ import annotations

from typing import Any, NamedTuple


class Held(NamedTuple):
    """The numbers of a storage.

    Attributes:
        numbers: its elements; shape ``(n,)``, a ``Constant`` or a ``Range``.
        is_shared: whether they came from other ranks, which are taken to have what this one has.
        storage: a weak reference to the storage, which takes the entry along when it goes.
    """

    numbers: Any
    is_shared: bool
    storage: Any


def is_seen_as(held: Any, asked: Any) -> bool:
    """Whether elements of the dtype *held* are what a tensor of the dtype *asked* sees.

    A complex number is seen as its two parts, and two parts as a complex number; no other bits are read.
    """
    if held == asked:
        return True
    return bool(held.is_complex != asked.is_complex and held.to_real() == asked.to_real())


def seen(numbers: Any, tensor: Any) -> Any:
    """Return real *numbers*, all of a storage, as the fake *tensor* sees them: a view, written through."""
    flat = numbers if numbers.dtype == tensor.dtype else numbers.view(tensor.dtype)
    found = flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    found = found.conj() if tensor.is_conj() else found
    return found._neg_view() if tensor.is_neg() else found
