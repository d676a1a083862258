"""Fabrics as directed graphs: who is wired to whom, how fast, how far.

Nodes are named ``<tier>:<id>`` and carry the attribute ``tier``; an edge carries ``bandwidth_bytes_per_s`` in
its own direction, ``latency_s`` and ``kind``. GPUs of one node hang on one switch (``nvswitch``, or ``host``
where a device is a process). NICs lead to leaf switches, and leaves to ``spine:0``, which stands for the
whole layer of spine switches with traffic spread evenly over them (ECMP without collisions). PCIe between a
GPU and its NIC is taken to be no slower than the NIC.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import product
from math import prod
from types import MappingProxyType
from typing import Final

import networkx as nx

from foretrace.topologies.cluster import Cluster
from foretrace.topologies.errors import FabricError
from foretrace.topologies.fabric import KINDS
from foretrace.topologies.link import LinkSpec
from foretrace.topologies.node import wires

TIERS: Final = ("gpu", "nvswitch", "host", "nic", "leaf", "spine", "core")
"""What the part of a node's name before the colon may be, from the device outward."""

NETWORK: Final = frozenset({"leaf", "spine", "core"})
"""Switches behind the NICs."""

MOST_GPUS: Final = 1 << 18
"""GPUs of the largest fabric that is built link by link: a quarter of a minute and some GB of memory."""
MOST_NICS: Final = 1 << 20
"""Most NICs likewise: four for each GPU."""

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
            # Half of the latency on each side of the network: a message passes two such links.
            wire(graph, (name, leaf), nic.bandwidth_bytes_per_s, nic.latency_s / 2, nic.kind)
    return list(leaves)


def _up(graph: nx.DiGraph[str], cluster: Cluster, ways: list[tuple[str, str]], ports: int) -> None:
    """Wire leaves to the switch above, with the bandwidth of *ports* NICs over the oversubscription."""
    spec, nic = cluster.fabric_spec, _nic(cluster)
    width = ports * nic.bandwidth_bytes_per_s / spec.oversubscription
    # A single leaf joins all nodes: nothing is above it.
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
    # With one leaf per plane nothing is above it.
    if cluster.n_nodes > per_leaf:
        # The number of a leaf, after the colon: rails are numbered within each group of nodes.
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
    # A leaf is no larger than a group: it never joins nodes of two.
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
        # A set of text has another order in every process; the graph must not.
        for spine in sorted(set(spines.values())):
            ends = (spine, add(graph, "core:0"))
            # From group to group are two of these, which together take the latency.
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
            # A dimension of one node leads back to itself.
            if there != place:
                # In a dimension of two nodes the next and the one before are the same: one cable, not two.
                pairs.add(frozenset((node, number[there])))
    # Neighbours in a dimension: none in one of length 1, one in one of 2, else two.
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


@lru_cache(maxsize=8)
def fabric(cluster: Cluster) -> nx.DiGraph[str]:
    """Return the fabric of *cluster* as a graph; the last few are kept, so do not change it.

    Raises:
        FabricError: a GPU cannot reach the others, or there are more than ``MOST_GPUS`` or ``MOST_NICS``.
    """
    sizes = (
        ("GPUs", cluster.n_gpus, MOST_GPUS),
        ("NICs", cluster.n_nodes * cluster.nics_per_node, MOST_NICS),
    )
    for what, size, most in sizes:
        if size > most:
            raise FabricError(
                f"cluster {cluster.name}: a fabric of {size:,} {what} is not built link by link; at most "
                f"{most:,}"
            )
    graph: nx.DiGraph[str] = nx.DiGraph()
    if cluster.fabric_spec.links:
        _explicit(graph, cluster)
    else:
        _nodes(graph, cluster)
        if cluster.n_nodes > 1:
            BUILDERS[cluster.fabric_spec.kind](graph, cluster, _nics(graph, cluster))
    _check_connected(graph, cluster)
    return graph


def _nodes(graph: nx.DiGraph[str], cluster: Cluster) -> None:
    """Wire the GPUs of every node to each other."""
    full = cluster.gpus_per_node
    for node in range(cluster.n_nodes):
        kind = cluster.kind_of(node)
        switched = kind.device.kind == "gpu" and kind.intra.kind == "nvlink" and not kind.node.host
        # Cards whose bridges join only pairs meet over PCIe, in the host.
        hub = "nvswitch" if switched else "host"
        gpus = list(range(node * full, min((node + 1) * full, cluster.n_gpus)))
        for gpu in gpus:
            add(graph, f"gpu:{gpu}")
        found = wires(kind.node, kind.intra, gpus, hub=f"{hub}:{node}", full=full)
        for a, b, bytes_per_s, latency_s, wired in found:
            wire(graph, (add(graph, a), add(graph, b)), bytes_per_s, latency_s, wired)


