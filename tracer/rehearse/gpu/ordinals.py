"""Numbers of GPUs that a script asks for, held against those of a node.

A rehearsal takes every GPU to be that of its rank. A script that takes its rank for the number of a GPU goes
through then on as many nodes as one likes, where a real run ends on the second one. So does one that never
chooses a GPU: each of its ranks has its model on the first one of the node, where NCCL finds a duplicate.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from tracer.rehearse.gpu.devices import is_gpu
from tracer.rehearse.ranks.launchers import on_node

if TYPE_CHECKING:
    from tracer.rehearse.session import RehearsalSession


VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
"""By which a process sees one GPU of its node alone, and that as the first one."""

SHARED: Final = (
    "the model of each rank is on GPU 0 of its node, for no rank chooses one (torch.cuda.set_device, "
    'torch.device("cuda", LOCAL_RANK)): a real run over NCCL ends there (Duplicate GPU detected); it is '
    "taken to be on the rank's"
)
"""What is said of a script whose ranks would share a GPU."""


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


def choose(session: RehearsalSession, device: Any) -> None:
    """Note that *device* is the rank's from here on, as by ``torch.cuda.set_device``; None: its own."""
    number = on_node()[0] if device is None else number_of(device)
    if number is not None:
        session.placement.chosen_gpu = number


def place(session: RehearsalSession, device: Any) -> None:
    """Note that a parameter goes to *device*, and say so where every rank of the node has its own there.

    Whether the ranks sum over NCCL is known once they have met: until then the parameter is remembered.
    """
    placement = session.placement
    if is_gpu(device):
        number = number_of(device)
        own, n_gpus = on_node()
        placed = placement.chosen_gpu if number is None else number
        placement.is_shared = not placed and own > 0 and n_gpus > 1 and not _sees_one()


def meet_others(session: RehearsalSession) -> None:
    """Say that ranks share a GPU, where they do and are in a group of NCCL."""
    import torch.distributed as dist

    if session.placement.is_shared and dist.is_initialized() and "nccl" in str(dist.get_backend()):
        session.placement.is_shared = False
        session.warn(SHARED)


def _sees_one() -> bool:
    """Whether this process sees one GPU alone, by its environment or its task of SLURM or MPI."""
    seen = os.environ.get(VISIBLE)
    return "LOCAL_RANK" not in os.environ or (seen is not None and "," not in seen)
