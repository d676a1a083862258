"""Checks the GPU numbers that a script uses against the GPUs of a node.

In a rehearsal every GPU number means the GPU of the rank. So two kinds of scripts run through here that fail
in a real run. One uses its rank as a GPU number, which fails on the second node. The other never chooses a
GPU: each rank puts its model on the first GPU of the node, and NCCL reports a duplicate GPU.
"""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer.rehearse.gpu.devices import is_gpu
from foretrace.tracer.rehearse.ranks.launchers import is_task, name_on_node, on_node

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.session import RehearsalSession


VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
"""Variable by which a process may see a single GPU of its node, under the number 0."""

NUMBER: Final = "rehearsed_gpu"
"""Attribute of a storage that was created on a GPU: the number of that GPU."""

SHARED: Final = (
    "{what} of each rank is on GPU 0 of its node, because no rank chooses a GPU (torch.cuda.set_device, "
    'torch.device("cuda", {rank})): over NCCL a real run ends with "Duplicate GPU detected"{unless}; in the '
    "rehearsal each rank has its own GPU"
)
"""Note about a script whose ranks would share a GPU."""

UNLESS: Final = (
    ", unless the launcher shows each task one GPU only (srun --gpus-per-task, CUDA_VISIBLE_DEVICES in a "
    "script around python)"
)
"""Added to the note if ranks are tasks of SLURM or MPI: a rehearsal does not know which GPUs they see."""

MODEL: Final = "the model"
SENT: Final = "a tensor that is sent"
"""What the note says is on the shared GPU."""


def install(session: RehearsalSession) -> None:
    """Note which GPU is the current one, by ``torch.cuda.set_device`` or inside ``torch.cuda.device``."""
    import torch

    anywhere: Any = torch.cuda
    choose_device = anywhere.set_device

    def chosen(device: Any) -> None:
        session.placement.is_met = True
        meet(session, device)
        choose(session, device)
        choose_device(device)

    def exchanged(device: int) -> int:
        before = session.placement.chosen_gpu
        if device >= 0:
            choose(session, device)
        return before

    anywhere.set_device = chosen
    anywhere._exchange_device = anywhere._maybe_exchange_device = exchanged


def number_of(device: Any) -> int | None:
    """Return the GPU number in *device*, None if it names no GPU or has no number."""
    if isinstance(device, int):
        return device
    number = str(device).partition(":")[2]
    return int(number) if is_gpu(device) and number.isdigit() else None


def meet(session: RehearsalSession, device: Any) -> None:
    """Note that a script uses *device*, and report it if a node has no such GPU."""
    session.placement.is_met |= is_gpu(device)
    number, n_gpus = number_of(device), on_node()[1]
    if number is not None and number >= n_gpus:
        session.warn(
            f'the script uses GPU {number}, but a node has {n_gpus}: a real run ends with "invalid device '
            'ordinal"; here it is the GPU of the rank. For nodes with more GPUs, give --ranks-per-node'
        )


def choose(session: RehearsalSession, device: Any) -> None:
    """Note that *device* is the current GPU, as by ``torch.cuda.set_device``; None: the rank's own."""
    number = on_node()[0] if device is None else number_of(device)
    if number is not None:
        session.placement.chosen_gpu = number


def place(session: RehearsalSession, device: Any) -> None:
    """Note that a parameter moves to *device*, which may be the same GPU for every rank of the node.

    That is reported once the ranks are in a process group with NCCL: until then it is only remembered.
    """
    if is_gpu(device):
        session.placement.is_shared = not _placed(session, device) and _has_others()


def made(session: RehearsalSession, tensor: Any, device: Any) -> None:
    """Note that *tensor* was created on *device*."""
    if is_gpu(device):
        setattr(_storage(tensor), NUMBER, _placed(session, device))


def move(session: RehearsalSession, tensor: Any, device: Any) -> None:
    """Note that *tensor* moves to *device*, if it was created on a GPU."""
    if _number_of(tensor) is not None:
        setattr(_storage(tensor), NUMBER, _placed(session, device) if is_gpu(device) else None)


def move_to(tensor: Any, other: Any) -> None:
    """Note that *tensor* moves to the device of the tensor *other*."""
    if _number_of(tensor) is not None:
        setattr(_storage(tensor), NUMBER, _number_of(other))


def look(session: RehearsalSession, tensors: Iterable[Any], what: str) -> None:
    """Report *what* as on a shared GPU if the ranks of an NCCL group all created *tensors* on GPU 0."""
    if _has_others() and any(_number_of(tensor) == 0 for tensor in tensors) and _is_nccl():
        session.warn(said(what))


def meet_others(session: RehearsalSession) -> None:
    """Report that ranks share a GPU, if they do and are in a process group with NCCL."""
    if session.placement.is_shared and _is_nccl():
        session.placement.is_shared = False
        session.warn(said(MODEL))


def said(what: str) -> str:
    """Return the note that *what* of each rank is on the first GPU of its node."""
    return SHARED.format(what=what, rank=name_on_node(), unless=UNLESS if is_task() else "")


def _number_of(tensor: Any) -> int | None:
    """Return the number of the GPU on which *tensor* was created, None if it is unknown."""
    storage = _storage(tensor)
    found: int | None = None if storage is None else vars(storage).get(NUMBER)
    return found


def _storage(tensor: Any) -> Any:
    """Return the storage of *tensor*, or of its local shard; None if it has none."""
    own = getattr(tensor, "_local_tensor", tensor)
    return None if getattr(own, "is_nested", False) or own.is_sparse else own.untyped_storage()


def _placed(session: RehearsalSession, device: Any) -> int:
    """Return the GPU number of *device*, or that of the current GPU if it has none."""
    number = number_of(device)
    return session.placement.chosen_gpu if number is None else number


def _has_others() -> bool:
    """Whether this is not the first rank of its node, and its process sees more than one GPU."""
    own, n_gpus = on_node()
    return own > 0 and n_gpus > 1 and not _sees_one()


def _is_nccl() -> bool:
    """Whether the ranks are in a process group with NCCL."""
    import torch.distributed as dist

    return bool(dist.is_initialized()) and "nccl" in str(dist.get_backend())


def _sees_one() -> bool:
    """Whether the environment shows this process a single GPU."""
    seen = os.environ.get(VISIBLE)
    return seen is not None and "," not in seen