def _nics(graph: nx.DiGraph[str], cluster: Cluster) -> list[list[str]]:
    """Give every node its NICs, each wired to the GPUs nearest to it; return NIC names by node."""
    if cluster.nic is None or not cluster.nics_per_node:
        raise FabricError(
            f"gpu:{cluster.gpus_per_node} cannot reach gpu:0: cluster {cluster.name} has {cluster.n_nodes} "
            f"nodes of {cluster.gpus_per_node} GPUs and no NICs; give [nic] and nics_per_node"
        )
    if cluster.fabric_spec.kind == "node":
        raise FabricError(
            f"gpu:{cluster.gpus_per_node} cannot reach gpu:0: cluster {cluster.name} has {cluster.n_nodes} "
            f"nodes and a fabric of kind 'node'; choose {', '.join(kind for kind in KINDS if kind != 'node')}"
        )
    n_nics, n_gpus = cluster.nics_per_node, cluster.gpus_per_node
    # Both ways round: each NIC has a GPU where there are more NICs, each GPU a NIC where there are more GPUs.
    pairs = {(j * n_gpus // n_nics, j) for j in range(n_nics)} | {
        (i, i * n_nics // n_gpus) for i in range(n_gpus)
    }
    found = []
    for node in range(cluster.n_nodes):
        names = [add(graph, f"nic:{node}.{j}") for j in range(n_nics)]
        nic = cluster.kind_of(node).nic or cluster.nic
        for local, j in sorted(pairs):
            gpu = node * n_gpus + local
            if gpu < cluster.n_gpus:
                # The latency of the way out is that of the NIC's link; none is added on the way to it.
                wire(graph, (f"gpu:{gpu}", names[j]), nic.bandwidth_bytes_per_s, 0.0, "pcie")
        found.append(names)
    return found


def _explicit(graph: nx.DiGraph[str], cluster: Cluster) -> None:
    """Wire exactly the links that the file lists."""
    for gpu in range(cluster.n_gpus):
        add(graph, f"gpu:{gpu}")
    for link in cluster.fabric_spec.links:
        tiers = {end.partition(":")[0] for end in link.ends}
        if not tiers <= set(TIERS):
            raise FabricError(
                f"link {' - '.join(link.ends)}: a name begins with one of {', '.join(TIERS)}, as gpu:0"
            )
        if extra := next((end for end in link.ends if end.startswith("gpu:") and end not in graph), None):
            raise FabricError(
                f"link {' - '.join(link.ends)}: {extra} is not one of gpu:0 to gpu:{cluster.n_gpus - 1}"
            )
        spec = cluster.intra if tiers <= {"gpu", "nvswitch", "host"} or cluster.nic is None else cluster.nic
        for end in link.ends:
            add(graph, end)
        given = link.bandwidth_bytes_per_s
        bandwidth = spec.bandwidth_bytes_per_s if given is None else given
        latency_s = _default_s(cluster, spec, tiers) if link.latency_s is None else link.latency_s
        wire(graph, link.ends, bandwidth, latency_s, spec.kind)


def _default_s(cluster: Cluster, spec: LinkSpec, tiers: set[str]) -> float:
    """Return the latency of a listed link between *tiers* that gives none: as if no file listed it."""
    if tiers in ({"gpu"}, {"nic"}):
        return spec.latency_s
    if tiers <= NETWORK:
        return cluster.fabric_spec.hop_latency_s
    # To a switch is half of the way; to a NIC is none of it.
    is_way_out = "nic" in tiers and not tiers & NETWORK
    return 0.0 if is_way_out else spec.latency_s / 2


def _check_connected(graph: nx.DiGraph[str], cluster: Cluster) -> None:
    """Raise FabricError naming the GPUs that gpu:0 cannot reach."""
    reached = nx.descendants(graph, "gpu:0") | {"gpu:0"}
    lost = [f"gpu:{gpu}" for gpu in range(cluster.n_gpus) if f"gpu:{gpu}" not in reached]
    if lost:
        named = ", ".join(lost[:4]) + (f" and {len(lost) - 4} more" if len(lost) > 4 else "")
        raise FabricError(
            f"{named} cannot reach gpu:0 in cluster {cluster.name}: no link leads there; add [[links]]"
        )
