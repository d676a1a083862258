"""The known numbers of a storage, and how a tensor that views the storage sees them."""
# ruff: noqa: SLF001 - torch has no public name for a negative view

from __future__ import annotations

from typing import Any, NamedTuple


class Held(NamedTuple):
    """The numbers of a storage.

    Attributes:
        numbers: its elements; shape ``(n,)``, a ``Constant`` or a ``Range``.
        is_shared: whether they came from other ranks, which are assumed to have the same numbers as this one.
        storage: a weak reference to the storage; the entry is removed with it.
    """

    numbers: Any
    is_shared: bool
    storage: Any


def is_seen_as(held: Any, asked: Any) -> bool:
    """Whether a tensor of dtype *asked* can view elements of dtype *held*.

    A complex number can be viewed as its two parts, and two parts as a complex number; nothing else can.
    """
    if held == asked:
        return True
    return bool(held.is_complex != asked.is_complex and held.to_real() == asked.to_real())


def seen(numbers: Any, tensor: Any) -> Any:
    """Return the real *numbers* of a whole storage as the fake *tensor* views them, without a copy."""
    flat = numbers if numbers.dtype == tensor.dtype else numbers.view(tensor.dtype)
    found = flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    found = found.conj() if tensor.is_conj() else found
    return found._neg_view() if tensor.is_neg() else found
