"""What a process says of itself: whether it is one of several, its process groups, what it runs on."""

from __future__ import annotations

import multiprocessing
import os
import platform
import socket
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Final


def is_distributed() -> bool:
    """Whether this process has joined a process group."""
    if "torch.distributed" not in sys.modules:
        return False
    import torch.distributed as dist

    return bool(dist.is_available() and dist.is_initialized())


@cache  # to read what describes a package takes milliseconds, at each writing
def versions() -> dict[str, str]:
    """Return the versions of what made the run."""
    import torch

    try:
        own = version("foretrace")
    except PackageNotFoundError:  # run from a checkout
        own = "unknown"
    return {"foretrace": own, "torch": str(torch.__version__), "python": platform.python_version()}


ON_CPU: Final = "FORETRACE_ON_CPU"  # environment variable with the number of GPUs that a script is told of


def n_pretended_gpus() -> int:
    """Return how many GPUs this process takes its processors for; 0: none."""
    return int(os.environ.get(ON_CPU) or 0)


# How launchers tell a process that it is one of several.

WORLD_SIZES: Final = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Environment variables by which launchers tell each process of how many it is one."""

RANKS: Final = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""Environment variables by which they tell it its own number."""

JOBS: Final = (
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ("PMIX_NAMESPACE",),
    ("OMPI_MCA_ess_base_jobid",),
    ("PMI_JOBID",),
    ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"),
    ("MASTER_ADDR", "MASTER_PORT"),
)
"""Environment variables by which processes that were started together know that they were."""


def job() -> str:
    """Return what the processes that were started together with this one have in common, and others have not.

    Nothing but this process, if it was started alone.
    """
    if is_one_of_many():
        for names in JOBS:
            if all(name in os.environ for name in names):
                return "job " + ".".join(os.environ[name] for name in names)
        return "job ?"
    return f"process {os.getpid()} on {socket.gethostname()}"


def is_first() -> bool:
    """Whether a launcher has started this process as the first of several, or does not say."""
    return _number() in {"", "0"}


def is_one_of_many() -> bool:
    """Whether a launcher has started this process once per rank: then all of them record into one directory.

    torchrun and most others set WORLD_SIZE, srun SLURM_STEP_NUM_TASKS (SLURM_NTASKS is there outside of srun,
    too), mpirun of Open MPI its own, and those of MPICH and Intel MPI PMI_SIZE.
    """
    return any(int(os.environ.get(name) or 1) > 1 for name in WORLD_SIZES)


def is_told_world() -> bool:
    """Whether a launcher has told torch that there are several ranks: they will join a process group.

    srun and mpirun tell torch nothing, and start as many trainings as well that know nothing of each other.
    """
    return int(os.environ.get("WORLD_SIZE") or 1) > 1


def own_name() -> str:
    """Return what tells this process from those that were started with it, empty if it was started alone."""
    parts = [f"task{_number()}"] if is_one_of_many() else []
    if multiprocessing.parent_process() is not None:
        parts.append(f"process{os.getpid()}")
    return "-".join(parts)


def _number() -> str:
    """Return the number that a launcher has given this process, empty if none has."""
    return next((os.environ[name] for name in RANKS if name in os.environ), "")
