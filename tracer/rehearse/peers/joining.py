"""Compares the rank and world size that a script joins with, and those that are rehearsed.

A script that takes its rank from somewhere else than the environment of the rehearsal would otherwise train
as another rank, or in another world, than the recorded one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs, urlparse

from foretrace.tracer.rehearse.errors import RehearsalError

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.session import RehearsalSession

NEVER: Final = (
    "no process group was made: each of the {:,} ranks trains for itself; a script that takes its rank from "
    "SLURM or MPI is rehearsed by -- srun python train.py, or -- mpirun python train.py"
)
"""What to say of a script that joins no world."""

UNSAID: Final = -1
"""What torch takes for a rank, or a number of them, that is told elsewhere."""


def told(arguments: Mapping[str, Any]) -> tuple[int, int]:
    """Return rank and number of ranks from a call of ``init_process_group``, or from its environment.

    ``UNSAID`` if the launcher, such as MPI, or the store says it instead.

    Raises:
        ValueError: nothing says it; in the words of torch (``_env_rendezvous_handler``).
    """
    found = [UNSAID if (n := arguments.get(name)) is None else int(n) for name in ("rank", "world_size")]
    if arguments.get("store") is not None or str(arguments.get("backend")) == "mpi":
        return found[0], found[1]
    address = urlparse(arguments.get("init_method") or "env://")
    query = parse_qs(address.query)
    for at, name in enumerate(("rank", "world_size")):
        if found[at] == UNSAID and name in query:
            found[at] = int(query[name][0])
        elif found[at] == UNSAID and address.scheme == "env":
            if name.upper() not in os.environ:
                raise ValueError(
                    "Error initializing torch.distributed using env:// rendezvous: environment variable "
                    f"{name.upper()} expected, but not set"
                )
            found[at] = int(os.environ[name.upper()])
    return found[0], found[1]


def check(session: RehearsalSession, found: tuple[int, int]) -> None:
    """Compare the rank and the number of ranks that a script has *found* with those of *session*.

    Raises:
        RehearsalError: it joins another world.
    """
    rank, n_ranks = found
    if n_ranks not in {UNSAID, session.world_size}:
        n, ending = session.world_size, "s" * (n_ranks > 1)
        raise RehearsalError(
            f"a group of {n_ranks} rank{ending} is not the world of {n}: rehearse with --world-size "
            f"{n_ranks}, or tell the script of {n} (where it counts the GPUs of one node, by "
            f"--ranks-per-node {n}; where it asks its launcher, by writing that before it, as in -- srun "
            "python train.py)"
        )
    if rank not in {UNSAID, session.rank}:
        session.warn(
            f"the script takes itself for rank {rank} where rank {session.rank} is rehearsed: what it "
            "chooses by a number of its own is that of another rank, and a real run whose nodes are not told "
            "apart (as by --node_rank) does not come up"
        )
