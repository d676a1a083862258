"""What one GPU of a machine gets at every distance."""

from __future__ import annotations

from foretrace.topologies.cluster import Cluster
from foretrace.topologies.reach import LEVEL, Reach
from foretrace.topologies.shape import Tier
from foretrace.topologies.wiring import fabric


def tiers(cluster: Cluster) -> list[Tier]:
    """Return what one GPU of *cluster* gets at every distance, nearest first.

    A machine whose fabric is given by its kind is taken to be large enough to have every tier, because a
    small one may have fewer. Raises FabricError.
    """
    full = _with_every_tier(cluster)
    reach = Reach(fabric(full), range(full.n_gpus))
    found: dict[str, Tier] = {}
    for other in range(1, full.n_gpus):
        tier = reach.tier(0, other)
        found.setdefault(tier.name, tier)
    return sorted(found.values(), key=lambda tier: LEVEL.get(tier.name, 0))


def _with_every_tier(cluster: Cluster) -> Cluster:
    spec = cluster.fabric_spec
    if spec.links or cluster.nic is None or spec.kind in {"node", "torus"}:
        return cluster
    n_nodes = max(spec.nodes_per_leaf, spec.group_nodes) + 1
    return cluster.sized(max(cluster.n_gpus, cluster.gpus_per_node * n_nodes))
