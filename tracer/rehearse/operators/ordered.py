"""Whether an element-wise kernel goes through memory in order, or computes the address of each element.

ATen's element-wise kernels load several elements at once where all operands and results have the same shape
and strides and no gaps. Otherwise (a mask that is broadcast, a transposed operand that is copied) each
element is addressed on its own (``launch_legacy_kernel`` and ``OffsetCalculator`` in
aten/src/ATen/native/cuda/CUDALoops.cuh).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Final

from foretrace.tracer.rehearse.operators.calls import tensors_in

COPIES: Final = frozenset({"aten.copy_", "aten._to_copy", "aten.masked_fill", "aten.masked_fill_"})
"""Element-wise operators that torch does not tag as such."""


def is_elementwise(name: str, func: Any) -> bool:
    """Return whether the operator *name* works on each element alone, in one of ATen's kernels."""
    from torch import Tag

    return name in COPIES or (name.startswith("aten.") and Tag.pointwise in func.tags)


def unordered(args: Any, out: Any) -> int:
    """Return how many elements are addressed one by one, 0 if operands and results are in the same order.

    A tensor without dimensions is a number. Of sparse tensors nothing is known.
    """
    results = tensors_in(out)
    tensors = [one for one in (*tensors_in(args), *results) if one.dim()]
    if not results or not tensors or not all(map(_is_strided, tensors)):
        return 0
    is_alike = len({_order(one) for one in tensors}) == 1
    return 0 if is_alike and _is_dense(tensors[0]) else int(results[0].numel())


def strides_of(values: Any) -> tuple[tuple[int, ...], ...]:
    """Return the strides of the tensors in *values*; none of a sparse one."""
    return tuple(one.stride() if _is_strided(one) else () for one in tensors_in(values))


def _is_strided(tensor: Any) -> bool:
    return str(tensor.layout) == "torch.strided"


def _order(tensor: Any) -> tuple[tuple[int, int], ...]:
    """Return sizes and strides; a dimension of one element has no stride."""
    return tuple(
        (int(size), int(stride) if size > 1 else 0)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _is_dense(tensor: Any) -> bool:
    """Whether *tensor* has no gaps between its elements, nor several in one place."""
    return bool(_end(tensor.shape, tensor.stride()) == prod(tensor.shape))


def _end(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the elements of memory from the first to the last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
