"""Notices an input of a model that is one rank's part of the rows, although ranks are of tensor parallelism.

Sequence parallelism may begin with the first module: its style takes the plain tensor that a rank gives it
for a part along the first dimension (``ColwiseParallel(input_layouts=Shard(0))``).
"""

from __future__ import annotations

import functools
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.session import RehearsalSession


def install(session: RehearsalSession) -> None:
    """Note ``input_shards``, over how many ranks of tensor parallelism the rows of the input are cut."""
    from torch.distributed.tensor import DTensor

    kind: Any = DTensor
    original = kind.from_local

    @functools.wraps(original)
    def from_local(local_tensor: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(local_tensor, *args, **kwargs)
        if list(local_tensor.shape) == session.job.get("input_shape") and not local_tensor.requires_grad:
            n_ranks = _ranks_with_rows(session, made)
            if n_ranks > 1:
                session.note_job(input_shards=n_ranks)
        return made

    kind.from_local = staticmethod(from_local)


def _ranks_with_rows(session: RehearsalSession, made: Any) -> int:
    """Return over how many ranks along ``tp`` the rows of *made*, a DTensor, are cut."""
    mesh = made.device_mesh
    cut = [i for i, placement in enumerate(made.placements) if placement.is_shard(dim=0)]
    return prod(mesh.size(i) for i in cut if session.groups.of(mesh.get_group(i)).axis == "tp")
