"""Checks that the operands of a collective fit its group, as NCCL does: a script may assume one size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.peers.splits import Exchange

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
    """Raise PyTorch's own error if operands of the operator *name* do not fit *n_ranks*.

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


def check_splits(exchange: Exchange, n_ranks: int) -> None:
    """Raise PyTorch's own error if the rows of an all-to-all are not the sum of its splits.

    Without splits, and for lists, NCCL checks nothing (``ProcessGroupNCCL::alltoall_base``, ``alltoall``,
    ``checkSplitSizes``): it would write past the end of what is filled, or wait for what nobody sends.

    Raises:
        RuntimeError: there are not as many splits as ranks, or rows that they leave over or do not have.
        RehearsalError: without splits more is sent than is filled; lists have not one tensor per rank.
    """
    source, filled = exchange.source, exchange.filled
    if isinstance(source, list | tuple):
        if len(source) != n_ranks or len(filled) != n_ranks:
            raise RehearsalError(
                f"all_to_all sends {len(source):,} tensors and fills {len(filled):,} in a group of "
                f"{n_ranks:,} ranks: a real run over NCCL waits for the others, give one per rank"
            )
    elif exchange.rows_in or exchange.rows_out:
        _check_rows(source, exchange.rows_in, n_ranks)
        _check_rows(filled, exchange.rows_out, n_ranks)
    elif filled.numel() < source.numel():
        raise RehearsalError(
            f"all_to_all_single sends {source.numel():,} elements and fills {filled.numel():,}: without "
            "splits a real run over NCCL writes past the end, give as many or output_split_sizes"
        )


def _check_rows(tensor: Any, splits: Sequence[int] | None, n_ranks: int) -> None:
    n_rows = int(tensor.shape[0])
    if not splits:
        if n_rows % n_ranks:
            raise RuntimeError(
                f"Tensor's dim 0 does not divide equally across group size: {n_rows:,} by {n_ranks:,}"
            )
        return
    if len(splits) != n_ranks:
        raise RuntimeError(
            f"Number of tensor splits not equal to group size: {len(splits):,} against {n_ranks:,}"
        )
    if sum(splits) != n_rows:
        raise RuntimeError(f"Split sizes doesn't match total dim 0 size: {sum(splits):,} against {n_rows:,}")
