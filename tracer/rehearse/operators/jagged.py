"""Nested tensors of jagged layout: rows of many lengths one behind the other, and where each of them ends.

What ``torch.nested`` does with them is done with their parts, which are fake tensors. Here is what it asks
elsewhere: the size that stands for all lengths, and which kernel of attention a GPU would take.
"""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from tracer.rehearse.errors import RehearsalError
from tracer.rehearse.gpu import attention
from tracer.rehearse.script.libraries import when_imported

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


def of_parts(tensor: Any, rows: Callable[[Any], Any], ends: Callable[[Any], Any]) -> Any:
    """Return a nested tensor like *tensor*, with as long rows, of other parts.

    Args:
        tensor: nested, real or of fake parts.
        rows: returns what takes the place of the rows, one behind the other.
        ends: does so for where each row ends, and for its length where they have gaps.

    Raises:
        RehearsalError: it is of strided layout.
    """
    import torch
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    if tensor.layout is not torch.jagged:
        raise RehearsalError(STRIDED)
    with unset_fake_temporarily():
        known = {"min_seqlen": tensor._maybe_min_seqlen, "max_seqlen": tensor._maybe_max_seqlen}
        values = tensor.values() if tensor.requires_grad else tensor._values.detach()
        found = [None if one is None else one.detach() for one in (tensor._offsets, tensor._lengths)]
    offsets, lengths = (None if one is None else ends(one) for one in found)
    for old, new in zip((tensor._offsets, tensor._lengths), (offsets, lengths), strict=True):
        if new is not None and (size := getattr(old, "nested_int_memo", None)) is not None:
            new.nested_int_memo = size  # rows are as long: torch does so where it copies one
    return torch.nested.nested_tensor_from_jagged(
        rows(values), offsets, lengths, jagged_dim=tensor._ragged_idx, **known
    )


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
            size = getattr(tensor, "nested_int_memo", None)  # of ends that have been copied (to_copy_default)
            if size is None:
                size = torch.SymInt(NestedIntNode(module._tensor_id_counter, coeff))
                module._tensor_id_counter += 1
            known[tensor] = tensor.nested_int_memo = size
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
