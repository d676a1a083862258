"""Variables of the environment that a script asks for: what sets them, and what a command line sets itself.

Files of batch jobs export variables before ``srun``, as ``WORLD_SIZE``, which no launcher then sets. A
rehearsal reads no such file: they stand before the launcher, as a shell takes them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

SETS: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), "torchrun"),
        "SLURM_": "srun",
        **dict.fromkeys(("OMPI_", "PMI_", "MPI_", "MV2_"), "mpirun"),
    }
)
"""How names of variables begin, and which launcher sets them."""

BY: Final[Mapping[str, str]] = MappingProxyType(
    {"torchrun": "train.py", "srun": "python train.py", "mpirun": "python train.py"}
)
"""What stands behind a launcher on a command line."""

ALIKE: Final = frozenset({"WORLD_SIZE", "LOCAL_WORLD_SIZE"})
"""Variables of torchrun that are the same for every rank, so that a file of a batch job can export them."""

_ASSIGNMENT: Final = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


def exported(command: Sequence[str]) -> dict[str, str]:
    """Return the variables that *command* sets before it names what it starts, as a shell or ``env`` does.

    >>> exported(["WORLD_SIZE=64", "srun", "python", "train.py", "lr=1"])
    {'WORLD_SIZE': '64'}
    """
    words = command[: len(command) - len(started(command))]
    return {match[1]: match[2] for word in words if (match := _ASSIGNMENT.fullmatch(word))}


def started(command: Sequence[str]) -> Sequence[str]:
    """Return *command* without the variables that it sets first.

    >>> started(["env", "WORLD_SIZE=64", "srun", "python", "train.py"]), started(["train.py", "lr=1"])
    (['srun', 'python', 'train.py'], ['train.py', 'lr=1'])
    """
    at = int(bool(command) and Path(command[0]).name == "env")
    while at < len(command) and _ASSIGNMENT.fullmatch(command[at]):
        at += 1
    return command[at:]


def missing(variable: str, spec: Mapping[str, Any]) -> str:
    """Return what to do about a *variable* that is not set, empty if it is none of a launcher.

    Args:
        variable: its name.
        spec: ``world_size``, ``local_world_size`` and ``launchers`` of what was to be done.

    >>> spec = {"launchers": ("srun", "python"), "world_size": 64, "local_world_size": 8}
    >>> missing("WORLD_SIZE", spec)
    'which srun does not set: write it before srun, as in -- env WORLD_SIZE=64 srun python train.py'
    >>> missing("SLURM_PROCID", {**spec, "launchers": ()})
    'which srun sets: write it before the script, as in -- srun python train.py'
    """
    launcher = next((name for sign, name in SETS.items() if variable.startswith(sign)), "")
    given = next((name for name in spec.get("launchers", ()) if name in BY), "")
    if not launcher:
        return ""
    if given and (launcher == given or variable in ALIKE):
        size = spec["world_size" if variable == "WORLD_SIZE" else "local_world_size"]
        value = size if variable in ALIKE else "..."
        example = f"-- env {variable}={value} {given} {BY[given]}"
        return f"which {given} does not set: write it before {given}, as in {example}"
    return f"which {launcher} sets: write it before the script, as in -- {launcher} {BY[launcher]}"
