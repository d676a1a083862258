"""What of a step is due to the host: copies to and from it, and an optimizer that runs there."""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from foretrace.traces.columns import BoolArray, is_one_of
from foretrace.traces.run import Run

HOST: Final = "host"  # what copies to and from the host move along, beside the axes of a layout

OFFLOADING: Final = f"exposed:{HOST}"
"""State of a rank that waits for copies of what is offloaded, or of what it is fed."""

KINDS: Final = ("offload", "input")
"""Kinds of such copies: of what is kept on the host for want of memory, and of what is made there."""

HOST_OPTIMIZER: Final = "host:optimizer"  # state of a rank that waits for the optimizer that runs on its host


def is_work(table: pa.Table) -> BoolArray:
    """Return which rows are work of the device: compute, and copies other than those of ``KINDS``."""
    return is_one_of(table, "category", ("compute", "copy")) & ~is_offloading(table)


def is_offloading(table: pa.Table) -> BoolArray:
    """Return which rows are copies to and from the host of what is offloaded, or of what a rank is fed."""
    return is_one_of(table, "category", ("copy",)) & is_one_of(table, "kind", KINDS)


def is_host_optimizer(table: pa.Table) -> BoolArray:
    """Return which rows are an optimizer that runs on the host."""
    return is_one_of(table, "category", ("host",)) & is_one_of(table, "kind", ("optimizer",))


def offloaded_states(run: Run) -> frozenset[str]:
    """Return which of the states that the host causes occur."""
    return frozenset(state for rank in run.stored_ranks for state in run.once(_own_states, rank))


def _own_states(table: pa.Table) -> set[str]:
    applies = {OFFLOADING: is_offloading(table), HOST_OPTIMIZER: is_host_optimizer(table)}
    return {state for state, rows in applies.items() if rows.any()}
