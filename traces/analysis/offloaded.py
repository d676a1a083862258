"""What of a step is due to offloading: copies to and from the host, and an optimizer that runs there."""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from traces.columns import BoolArray, is_one_of
from traces.run import Run

HOST: Final = "host"
"""What the copies that offloading makes move along, beside the axes of a layout."""

OFFLOADING: Final = f"exposed:{HOST}"
"""State of a rank that waits for the copies of what is offloaded."""

HOST_OPTIMIZER: Final = "host:optimizer"
"""State of a rank that waits for the optimizer that runs on its host."""


def is_work(table: pa.Table) -> BoolArray:
    """Return which rows are work of the device: compute, and copies other than those of offloading."""
    return is_one_of(table, "category", ("compute", "copy")) & ~is_offloading(table)


def is_offloading(table: pa.Table) -> BoolArray:
    """Return which rows are copies to and from the host that offloading makes."""
    return is_one_of(table, "category", ("copy",)) & is_one_of(table, "kind", ("offload",))


def is_host_optimizer(table: pa.Table) -> BoolArray:
    """Return which rows are an optimizer that runs on the host."""
    return is_one_of(table, "category", ("host",)) & is_one_of(table, "kind", ("optimizer",))


def offloaded_states(run: Run) -> frozenset[str]:
    """Return which of the states that offloading causes occur."""
    found: set[str] = set()
    for rank in run.stored_ranks:
        table = run.spans([rank], ["category", "kind"])
        found |= {OFFLOADING} if is_offloading(table).any() else set()
        found |= {HOST_OPTIMIZER} if is_host_optimizer(table).any() else set()
    return frozenset(found)
