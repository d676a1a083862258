"""What a process takes of a device beside tensors: driver, context, and a communicator for every group."""

from __future__ import annotations

from typing import Final

from foretrace.simulator.job import Job

COMMUNICATOR_BYTES: Final = 410_000_000
"""Buffers of NCCL for one communicator of 8 ranks.

System files of ai-dynamo/aiconfigurator 095f58a (Apache-2.0); on A100 544 MB were seen for groups of two and
688 MB for larger ones (NVIDIA/nccl issue 964). More communicators take more (its issue 864).
"""


def reserved_bytes(job: Job) -> int:
    """Return what a rank of *job* holds beside tensors, from its first collective on.

    ``Device.reserved_bytes`` is driver, context and one communicator. Every axis with more than a rank has a
    communicator of its own, and where there are several, one over all ranks comes beside them. A processor
    talks through gloo, which keeps no such buffers.
    """
    device = job.cluster.device
    axes = sum(degree > 1 for degree in job.layout.degrees.values())
    return device.reserved_bytes + (axes * COMMUNICATOR_BYTES if device.kind == "gpu" and axes > 1 else 0)
