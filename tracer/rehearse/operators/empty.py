"""Gradients of losses over no elements, as of a mask that selects nothing: empty as well.

PyTorch's kernels return an empty gradient; the decompositions that fake tensors use divide by the number of
elements instead, and raise ``ZeroDivisionError``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

MEANS: Final = ("mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward")
"""Operators whose decomposition divides by the number of elements of their second argument, the input."""


def install() -> None:
    """Make the decompositions of ``MEANS`` return an empty gradient for an empty input."""
    import torch
    from torch._decomp import decomposition_table

    for name in MEANS:
        operator = getattr(torch.ops.aten, name).default
        decomposition_table[operator] = _with_empty(decomposition_table[operator])


def _with_empty(decomposed: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(decomposed)
    def gradient(grad: Any, values: Any, *rest: Any, **named: Any) -> Any:
        if not values.numel():
            return values.new_empty(values.shape)
        return decomposed(grad, values, *rest, **named)

    return gradient
