"""Fabrics as directed graphs: who is wired to whom, how fast, how far.

Nodes are named ``<tier>:<id>`` and carry the attribute ``tier``; an edge carries ``bandwidth_bytes_per_s`` in
its own direction, ``latency_s`` and ``kind``. GPUs of one node hang on one switch (``nvswitch``, or ``host``
where a device is a process). NICs lead to leaf switches, and leaves to ``spine:0``, which stands for the
whole layer of spine switches with traffic spread evenly over them (ECMP without collisions). PCIe between a
GPU and its NIC is taken to be no slower than the NIC.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import networkx as nx

from foretrace.topologies.errors import CatalogError, FabricError
from foretrace.topologies.node import wires
from foretrace.topologies.wiring import BUILDERS, GROUPED, KINDS, add, wire

if TYPE_CHECKING:
    from foretrace.topologies.cluster import Cluster

TIERS: Final = ("gpu", "nvswitch", "host", "nic", "leaf", "spine", "core")
"""What the part of a node's name before the colon may be, from the device outward."""

MOST_GPUS: Final = 1 << 18
"""GPUs of the largest fabric that is built link by link: a quarter of a minute and some GB of memory."""
MOST_NICS: Final = 1 << 20
"""Most NICs likewise: four for each GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One cable of a fabric that is described link by link; it carries traffic both ways.

    Attributes:
        ends: names of the two nodes, e.g. ``("gpu:0", "nvswitch:0")``.
        bandwidth_bytes_per_s: per direction; None takes that of the machine's ``intra`` or ``nic``.
        latency_s: None takes that of the machine's ``intra`` or ``nic``.
    """

    ends: tuple[str, str]
    bandwidth_bytes_per_s: float | None = None
    latency_s: float | None = None

    def __post_init__(self) -> None:
        if self.ends[0] == self.ends[1]:
            raise FabricError(f"link {' - '.join(self.ends)}: both ends are the same")
        if self.bandwidth_bytes_per_s == 0:
            raise FabricError(f"link {' - '.join(self.ends)} has no bandwidth; leave it out or give it some")


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricSpec:
    """How the nodes of a machine are wired together.

    Attributes:
        kind: one of ``KINDS``, or ``"links"``.
        oversubscription: bandwidth into a leaf from below over bandwidth out of it upward; 1 is non-blocking.
        nodes_per_leaf: nodes that share a leaf switch (fat tree) or a set of them, one per rail (rail).
        hop_latency_s: latency of one link between leaf and spine.
        group_nodes: nodes of one site (two sites) or of one group (dragonfly).
        group_bytes_per_s: from one site, or one group, to all others together, per direction.
        group_latency_s: latency of that way.
        shape: nodes along each dimension of a torus.
        crowding: how other jobs on the same switches slow a group: ``n_nodes ** -crowding`` of its ways out
            is left; 0 where nobody else is.
        links: every cable, where ``kind`` is ``"links"``.
    """

    kind: str = "node"
    oversubscription: float = 1.0
    nodes_per_leaf: int = 32
    hop_latency_s: float = 0.0
    group_nodes: int = 0
    group_bytes_per_s: float = 0.0
    group_latency_s: float = 0.0
    shape: tuple[int, ...] = ()
    crowding: float = 0.0
    links: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS and not self.links:
            raise CatalogError(f"fabric kind {self.kind!r}: one of {', '.join(KINDS)}, or list [[links]]")
        if self.oversubscription < 1:
            raise CatalogError(
                f"oversubscription = {self.oversubscription}: 1 is non-blocking, 2 half the bandwidth upward"
            )
        if not 0 <= self.crowding <= 1:
            raise CatalogError(
                f"crowding = {self.crowding}: 0 is a fabric of one's own, 1 a share that falls as 1 / nodes"
            )
        if self.nodes_per_leaf < 1:
            raise CatalogError(f"nodes_per_leaf = {self.nodes_per_leaf}: at least 1")
        if self.kind in GROUPED and (self.group_nodes < 1 or self.group_bytes_per_s <= 0):
            raise CatalogError(
                f"fabric kind {self.kind!r} needs group_nodes and group_bandwidth, both above zero"
            )
        if (self.kind == "torus") != bool(self.shape) or any(length < 1 for length in self.shape):
            raise CatalogError(
                f"shape = {list(self.shape)}: a torus, and nothing else, has one: nodes along each "
                "dimension, [4, 4]"
            )

    def left_by_others(self, n_nodes: int) -> float:
        """Return the share of its ways out that a group over *n_nodes* nodes has, ``n_nodes ** -crowding``.

        The slowest node sets the pace. Where the share that others leave to one node has a distribution that
        begins as ``P(share < x) ~ x^k``, as a Weibull distribution of shape ``k`` does, the least of ``N``
        lies at ``N^(-1/k)``; ``crowding`` is ``1/k``. Reference: Gumbel 1958, Statistics of Extremes,
        chapter 7.
        """
        return float(n_nodes**-self.crowding)

    def describe(self) -> dict[str, Any]:
        """Return the wiring as plain JSON types."""
        return {
            "kind": self.kind,
            "oversubscription": self.oversubscription,
            "nodes_per_leaf": self.nodes_per_leaf,
            "hop_latency_s": self.hop_latency_s,
            "group_nodes": self.group_nodes,
            "group_bytes_per_s": self.group_bytes_per_s,
            "group_latency_s": self.group_latency_s,
            "shape": list(self.shape),
            "crowding": self.crowding,
            "links": [list(link.ends) for link in self.links],
        }


def build(cluster: Cluster) -> nx.DiGraph[str]:
    """Return the fabric of *cluster*.

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
        latency_s = spec.latency_s / 2 if link.latency_s is None else link.latency_s
        wire(graph, link.ends, bandwidth, latency_s, spec.kind)


def _check_connected(graph: nx.DiGraph[str], cluster: Cluster) -> None:
    """Raise FabricError naming the GPUs that gpu:0 cannot reach."""
    reached = nx.descendants(graph, "gpu:0") | {"gpu:0"}
    lost = [f"gpu:{gpu}" for gpu in range(cluster.n_gpus) if f"gpu:{gpu}" not in reached]
    if lost:
        named = ", ".join(lost[:4]) + (f" and {len(lost) - 4} more" if len(lost) > 4 else "")
        raise FabricError(
            f"{named} cannot reach gpu:0 in cluster {cluster.name}: no link leads there; add [[links]]"
        )
