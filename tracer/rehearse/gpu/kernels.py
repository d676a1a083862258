"""Operators whose kernels differ between CUDA and the CPU: RMSNorm, dropout, recurrent layers.

``dropout`` chooses by the device: ``is_fused_kernel_acceptable`` in ATen/native/Dropout.cpp takes
``native_dropout`` on CUDA: one kernel that writes a mask of bytes, and one in the backward that reads it. The
CPU creates a mask in the dtype of the input and multiplies by it.
"""

from __future__ import annotations

import itertools
from typing import Any

from foretrace.tracer.internals import makers


def install() -> list[Any]:
    """Replace the kernels; return objects that must be kept alive."""
    return [_norms(), _dropout(), _recurrence(), _padding()]


def _norms() -> Any:
    """Make RMSNorm one fused kernel, as on CUDA. On the CPU it would be several operators."""
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
    """Make dropout ``native_dropout``, also in inference mode, where it is not decomposed first."""
    import torch

    def dropout(x: Any, p: float, train: bool) -> Any:  # noqa: FBT001 - as it is called
        return torch.ops.aten.native_dropout(x, p, train)[0] if train and p and x.numel() else x

    library: Any = torch.library.Library("aten", "IMPL")
    library.impl("dropout", dropout, "AutogradCPU")
    whole = torch._C.DispatchKey.CompositeImplicitAutograd  # noqa: SLF001 - has no public name
    torch.ops.aten.dropout.default.py_kernels[whole] = dropout
    return library


def _recurrence() -> Any:
    """Make an LSTM layer save four gates and a cell per token for its backward: by itself it saves none.

    cuDNN does not document how much it reserves: this is the least that a backward needs.
    """
    import torch

    def layer(x: Any, *rest: Any) -> Any:
        hidden, cell, width, trains = rest[4], rest[5], rest[9], rest[14]  # arguments after four weights
        out, kept = (x.new_empty((*x.shape[:2], n)) for n in (width, 5 * width if trains else 0))
        return out, torch.empty_like(hidden), torch.empty_like(cell), kept

    library: Any = torch.library.Library("aten", "IMPL")
    torch.library._impls.discard("aten/mkldnn_rnn_layer/Meta")  # noqa: SLF001 - allow_override, in torch 2.6, too
    library.impl("mkldnn_rnn_layer", layer, "Meta")
    return library


def _padding() -> Any:
    """Pad packed sequences by copies: one for all steps that have the same number of sequences.

    PyTorch writes the lengths to a tensor that it creates itself, which would be a fake one.
    """
    import torch

    def pad(rows: Any, sizes: Any, batch_first: bool, value: float, total: int) -> Any:  # noqa: FBT001
        at_each = sizes.tolist()
        n_steps = total if total > 0 else len(at_each)
        out, at, step = rows.new_full((n_steps, at_each[0], *rows.shape[1:]), value), 0, 0
        for n, group in itertools.groupby(at_each):
            length = len(list(group))
            part = rows[at : at + n * length].view(length, n, *rows.shape[1:])
            out[step : step + length, :n] = part
            at, step = at + n * length, step + length
        lengths = makers().tensor([sum(n > i for n in at_each) for i in range(at_each[0])])
        return out.transpose(0, 1) if batch_first else out, lengths

    library: Any = torch.library.Library("aten", "IMPL")
    library.impl("_pad_packed_sequence", pad, "AutogradCPU")
    return library
