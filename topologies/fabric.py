"""How the nodes of a machine are joined, as its file says: by a kind of fabric, or cable by cable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from foretrace.topologies.errors import CatalogError, FabricError

KINDS: Final = ("node", "rail", "multi-plane", "fat-tree", "switch", "dragonfly", "two-site", "torus")
"""How nodes are joined; ``topologies.wiring.BUILDERS`` wires each."""

GROUPED: Final = ("dragonfly", "two-site")
"""Kinds that need ``group_nodes`` and ``group_bandwidth``."""


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
