"""Nested tensors of jagged layout: rows of many lengths one behind the other, and where each of them ends.

What ``torch.nested`` does with them is done with their parts, which are fake tensors. Here is what it asks
elsewhere: the size that stands for all lengths, and which kernel of attention a GPU would take.
"""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

from typing import Any, Final

from tracer.rehearse import attention
from tracer.rehearse.errors import RehearsalError
from tracer.rehearse.libraries import when_imported

STRIDED: Final = (
    "nested tensors of strided layout are not rehearsed: make them with layout=torch.jagged, as "
    "torch.nested.nested_tensor(rows, layout=torch.jagged)"
)
"""What a script is told that makes nested tensors of the old kind."""

OVER_SCORES: Final = (
    "attention of nested tensors that goes over all scores is not rehearsed: give it fp16 or bf16, and heads "
    f"of {attention.WIDEST} at most"
)
"""What a script is told whose attention no fused kernel takes."""


def install() -> list[Any]:
    """Put everything in place as it is imported; return what has to be kept alive."""
    _layouts()
    return [
        *when_imported("torch.nested._internal.nested_tensor", _sizes),
        *when_imported("torch.nested._internal.sdpa", _attention),
    ]


def _layouts() -> None:
    """End where a nested tensor of strided layout is made: its sizes are in memory."""
    import torch

    anywhere: Any = torch.nested
    for name in ("nested_tensor", "as_nested_tensor"):
        original = getattr(anywhere, name)

        def made(ts: Any, *args: Any, original: Any = original, **kwargs: Any) -> Any:
            is_jagged = kwargs.get("layout") is torch.jagged
            if not is_jagged and not (isinstance(ts, torch.Tensor) and ts.is_nested):
                raise RehearsalError(STRIDED)
            return original(ts, *args, **kwargs)

        setattr(anywhere, name, made)


def _sizes(module: Any) -> None:
    """Let each tensor of ends have a size of its own that stands for its lengths, as real ones have."""
    import torch
    from torch.nested._internal.nested_int import NestedIntNode

    known = module._tensor_symint_registry

    def size_of(tensor: Any, *, coeff: int = 1) -> Any:
        if tensor not in known:
            known[tensor] = torch.SymInt(NestedIntNode(module._tensor_id_counter, coeff))
            module._tensor_id_counter += 1
        return known[tensor]

    module.get_tensor_symint = size_of


def _attention(module: Any) -> None:
    """Let attention take the kernel that a GPU would: flash in half precision, else memory-efficient."""
    import torch
    from torch.nn.attention import SDPBackend

    kernels = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}

    def select(query: Any, key: Any, value: Any, mask: Any, *args: Any) -> Any:
        del args
        found = kernels.get(attention.chosen(torch, query, key, value, mask))
        if found is None:
            raise RehearsalError(OVER_SCORES)
        return found

    module._select_sdp_backend = select
