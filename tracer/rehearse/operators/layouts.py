"""Conversions of memory layout that cuDNN makes around convolutions on tensor cores, as work of their own.

Tensor cores take pictures with channels innermost (NHWC). Of operands in PyTorch's default layout, channels
outermost, cuDNN makes copies before each product (``nchwToNhwcKernel``), and of its result after it
(``nhwcToNchwKernel``), forward and backward. How often each runs: tensorflow/tensorflow issue 15897, the
comparison of kernels in KernelEvolve (arXiv:2512.23236), and 24 pairs of training steps that differ in
nothing but the layout (benchmarks/tables/rehearsed_times.toml).
"""

from __future__ import annotations

from math import prod
from typing import Any, Final

from tracer.operators import tensor_bytes
from tracer.rehearse.operators.calls import Call, tensors_in
from tracer.rehearse.operators.work import Work, dtype_of, shapes_of
from traces.rehearsal import CONVERSION

ON_TENSOR_CORES: Final = ("bf16", "fp16", "tf32")
"""Types of operands, where a GPU has tensor cores for them."""


def conversion(call: Call, dtype: str) -> Work | None:
    """Return the copies made for the convolution *call*, which computes in *dtype*; None if there are none.

    Depthwise ones have kernels of their own, which take either layout.
    """
    named = call.named
    data, weight = named["input"], named["weight"]
    is_depthwise = int(named.get("groups", 1)) == data.shape[1]
    if dtype not in ON_TENSOR_CORES or is_depthwise:
        return None
    is_last = _asks_for_last(data) or _asks_for_last(weight)  # what one of them says holds for all
    copied: list[Any] = []
    for operands, result in _products(call):
        copied += [tensor for tensor in operands if not _is_last(tensor)]
        copied += [] if is_last or _is_alike(result) else [result]
    if not copied:
        return None
    moved = 2 * sum(map(tensor_bytes, copied))
    return Work(CONVERSION, "memory", shapes_of(call), dtype, 0, moved, kernels=len(copied))


def _products(call: Call) -> list[tuple[tuple[Any, Any], Any]]:
    """Return operands and result of each product of a convolution; a gradient is as what it is of."""
    named = call.named
    data, weight, given = named["input"], named["weight"], named.get("grad_output")
    if given is None:
        return [((data, weight), next(iter(tensors_in(call.out))))]
    asked = named["output_mask"]
    both = [((given, weight), data), ((data, given), weight)]
    return [product for product, is_asked in zip(both, asked[:2], strict=True) if is_asked]


def _is_alike(tensor: Any) -> bool:
    """Whether *tensor* is the same in both layouts: it has one channel, or one place."""
    return bool(tensor.shape[1] == 1 or prod(tensor.shape[2:]) == 1)


def _is_last(tensor: Any) -> bool:
    """Whether the channels of *tensor* are innermost."""
    return bool(tensor.stride(1) == 1) or _is_alike(tensor)


def _asks_for_last(tensor: Any) -> bool:
    """Whether PyTorch takes *tensor* for one with channels innermost, also where it is the same in both."""
    return bool(tensor.stride(1) == 1 and tensor.shape[1] > 1 and tensor.stride(-1) >= tensor.shape[1])


def type_of(call: Call) -> str:
    """Return the type of the operands of *call*."""
    return dtype_of([call.named["input"]])
