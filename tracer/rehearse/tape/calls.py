"""A call of an operator, and the tensors in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from foretrace.tracer import internals
from foretrace.tracer.operators import tensor_bytes

Kernel = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Handles a call of an operator: takes the operator, its arguments and those by name."""


class Call(NamedTuple):
    """A call of an operator."""

    name: str  # of the operator without its overload, e.g. ``"aten.mm"``
    args: Sequence[Any]  # positional arguments
    named: Mapping[str, Any]  # arguments by name, positional ones included
    out: Any  # what it returned
    # where the rows of each expert end; or the bounds of the sequences of queries, then of keys; empty if
    # unknown
    ends: Sequence[int] = ()


def tensors_in(values: Any) -> list[Any]:
    """Return the tensors in arguments or results, lists included."""
    if hasattr(values, "element_size") and hasattr(values, "shape"):  # a storage has no shape
        return [values]
    if isinstance(values, list | tuple):
        return [tensor for value in values for tensor in tensors_in(value)]
    if isinstance(values, dict):
        return [tensor for value in values.values() for tensor in tensors_in(value)]
    return []


def parts_of(tensor: Any) -> list[Any]:
    """Return the plain tensors of which a *tensor* of another type is made, as a DTensor; else it itself.

    Such a tensor has a storage of its own by name only: the memory is that of its parts.
    """
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    inside = tensors_in([getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]])
    return [part for one in inside for part in parts_of(one)]


def total_bytes(tensors: Iterable[Any]) -> int:
    """Return the size of all *tensors*."""
    return sum(map(tensor_bytes, tensors))


def is_wrapped(tensor: Any) -> bool:
    """Whether *tensor* belongs to a transform of ``torch.func``, and has no memory of its own."""
    return internals.is_wrapped(tensor)


def storage_key(tensor: Any) -> int:
    """Return a number that identifies the storage of *tensor* as long as it exists, -1 if it has none."""
    try:
        return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - tells storages apart
    except (RuntimeError, NotImplementedError, AttributeError):
        return -1


def is_in_part(name: str, tensor: Any) -> bool:
    """Whether the operator *name* writes *tensor* in place, and it is only a part of its storage."""
    written = tensor.numel() * tensor.element_size()
    return name.endswith("_") and bool(tensor.untyped_storage().nbytes() != written)
