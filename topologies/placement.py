"""Which rank runs on which GPU."""

from __future__ import annotations

from collections.abc import Sequence

from topologies.cluster import Cluster
from topologies.errors import CatalogError


def place(world_size: int, cluster: Cluster) -> Sequence[int]:
    """Return the GPU of every rank: rank *r* on GPU *r*, so that ranks fill one node after another.

    Raises:
        CatalogError: the cluster has fewer GPUs than there are ranks.
    """
    if not 1 <= world_size <= cluster.n_gpus:
        raise CatalogError(
            f"{world_size} ranks do not fit on the {cluster.n_gpus} GPUs of {cluster.name}; "
            f"one rank per GPU, so give at least {world_size} GPUs"
        )
    return range(world_size)
