"""Operators for which CUDA has one kernel, and the processor several: a norm, and what drops.

``dropout`` chooses by the device: ``is_fused_kernel_acceptable`` in ATen/native/Dropout.cpp takes
``native_dropout`` on CUDA, one kernel with a mask of bytes, which the backward takes again in one kernel; the
processor draws a mask in the type of its input and multiplies by it.
"""

from __future__ import annotations

from typing import Any


def install() -> list[Any]:
    """Put everything in place; return what has to be kept alive."""
    return [_norms(), _dropout()]


def _norms() -> Any:
    """Let RMSNorm be the fused kernel that it is on CUDA; on the processor it would fall into its parts."""
    import torch

    def forward(x: Any, shape: Any, weight: Any, eps: Any) -> Any:
        del shape, weight, eps
        return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)

    def backward(grad: Any, x: Any, *rest: Any) -> Any:
        del grad
        weight = rest[2]  # after shape and rstd
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)

    library: Any = torch.library.Library("aten", "IMPL")
    library.impl("_fused_rms_norm", forward, "CPU")
    library.impl("_fused_rms_norm_backward", backward, "CPU")
    return library


def _dropout() -> Any:
    """Let dropout be ``native_dropout``, also in inference mode, where it arrives whole."""
    import torch

    def dropout(x: Any, p: float, train: bool) -> Any:  # noqa: FBT001 - as it is called
        return torch.ops.aten.native_dropout(x, p, train)[0] if train and p and x.numel() else x

    library: Any = torch.library.Library("aten", "IMPL")
    library.impl("dropout", dropout, "AutogradCPU")
    whole = torch._C.DispatchKey.CompositeImplicitAutograd  # noqa: SLF001 - has no public name
    torch.ops.aten.dropout.default.py_kernels[whole] = dropout
    return library
