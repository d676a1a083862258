"""Which rank runs on which GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from foretrace.door import counted, read_text
from foretrace.topologies.cluster import Cluster
from foretrace.topologies.errors import CatalogError


def place(world_size: int, cluster: Cluster, policy: str = "packed") -> Sequence[int]:
    """Return the GPU of every rank.

    Args:
        world_size: number of ranks.
        cluster: the machine.
        policy: a key of ``POLICIES``, or the path of a file with the GPU of each rank in turn, as numbers
            between blanks, commas or line ends.

    Raises:
        CatalogError: the cluster has fewer GPUs than there are ranks, the policy is unknown, or the file does
            not give each rank a GPU of its own.
    """
    if not 1 <= world_size <= cluster.n_gpus:
        raise CatalogError(
            f"{world_size} ranks do not fit on the {cluster.n_gpus} GPUs of {cluster.name}; "
            f"one rank per GPU, so give at least {world_size} GPUs"
        )
    if policy in POLICIES:
        return POLICIES[policy](world_size, cluster)
    if Path(policy).suffix or "/" in policy:
        return checked(_read(Path(policy)), world_size, cluster)
    raise CatalogError(f"placement {policy!r}: one of {', '.join(POLICIES)}, or the path of a file of GPUs")


def checked(gpus: Sequence[int], world_size: int, cluster: Cluster) -> Sequence[int]:
    """Return *gpus* if they are a GPU of *cluster* for each of *world_size* ranks. Raises CatalogError."""
    if len(gpus) != world_size:
        raise CatalogError(f"placement of {len(gpus)} ranks; there are {world_size}")
    if twice := [gpu for gpu, ranks in Counter(gpus).items() if ranks > 1]:
        raise CatalogError(f"placement gives gpu:{twice[0]} to two ranks; one rank per GPU")
    if beyond := [gpu for gpu in gpus if not 0 <= gpu < cluster.n_gpus]:
        raise CatalogError(f"placement on gpu:{beyond[0]}: {cluster.name} has 0 to {cluster.n_gpus - 1}")
    return tuple(gpus)


def _packed(world_size: int, _cluster: Cluster) -> Sequence[int]:
    """Fill one node after another: the innermost axis, ``tp``, stays inside a node for as long as it fits."""
    return range(world_size)


def _spread(world_size: int, cluster: Cluster) -> Sequence[int]:
    """Deal ranks out to the nodes in turn."""
    nodes = [
        range(node * cluster.gpus_per_node, min((node + 1) * cluster.gpus_per_node, cluster.n_gpus))
        for node in range(cluster.n_nodes)
    ]
    dealt = [gpus[local] for local in range(cluster.gpus_per_node) for gpus in nodes if local < len(gpus)]
    return tuple(dealt[:world_size])


def _rail(world_size: int, cluster: Cluster) -> Sequence[int]:
    """Fill one rail after another in groups of nodes that share a set of leaves, then the next group."""
    size = cluster.fabric_spec.nodes_per_leaf * cluster.gpus_per_node
    found: list[int] = []
    for first in range(0, cluster.n_gpus, size):
        group = range(first, min(first + size, cluster.n_gpus))
        found.extend(sorted(group, key=lambda gpu: (gpu % cluster.gpus_per_node, gpu)))
    return tuple(found[:world_size])


def _read(path: Path) -> list[int]:
    words = read_text(path, CatalogError).replace(",", " ").split()
    if wrong := next((word for word in words if counted(word) < 0), None):
        raise CatalogError(f"{path}: {wrong[:60]!r} is not the number of a GPU")
    return [counted(word) for word in words]


POLICIES: Final[Mapping[str, Callable[[int, Cluster], Sequence[int]]]] = MappingProxyType(
    {"packed": _packed, "spread": _spread, "rail": _rail}
)
"""Ways to lay ranks out on GPUs, by name."""
