"""How launchers tell a process that it is one of several."""

from __future__ import annotations

import os
from typing import Final

WORLD_SIZES: Final = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
"""Environment variables by which launchers tell each process of how many it is one."""


RANKS: Final = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
"""Environment variables by which they tell it its own number."""


def is_first() -> bool:
    """Whether a launcher has started this process as the first of several, or does not say."""
    return next((os.environ[name] == "0" for name in RANKS if name in os.environ), True)


def is_one_of_many() -> bool:
    """Whether a launcher has started this process once per rank: then all of them record into one directory.

    torchrun and most others set WORLD_SIZE, srun SLURM_STEP_NUM_TASKS (SLURM_NTASKS is there outside of srun,
    too), and mpirun of Open MPI its own.
    """
    return any(int(os.environ.get(name) or 1) > 1 for name in WORLD_SIZES)
