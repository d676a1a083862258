"""Elements given by a rule, a constant or a range: none is created before it is read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from foretrace.tracer.internals import makers
from foretrace.tracer.rehearse.values.computed import BLANK, FILLS


class Constant(NamedTuple):
    """Elements that are all the same, created when they are read: most are optimizer states and gradients.

    Attributes:
        fill: what each of them is.
        n_elements: how many there are.
        dtype: of the elements.
    """

    fill: float
    n_elements: int
    dtype: Any

    def part(self, view: Any) -> Any:
        """Return the elements that *view* has, as one element that is seen as all of them."""
        return makers().full((), self.fill, dtype=self.dtype).expand(view.shape)


class Range(NamedTuple):
    """The result of ``torch.arange`` of integers: positions in a text, too many to create, few of them read.

    Attributes:
        start: the first element.
        step: from each element to the next.
        dtype: of the elements.
    """

    start: int
    step: int
    dtype: Any

    @classmethod
    def made_by(cls, args: Sequence[Any], dtype: Any) -> Range | None:
        """Return what an operator makes of *args*: an end; a start, an end, a step. None of fractions."""
        if not all(type(value) is int for value in args):
            return None
        return cls(args[0] if len(args) > 1 else 0, args[2] if len(args) > 2 else 1, dtype)

    def part(self, tensor: Any) -> Any:
        """Return the elements of *tensor*, a view of the storage of all, as a real one of its shape."""
        places = makers().tensor(tensor.storage_offset())
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            places = places.unsqueeze(-1) + makers().arange(size) * stride
        return (self.start + places * self.step).to(self.dtype)

    def picked(self, tensor: Any, indices: Sequence[Any]) -> Any | None:
        """Return the elements of *tensor*, a row, at real *indices*, negative ones from its end.

        None if it is no row, or they are truths or not among its places.
        """
        import torch

        (places, *others), size = indices, tensor.numel()
        if others or tensor.dim() != 1 or places.dtype in {torch.bool, torch.uint8}:
            return None
        places = torch.where(places < 0, places + size, places)
        if bool(((places < 0) | (places >= size)).any()):
            return None
        at = tensor.storage_offset() + places * tensor.stride(0)
        return (self.start + at * self.step).to(self.dtype)


class Data(NamedTuple):
    """Elements that a real tensor has, as of a file: too many to copy, few of them read at once.

    Attributes:
        whole: the elements of its storage, in memory that is not the rehearsal's.
    """

    whole: Any

    @property
    def dtype(self) -> Any:
        """Their dtype."""
        return self.whole.dtype

    def part(self, tensor: Any) -> Any:
        """Return the elements of *tensor*, a view of the storage of all, as a real one of its shape."""
        return self.whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).clone()


def is_rule(numbers: Any, most: int) -> bool:
    """Whether *numbers* are given by a rule, or elsewhere, and are too many to create, more than *most*."""
    return type(numbers) in {Range, Data} or (type(numbers) is Constant and numbers.n_elements > most)


def filled(name: str, args: Sequence[Any], result: Any) -> Constant | None:
    """Return the elements of the storage of *result*, filled by the operator *name*, called with *args*.

    None if they are unknown, or if *result* is only a part of the storage.
    """
    n_bytes, element_bytes = result.untyped_storage().nbytes(), result.element_size()
    if name in BLANK:
        is_whole = not (result.dtype.is_floating_point or result.dtype.is_complex)
        return Constant(0, n_bytes // element_bytes, result.dtype) if is_whole else None
    at, fill = FILLS[name]
    fill = args[at] if fill is None else fill
    if not isinstance(fill, int | float) or math.isnan(fill) or n_bytes != result.numel() * element_bytes:
        return None
    return Constant(fill, result.numel(), result.dtype)
