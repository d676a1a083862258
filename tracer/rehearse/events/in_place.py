"""Gradients that torch writes into zeros in place, but not while somebody watches operators.

Where a mode or a subclass may see an operator, some formulas of autograd take its variant out of place: there
are two tensors for a moment where a real run has one (``areAnyTensorSubclassLike`` and
``isTensorSubclassLike`` in torch/csrc/autograd/FunctionsManual.cpp, and in ``gather_backward``,
``index_select_backward`` and ``value_selecting_reduction_backward`` of ATen).
"""
# ruff: noqa: SLF001 - only autograd's engine knows which node it computes

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

NODES: Final = frozenset(
    {
        *("IndexBackward0", "IndexSelectBackward0", "GatherBackward0", "TakeBackward0"),
        *("MaxBackward0", "MinBackward0", "TopkBackward0", "SortBackward0", "SortBackward1"),
        *("KthvalueBackward0", "ModeBackward0", "MedianBackward1", "NanmedianBackward1"),
        *("CummaxBackward0", "CumminBackward0"),
    }
)
"""Nodes of autograd that write a gradient into zeros of their own."""


def variants() -> dict[Any, Any]:
    """Return operators that write into a copy of their first operand, and those that write into it."""
    import torch

    aten = torch.ops.aten
    return {
        aten.index_put.default: aten.index_put_.default,
        aten.index_add.default: aten.index_add_.default,
        aten.scatter.src: aten.scatter_.src,
        aten.scatter_add.default: aten.scatter_add_.default,
        aten.put.default: aten.put_.default,
    }


def writing(handler: Callable[..., Any], variant: Any, into: Callable[..., Any]) -> Callable[..., Any]:
    """Return *handler*, which leaves the work to *into*, that of the *variant* in place, where torch does."""
    import torch

    node_of = torch._C._current_autograd_node

    def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        node = node_of()
        if node is None or node.name() not in NODES:
            return handler(func, args, kwargs)
        into(variant, args, kwargs)
        return args[0]

    return written
