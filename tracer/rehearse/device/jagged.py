"""Nested tensors with jagged layout: packed rows of different lengths, and the offset at which each ends.

``torch.nested`` works on their components, which are fake tensors. This module replaces what it needs
besides: the symbolic size that represents all lengths.
"""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from foretrace.tracer import internals
from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.replacing import replaces, when_imported

STRIDED: Final = (
    "nested tensors of strided layout cannot be rehearsed: create them with layout=torch.jagged, as in "
    "torch.nested.nested_tensor(rows, layout=torch.jagged)"
)
"""Error for nested tensors with strided layout."""


def install() -> None:
    """Change ``torch.nested`` once it is imported."""
    _layouts()
    when_imported(internals.NESTED, _sizes)


def of_parts(tensor: Any, rows: Callable[[Any], Any], ends: Callable[[Any], Any]) -> Any:
    """Return a nested tensor like *tensor*, with rows of the same lengths, from other components.

    Raises:
        RehearsalError: it has strided layout.
    """
    import torch

    if tensor.layout is not torch.jagged:
        raise RehearsalError(STRIDED)
    with internals.without_fakes():
        known = {"min_seqlen": tensor._maybe_min_seqlen, "max_seqlen": tensor._maybe_max_seqlen}
        values = tensor.values() if tensor.requires_grad else tensor._values.detach()
        found = [None if one is None else one.detach() for one in (tensor._offsets, tensor._lengths)]
    offsets, lengths = (None if one is None else ends(one) for one in found)
    for old, new in zip((tensor._offsets, tensor._lengths), (offsets, lengths), strict=True):
        if new is not None and (size := getattr(old, "nested_int_memo", None)) is not None:
            new.nested_int_memo = size  # rows have the same lengths: torch does this for copies too
    return torch.nested.nested_tensor_from_jagged(
        rows(values), offsets, lengths, jagged_dim=tensor._ragged_idx, **known
    )


def _layouts() -> None:
    """Refuse to create a nested tensor with strided layout: its sizes are in memory that does not exist."""
    import torch

    def made(original: Any, ts: Any, *args: Any, **kwargs: Any) -> Any:
        is_jagged = kwargs.get("layout") is torch.jagged
        if not is_jagged and not (isinstance(ts, torch.Tensor) and ts.is_nested):
            raise RehearsalError(STRIDED)
        return original(ts, *args, **kwargs)

    for name in ("nested_tensor", "as_nested_tensor"):
        replaces(torch.nested, name=name)(made)


def _sizes(module: Any) -> None:
    """Give each tensor of offsets its own symbolic size for its lengths, as real ones have."""
    import torch

    NestedIntNode = internals.nested_int()  # noqa: N806 - a class

    known = module._tensor_symint_registry

    def size_of(tensor: Any, *, coeff: int = 1) -> Any:
        if tensor not in known:
            size = getattr(tensor, "nested_int_memo", None)  # of copied offsets (to_copy_default)
            if size is None:
                size = torch.SymInt(NestedIntNode(module._tensor_id_counter, coeff))
                module._tensor_id_counter += 1
            known[tensor] = tensor.nested_int_memo = size
        return known[tensor]

    module.get_tensor_symint = size_of
