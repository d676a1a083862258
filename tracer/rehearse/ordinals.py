"""Numbers of GPUs that a script asks for, held against those of a node.

A rehearsal takes every GPU to be that of its rank. A script that takes its rank for the number of a GPU goes
through then on as many nodes as one likes, where a real run ends on the second one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tracer.rehearse.devices import is_gpu
from tracer.rehearse.launchers import on_node

if TYPE_CHECKING:
    from tracer.rehearse.session import RehearsalSession


def number_of(device: Any) -> int | None:
    """Return the number of the GPU that *device* names, None where it names none or no number."""
    if isinstance(device, int):
        return device
    number = str(device).partition(":")[2]
    return int(number) if is_gpu(device) and number.isdigit() else None


def meet(session: RehearsalSession, device: Any) -> None:
    """Note that a script has chosen *device*, and say so where a node has no such GPU."""
    session.placement.is_met |= is_gpu(device)
    number, n_gpus = number_of(device), on_node()[1]
    if number is not None and number >= n_gpus:
        session.warn(
            f"GPU {number} is asked for where a node has {n_gpus}, and taken for the rank's: a real run "
            "ends there (invalid device ordinal); nodes of as many GPUs are rehearsed with --ranks-per-node"
        )
