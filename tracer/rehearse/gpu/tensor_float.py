"""fp32 products that a GPU computes in TensorFloat-32 on its tensor cores, by the settings of PyTorch.

Convolutions and recurrent layers do so unless the script forbids it (``torch.backends.cudnn.allow_tf32``).
Matrix products do so if the script requests it (``torch.backends.cuda.matmul.allow_tf32``,
``torch.set_float32_matmul_precision``). Operands stay in fp32: bytes, memory and messages do not change.
"""
# ruff: noqa: SLF001 - what PyTorch is told of precision has no public name that all versions share

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from foretrace.tracer.rehearse.operators.work import Work

NAME: Final = "tf32"
"""Dtype of a product whose fp32 operands are rounded to TensorFloat-32 when they are read."""

ROLES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "aten.convolution": "conv",
        "aten.convolution_backward": "conv",
        "aten._cudnn_rnn": "rnn",
        "aten._cudnn_rnn_backward": "rnn",
        **dict.fromkeys(
            ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._euclidean_dist"), "matmul"
        ),
    }
)
"""The name under which PyTorch keeps the precision of an operator: two for cuDNN, one for cuBLAS."""


def is_asked(name: str) -> bool:
    """Whether the operator *name* computes in TensorFloat-32 under the present settings."""
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
    """Return *work* with the dtype in which it is computed; ``is_asked`` holds for its operator."""
    return work._replace(dtype=NAME) if work.dtype == "fp32" else work


def type_of(dtype: str, name: str) -> str:
    """Return the dtype in which the operator *name* computes on operands in *dtype*."""
    return NAME if dtype == "fp32" and is_asked(name) else dtype
