"""The same answers as ``topologies.reach`` for a machine of any size, from a fabric of a few nodes.

Where every GPU runs a rank, sets of nodes that are wired alike send alike: what a link carries does not
depend on how many other sets there are. Two of them, and what is left over at the end, say all there is to
say. A machine of 16,384 GPUs is then asked through a fabric of some hundred.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

from foretrace.topologies.cluster import Cluster
from foretrace.topologies.errors import FabricError
from foretrace.topologies.reach import LEVEL, Reach
from foretrace.topologies.shape import GroupShape, Members, ways_out
from foretrace.topologies.wiring import fabric

_Node = tuple[int, tuple[int, ...]]
"""The number of a node, and the places in it of its members."""

KEPT: Final = 2
"""Sets that the folded fabric has of those that are alike: enough for two GPUs to lie in different ones."""

FOLDABLE: Final = ("switch", "rail", "multi-plane", "fat-tree", "dragonfly", "two-site")
"""Fabrics whose sets of nodes are joined alike. In a torus it matters how far apart two are."""


def reach(cluster: Cluster, placed: Sequence[int]) -> Reach | Folded:
    """Return what answers for groups of GPUs of *cluster* when those *placed* all communicate alike.

    Raises:
        FabricError: a GPU cannot be reached.
    """
    period = _period(cluster)
    # Both: a GPU that is named twice must not stand for one that is left out.
    everywhere = len(placed) == cluster.n_gpus and len(set(placed)) == cluster.n_gpus
    if not period or not everywhere or _alike(cluster, period) <= KEPT:
        return Reach(fabric(cluster), placed)
    return Folded(cluster, period)


def _period(cluster: Cluster) -> int:
    """Return the nodes of one set of *cluster*, 0 if it has none."""
    spec = cluster.fabric_spec
    if spec.links or spec.kind not in FOLDABLE or cluster.nic is None or cluster.others:
        return 0
    return {"switch": 1, "dragonfly": spec.group_nodes, "two-site": spec.group_nodes}.get(
        spec.kind, spec.nodes_per_leaf
    )


def _alike(cluster: Cluster, period: int) -> int:
    """Return how many sets of *period* nodes are filled."""
    return cluster.n_gpus // (period * cluster.gpus_per_node)


class Folded:
    """Answers as ``Reach`` does where every GPU of *cluster* runs a rank.

    Args:
        cluster: the machine.
        period: nodes of a set; there are more than ``KEPT`` such sets.
    """

    def __init__(self, cluster: Cluster, period: int) -> None:
        self._per_node = cluster.gpus_per_node
        self._period = period
        self._full = _alike(cluster, period)
        # What is left over at the end, fewer than a set, stays in the small machine as well.
        small = cluster.sized(cluster.n_gpus - (self._full - KEPT) * period * self._per_node)
        self._reach = Reach(fabric(small), range(small.n_gpus))

    def domain(self, gpu: int) -> int:
        """Return the number of the NVLink domain that *gpu* is in."""
        return gpu // self._per_node

    def first_alike(self, groups: Any) -> Any:
        """Return for each of *groups*, rows of GPUs, the first that gets the same: moved by whole sets."""
        a_set = self._period * self._per_node
        first, last = groups.min(axis=1, keepdims=True), groups.max(axis=1, keepdims=True)
        # What is left over at the end is like nothing else.
        return groups - first // a_set * a_set * (last < self._full * a_set)

    def shape(self, gpus: Sequence[int]) -> GroupShape:
        """Return the shape of the group of *gpus*, in the order of their ranks.

        Raises:
            FabricError: two of them meet in no switch.
        """
        members: dict[int, list[int]] = {}
        for gpu in gpus:
            members.setdefault(gpu // self._per_node, []).append(gpu % self._per_node)
        nodes = [(node, tuple(locals_)) for node, locals_ in members.items()]
        # A set stands for all that are alike, so that members are looked up in the first one.
        homes = {self._home(node, locals_) for node, locals_ in nodes}
        return GroupShape(
            n_ranks=len(gpus),
            n_domains=len(nodes),
            n_local=max(len(locals_) for _, locals_ in nodes),
            intra_bytes_per_s=min(self._reach.ring(home) for home in homes),
            **(ways_out(self._reach.climb, self._hops(nodes), LEVEL["core"]) if len(nodes) > 1 else {}),
        )

    def _hops(self, nodes: Sequence[_Node]) -> dict[tuple[Members, Members], tuple[int, int]]:
        """Return where neighbours in a ring through *nodes* meet, and how many do so."""
        found: dict[tuple[Members, Members], tuple[int, int]] = {}
        for pair, count in Counter(self._pair(a, b) for a, b in pairwise([*nodes, nodes[0]])).items():
            level = self._reach.meeting_level(*pair)
            if level is None:
                raise FabricError(f"nodes {nodes[0][0]} and {nodes[-1][0]} meet in no switch above them")
            found[pair] = level, count
        return found

    def _pair(self, a: _Node, b: _Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the members of two nodes, as far apart in the folded fabric as they are."""
        apart = a[0] // self._period != b[0] // self._period
        # Where *a* is of what is left over, the first set is another than its own already.
        return self._home(*a), self._home(*b, second=apart and a[0] // self._period < self._full)

    def _home(self, node: int, locals_: tuple[int, ...], *, second: bool = False) -> tuple[int, ...]:
        """Return members of *node* in the first set that is like its own, or in the *second*."""
        block, inside = divmod(node, self._period)
        # In the small machine what is left over follows the sets that were kept.
        block = KEPT if block == self._full else int(second)
        first = (block * self._period + inside) * self._per_node
        return tuple(first + local for local in locals_)
