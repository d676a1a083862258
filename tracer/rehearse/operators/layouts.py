"""The copies between memory layouts that cuDNN makes around convolutions on tensor cores.

Tensor cores need images with channels innermost (NHWC). For operands in PyTorch's default layout, channels
outermost, cuDNN copies each operand before a product (``nchwToNhwcKernel``) and the result after it
(``nhwcToNchwKernel``), forward and backward. Sources for how often each copy runs: tensorflow/tensorflow
issue 15897, the comparison of kernels in KernelEvolve (arXiv:2512.23236), and 24 pairs of training steps that
differ only in the layout (benchmarks/tables/rehearsed_times.toml).
"""

from __future__ import annotations

from math import prod
from typing import Any, Final

from foretrace.tracer.operators import tensor_bytes
from foretrace.tracer.rehearse.operators.calls import Call, tensors_in
from foretrace.tracer.rehearse.operators.work import Work, dtype_of, shapes_of
from foretrace.traces.rehearsal import CONVERSION

ON_TENSOR_CORES: Final = ("bf16", "fp16", "tf32")
"""Dtypes of operands for which GPUs have tensor cores."""


def conversion(call: Call, dtype: str) -> Work | None:
    """Return the work of the copies around the convolution *call* in *dtype*; None if there are none.

    Depthwise convolutions have their own kernels, which accept both layouts.
    """
    named = call.named
    data, weight = named["input"], named["weight"]
    is_depthwise = int(named.get("groups", 1)) == data.shape[1]
    if dtype not in ON_TENSOR_CORES or is_depthwise:
        return None
    is_last = _asks_for_last(data) or _asks_for_last(weight)  # one operand decides for all
    copied: list[Any] = []
    for operands, result in _products(call):
        copied += [tensor for tensor in operands if not _is_last(tensor)]
        copied += [] if is_last or _is_alike(result) else [result]
    if not copied:
        return None
    moved = 2 * sum(map(tensor_bytes, copied))
    return Work(CONVERSION, "memory", shapes_of(call), dtype, 0, moved, kernels=len(copied))


def _products(call: Call) -> list[tuple[tuple[Any, Any], Any]]:
    """Return operands and result of each product; a gradient has the layout of its tensor."""
    named = call.named
    data, weight, given = named["input"], named["weight"], named.get("grad_output")
    if given is None:
        return [((data, weight), next(iter(tensors_in(call.out))))]
    asked = named["output_mask"]
    both = [((given, weight), data), ((data, given), weight)]
    return [product for product, is_asked in zip(both, asked[:2], strict=True) if is_asked]


def _is_alike(tensor: Any) -> bool:
    """Whether *tensor* is the same in both layouts: it has one channel, or one pixel."""
    return bool(tensor.shape[1] == 1 or prod(tensor.shape[2:]) == 1)


def _is_last(tensor: Any) -> bool:
    """Whether the channels of *tensor* are innermost."""
    return bool(tensor.stride(1) == 1) or _is_alike(tensor)


def _asks_for_last(tensor: Any) -> bool:
    """Whether PyTorch treats *tensor* as having its channels innermost, even if both layouts are the same."""
    return bool(tensor.stride(1) == 1 and tensor.shape[1] > 1 and tensor.stride(-1) >= tensor.shape[1])


def type_of(call: Call) -> str:
    """Return the dtype of the operands of *call*."""
    return dtype_of([call.named["input"]])
