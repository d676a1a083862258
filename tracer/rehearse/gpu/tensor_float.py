"""Products of fp32 that a GPU computes in TensorFloat-32, on tensor cores, as PyTorch is told.

Convolutions and recurrent layers do unless a script forbids it (``torch.backends.cudnn.allow_tf32``), matrix
products where it asks for it (``torch.backends.cuda.matmul.allow_tf32``,
``torch.set_float32_matmul_precision``). Operands stay in fp32: bytes, memory and messages are the same.
"""
# ruff: noqa: SLF001 - what PyTorch is told of precision has no public name that all versions share

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from tracer.rehearse.operators.work import Work

NAME: Final = "tf32"
"""Type of a product whose operands are in fp32 and are rounded to TensorFloat-32 as they are read."""

ROLES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "aten.convolution": "conv",
        "aten.convolution_backward": "conv",
        "aten.mkldnn_rnn_layer": "rnn",
        "aten.mkldnn_rnn_layer_backward": "rnn",
        **dict.fromkeys(
            ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._euclidean_dist"), "matmul"
        ),
    }
)
"""What the precision of an operator is asked for under: those of cuDNN and of cuBLAS."""


def is_asked(name: str) -> bool:
    """Whether the operator *name* computes in TensorFloat-32 at this point of the script."""
    role = ROLES.get(name)
    return role is not None and _is_allowed(role)


def _is_allowed(role: str) -> bool:
    import torch

    told = getattr(torch._C, "_get_fp32_precision_getter", None)  # torch 2.9 and newer
    if told is not None:
        return bool(told("cuda", role) == NAME)
    if role == "matmul":
        return bool(torch._C._get_cublas_allow_tf32())
    return bool(torch._C._get_cudnn_allow_tf32())


def rounded(work: Work) -> Work:
    """Return *work*, of an operator for which ``is_asked`` holds, in the type that it is computed in."""
    return work._replace(dtype=NAME) if work.dtype == "fp32" else work


def type_of(dtype: str, name: str) -> str:
    """Return the type that the operator *name* computes in, of operands in *dtype*."""
    return NAME if dtype == "fp32" and is_asked(name) else dtype
