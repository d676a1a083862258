"""How NICs are wired to switches, and switches to each other, by kind of fabric."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import networkx as nx

from foretrace.topologies.errors import FabricError

if TYPE_CHECKING:
    from foretrace.topologies.cluster import Cluster
    from foretrace.topologies.link import LinkSpec

Nics = list[list[str]]
"""Names of the NICs of every node."""


def wire(
    graph: nx.DiGraph[str], ends: tuple[str, str], bytes_per_s: float, latency_s: float, kind: str
) -> None:
    """Join two nodes of *graph* both ways."""
    for source, target in (ends, ends[::-1]):
        graph.add_edge(source, target, bandwidth_bytes_per_s=bytes_per_s, latency_s=latency_s, kind=kind)


def add(graph: nx.DiGraph[str], name: str) -> str:
    """Add a node to *graph* and return its *name*."""
    graph.add_node(name, tier=name.partition(":")[0])
    return name


def _nic(cluster: Cluster) -> LinkSpec:
    if cluster.nic is None:
        raise FabricError(f"cluster {cluster.name} has no NIC; give [nic] and nics_per_node")
    return cluster.nic


def _to_leaves(
    graph: nx.DiGraph[str], cluster: Cluster, nics: Nics, leaf_of: Callable[[int, int], int]
) -> list[str]:
    """Wire every NIC to the leaf that *leaf_of* node and NIC names; return the leaves."""
    leaves: dict[str, None] = {}
    for node, names in enumerate(nics):
        nic = cluster.kind_of(node).nic or _nic(cluster)
        for j, name in enumerate(names):
            leaf = add(graph, f"leaf:{leaf_of(node, j)}")
            leaves[leaf] = None
            wire(graph, (name, leaf), nic.bandwidth_bytes_per_s, nic.latency_s / 2, nic.kind)
    return list(leaves)


def _up(graph: nx.DiGraph[str], cluster: Cluster, ways: list[tuple[str, str]], ports: int) -> None:
    """Wire leaves to the switch above, with the bandwidth of *ports* NICs over the oversubscription."""
    spec, nic = cluster.fabric_spec, _nic(cluster)
    width = ports * nic.bandwidth_bytes_per_s / spec.oversubscription
    for leaf, above in ways if len(ways) > 1 else ():
        wire(graph, (leaf, add(graph, above)), width, spec.hop_latency_s, nic.kind)


def _rail(graph: nx.DiGraph[str], cluster: Cluster, nics: Nics) -> None:
    """NIC *j* of every node goes to leaf *j* of its group of nodes; leaves meet in the spine."""
    per_leaf, n_nics = cluster.fabric_spec.nodes_per_leaf, cluster.nics_per_node
    leaves = _to_leaves(graph, cluster, nics, lambda node, j: node // per_leaf * n_nics + j)
    _up(graph, cluster, [(leaf, "spine:0") for leaf in leaves], per_leaf)


def _multi_plane(graph: nx.DiGraph[str], cluster: Cluster, nics: Nics) -> None:
    """As rail, but plane *j* has a spine of its own: no cable joins two planes."""
    per_leaf, n_nics = cluster.fabric_spec.nodes_per_leaf, cluster.nics_per_node
    leaves = _to_leaves(graph, cluster, nics, lambda node, j: node // per_leaf * n_nics + j)
    if cluster.n_nodes > per_leaf:
        _up(graph, cluster, [(leaf, f"spine:{int(leaf[5:]) % n_nics}") for leaf in leaves], per_leaf)


def _fat_tree(graph: nx.DiGraph[str], cluster: Cluster, nics: Nics) -> None:
    """All NICs of a node go to the one leaf of its group of nodes; leaves meet in the spine."""
    per_leaf = cluster.fabric_spec.nodes_per_leaf
    leaves = _to_leaves(graph, cluster, nics, lambda node, _j: node // per_leaf)
    _up(graph, cluster, [(leaf, "spine:0") for leaf in leaves], per_leaf * cluster.nics_per_node)


def _one_switch(graph: nx.DiGraph[str], cluster: Cluster, nics: Nics) -> None:
    """All NICs go to one switch."""
    _to_leaves(graph, cluster, nics, lambda _node, _j: 0)


def _grouped(graph: nx.DiGraph[str], cluster: Cluster, nics: Nics) -> None:
    """Fat trees of ``group_nodes`` nodes, each with a spine, and one way from each to the others.

    Between two sites it is slow. In a dragonfly it stands for the global links of a group, with traffic
    spread evenly over them (Kim et al. 2008, doi:10.1109/ISCA.2008.19), and the spine for links inside it.
    """
    spec, nic = cluster.fabric_spec, _nic(cluster)
    per_leaf = min(spec.nodes_per_leaf, spec.group_nodes)
    leaves_per_group = -(-spec.group_nodes // per_leaf)

    def leaf_of(node: int, _j: int) -> int:
        group, inside = divmod(node, spec.group_nodes)
        return group * leaves_per_group + inside // per_leaf

    leaves = _to_leaves(graph, cluster, nics, leaf_of)
    width = per_leaf * cluster.nics_per_node * nic.bandwidth_bytes_per_s / spec.oversubscription
    spines = {leaf: f"spine:{int(leaf[5:]) // leaves_per_group}" for leaf in leaves}
    for leaf, spine in spines.items():
        wire(graph, (leaf, add(graph, spine)), width, spec.hop_latency_s, nic.kind)
    if len(set(spines.values())) > 1:
        for spine in sorted(set(spines.values())):
            ends = (spine, add(graph, "core:0"))
            wire(graph, ends, spec.group_bytes_per_s, spec.group_latency_s / 2, nic.kind)


def _torus(graph: nx.DiGraph[str], cluster: Cluster, nics: Nics) -> None:
    """Every node has a router; routers are joined to their neighbours in each dimension, and round.

    The NICs of a node are shared out evenly among its neighbours.
    """
    spec, nic = cluster.fabric_spec, _nic(cluster)
    if prod(spec.shape) != cluster.n_nodes:
        raise FabricError(
            f"shape = {list(spec.shape)} is a torus of {prod(spec.shape)} nodes, but cluster "
            f"{cluster.name} has {cluster.n_nodes}"
        )
    _to_leaves(graph, cluster, nics, lambda node, _j: node)
    places = list(product(*(range(length) for length in spec.shape)))
    number = {place: node for node, place in enumerate(places)}
    pairs = set()
    for place, node in number.items():
        for axis, length in enumerate(spec.shape):
            there = (*place[:axis], (place[axis] + 1) % length, *place[axis + 1 :])
            if there != place:
                pairs.add(frozenset((node, number[there])))
    ways = sum(min(length - 1, 2) for length in spec.shape)
    width = cluster.nics_per_node * nic.bandwidth_bytes_per_s / ways
    for a, b in (sorted(pair) for pair in pairs):
        wire(graph, (f"leaf:{a}", f"leaf:{b}"), width, spec.hop_latency_s, nic.kind)


def _alone(_graph: nx.DiGraph[str], cluster: Cluster, _nics: Nics) -> None:
    raise FabricError(f"cluster {cluster.name} has {cluster.n_nodes} nodes and a fabric of kind 'node'")


BUILDERS: Final[Mapping[str, Callable[[nx.DiGraph[str], Cluster, Nics], None]]] = MappingProxyType(
    {
        "node": _alone,  # one node, nothing outside it
        "rail": _rail,  # rail-optimised leaf and spine, as in NVIDIA's DGX SuperPOD
        "multi-plane": _multi_plane,  # rail-only, Wang et al. 2023, arXiv:2307.12169
        "fat-tree": _fat_tree,  # Leiserson 1985, doi:10.1109/TC.1985.6312192
        "switch": _one_switch,
        "dragonfly": _grouped,  # Kim et al. 2008, doi:10.1109/ISCA.2008.19
        "two-site": _grouped,
        "torus": _torus,
    }
)
"""How nodes are joined, by the ``kind`` in ``[fabric]``."""

KINDS: Final = tuple(BUILDERS)
GROUPED: Final = ("dragonfly", "two-site")
"""Kinds that need ``group_nodes`` and ``group_bandwidth``."""
