"""Whether operands of a collective fit its group, as NCCL asks: scripts may be written for one size of it."""

from __future__ import annotations

from typing import Any, Final

WHOLE: Final = {
    "_allgather_base_": (
        0,
        "output tensor must have the same type as input tensor",
        "output tensor size must be equal to world_size times input tensor size",
    ),
    "_reduce_scatter_base_": (
        1,
        "input tensor must be the same type as the output tensor.",
        "input tensor must be the same size as output size times world size",
    ),
}
"""Operators of ``c10d``: which of their first two operands holds what all ranks have a part of, and with what
words a real run ends where types or sizes differ (``ProcessGroupNCCL.cpp`` of PyTorch)."""


def check(name: str, args: tuple[Any, ...], n_ranks: int) -> None:
    """Raise what PyTorch does if operands of the operator *name* do not fit *n_ranks*.

    Raises:
        TypeError: their types differ.
        ValueError: the whole is not as large as all parts.
    """
    if name not in WHOLE:
        return
    at, of_types, of_sizes = WHOLE[name]
    whole, part = args[at], args[1 - at]
    if whole.dtype != part.dtype:
        raise TypeError(of_types)
    if whole.numel() != part.numel() * n_ranks:
        raise ValueError(f"{of_sizes}: {whole.numel():,} against {n_ranks:,} times {part.numel():,} elements")
