"""What a group of GPUs gets out of a fabric when every group of its kind communicates at once.

A training job is symmetric: while one data-parallel group reduces its gradients, so do all its siblings.
So every GPU that runs a rank is taken to send upward at the same rate, split over its ways up by their width,
and a link gives each of the GPUs behind it the same share. A group with one GPU per node then gets one rail,
a group that fills its nodes gets them all, and both share an oversubscribed spine fairly. Nothing here knows
what kind of fabric it is: domains, shares and hops come from the graph alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import inf
from typing import Any, Final

import networkx as nx

from foretrace.topologies.cluster import Cluster
from foretrace.topologies.errors import FabricError
from foretrace.topologies.rings import ring_bytes_per_s
from foretrace.topologies.shape import GroupShape, Members, Tier, ways_out
from foretrace.topologies.wiring import fabric

LEVEL: Final = {"gpu": 0, "nic": 1, "leaf": 2, "spine": 3, "core": 4}
"""Height of the tiers that traffic between domains climbs; ``nvswitch`` and ``host`` lie inside a domain."""


class Reach:
    """Answers what groups of GPUs get out of *graph* when the GPUs *placed* all communicate alike."""

    def __init__(self, graph: nx.DiGraph[str], placed: Iterable[int]) -> None:
        self._graph = graph
        # What has no level (``nvswitch``, ``host``) counts as the GPUs that it joins.
        names = (name for name in graph if LEVEL.get(_tier(name), 0) == 0)
        self._inside = nx.DiGraph(graph.subgraph(names))
        self._domain = {
            int(name[4:]): number
            for number, names in enumerate(nx.weakly_connected_components(self._inside))
            for name in names
            if _tier(name) == "gpu"
        }
        self._rings: dict[tuple[int, ...], float] = {}
        self._placed = tuple(placed)
        self._flow: dict[tuple[str, str], float] | None = None
        self._ways_up: dict[tuple[str, int], _WayUp] = {}
        # Thousands of groups of many layouts are made of the same few members of domains.
        self.climb = cache(self._climb)
        self.meeting_level = cache(self._meeting_level)

    def first_alike(self, groups: Any) -> Any:
        """Return *groups*: no two sets of nodes need be alike here."""
        return groups

    def domain(self, gpu: int) -> int:
        """Return the number of the NVLink domain that *gpu* is in."""
        return self._domain[gpu]

    def _by_domain(self, gpus: Sequence[int]) -> list[Members]:
        """Return *gpus* by the NVLink domain that they are in, domains in the order of their first member."""
        members: dict[int, list[int]] = defaultdict(list)
        for gpu in gpus:
            members[self._domain[gpu]].append(gpu)
        return [tuple(found) for found in members.values()]

    def shape(self, gpus: Sequence[int]) -> GroupShape:
        """Return the shape of the group of *gpus*, in the order of their ranks.

        Raises:
            FabricError: two of them meet in no switch.
        """
        domains = self._by_domain(gpus)
        n_local = max(len(found) for found in domains)
        return GroupShape(
            n_ranks=len(gpus),
            n_domains=len(domains),
            n_local=n_local,
            intra_bytes_per_s=min(self.ring(found) for found in domains),
            **self._between(domains),
        )

    def uplinks(self, gpus: Sequence[int], sending: Sequence[int] = ()) -> dict[tuple[str, str], float]:
        """Return what the group of *gpus* fills of the links between switches, as a share of their width.

        Every member sends as much as the weakest domain can, up to where the widest apart of them meet. Of a
        group in one domain, or of switches that are joined side by side, nothing.

        Args:
            gpus: the group, in the order of its ranks.
            sending: those of it that send; all if left out.

        Raises:
            FabricError: two of them meet in no switch.
        """
        domains = self._by_domain(gpus)
        # In the order of the ranks, round to the first: the hops of a ring through the domains.
        pairs = zip(domains, [*domains[1:], domains[0]], strict=True)
        levels = [self.meeting_level(a, b) for a, b in pairs] if len(domains) > 1 else [None]
        level = max((found for found in levels if found is not None), default=0)
        if None in levels or level <= LEVEL["leaf"]:
            return {}
        weakest = min(self.climb(found, level)[0] for found in domains)
        # Each domain sends what the weakest can: of one with more members each sends less.
        through = {f"gpu:{gpu}": weakest / len(found) for found in domains for gpu in found}
        if sending:
            through = {name: rate for name, rate in through.items() if int(name[4:]) in sending}
        return self._climbing(through, level)

    def _climbing(self, through: dict[str, float], level: int) -> dict[tuple[str, str], float]:
        """Return the share of each link above the leaves that bytes/s *through* GPUs fill."""
        used: dict[tuple[str, str], float] = defaultdict(float)
        for _ in range(level):
            above: dict[str, float] = defaultdict(float)
            for node, rate in through.items():
                ups = [up for up in self._above(node) if LEVEL[_tier(up)] <= level]
                widths = [self._graph.edges[node, up]["bandwidth_bytes_per_s"] for up in ups]
                for up, width in zip(ups, widths, strict=True):
                    above[up] += rate * width / sum(widths)
                    # Ways below the leaves belong to single ranks; only links between switches are asked for.
                    if LEVEL[_tier(node)] >= LEVEL["leaf"]:
                        used[node, up] += rate / sum(widths)
            through = above
        return used

    def tier(self, a: int, b: int) -> Tier:
        """Return what GPU *a* can send to GPU *b*. Raises FabricError if they meet in no switch."""
        name = self.tier_name(a, b)
        if name == "node":
            ends = (f"gpu:{a}", f"gpu:{b}")
            path = nx.shortest_path(self._inside, *ends)
            latency_s = sum(self._inside.edges[hop]["latency_s"] for hop in pairwise(path))
            return Tier(name=name, bytes_per_s=self.ring([a, b]), latency_s=latency_s)
        shape = self.shape([a, b])
        return Tier(name=name, bytes_per_s=shape.inter_bytes_per_s, latency_s=shape.inter_latency_s)

    def tier_name(self, a: int, b: int) -> str:
        """Return where GPU *a* meets GPU *b*: in the node, at a level of ``LEVEL`` or, if at none, "peer"."""
        if self._domain[a] == self._domain[b]:
            return "node"
        level = self.meeting_level((a,), (b,))
        # No level means that the two never meet above: their switches are joined side by side.
        return next((tier for tier, height in LEVEL.items() if height == level), "peer")

    def ring(self, gpus: Sequence[int]) -> float:
        """Return what each of *gpus*, of one domain, can send to the next of them."""
        key = tuple(sorted(gpus))
        if key not in self._rings:
            self._rings[key] = ring_bytes_per_s(self._inside, key)
        return self._rings[key]

    def _between(self, domains: list[Members]) -> dict[str, float]:
        """Return what a group in *domains* gets between them, and a ring through them."""
        if len(domains) < 2:
            return {}
        pairs = list(zip(domains, [*domains[1:], domains[0]], strict=True))
        levels = [self.meeting_level(a, b) for a, b in pairs]
        met = [level for level in levels if level is not None]
        # One pair that meets in no switch is enough: the bytes then pass from switch to switch.
        if len(met) < len(levels):
            bytes_per_s, latency_s = self._over_peers(domains, pairs)
            one = {"inter_bytes_per_s": bytes_per_s, "inter_latency_s": latency_s}
            return one | {"ring_bytes_per_s": bytes_per_s, "ring_latency_s": latency_s}
        hops = {pair: (level, 1) for pair, level in zip(pairs, met, strict=True)}
        return ways_out(self.climb, hops, LEVEL["core"])

    def _climb(self, gpus: Members, level: int) -> tuple[float, float]:
        """Return what *gpus* of one domain send up to *level* together in bytes/s, and the latency in s."""
        ways = [self._way_up(f"gpu:{gpu}", level) for gpu in gpus]
        return sum(way.bytes_per_s for way in ways), max(way.latency_s for way in ways)

    def _over_peers(
        self, domains: list[Members], pairs: list[tuple[Members, Members]]
    ) -> tuple[float, float]:
        """Return what the weakest domain can send, and the latency, where switches are joined side by side.

        Every byte takes up a link for each hop between switches, so that all together send no more than all
        links over the mean number of hops; each GPU has an equal share. Reference: the capacity argument of
        Dally & Towles 2004, Principles and Practices of Interconnection Networks, section 3.3.
        """
        hops = [self._hops(a[0], b[0]) for a, b in pairs]
        top = LEVEL["leaf"]
        ways = [[self._way_up(f"gpu:{gpu}", top) for gpu in found] for found in domains]
        peers = self._graph.subgraph([name for name in self._graph if _tier(name) == "leaf"])
        total = sum(data["bandwidth_bytes_per_s"] for _, _, data in peers.edges(data=True))
        # In the mean a byte takes ``hops`` links, so that all links together carry that much less.
        share = total / (sum(hops) / len(hops)) / len(self._placed)
        weakest = min(sum(min(way.bytes_per_s, share) for way in found) for found in ways)
        hop_s = max((data["latency_s"] for _, _, data in peers.edges(data=True)), default=0.0)
        climb_s = max(way.latency_s for found in ways for way in found)
        # Up to the first switch, from switch to switch, and down.
        return weakest, 2 * climb_s + max(hops) * hop_s

    def _hops(self, a: int, b: int) -> int:
        """Return the links between switches on the shortest way from GPU *a* to GPU *b*."""
        ends = [next((name for name in self._leaves(gpu)), "") for gpu in (a, b)]
        try:
            return max(1, len(nx.shortest_path(self._outside(), *ends)) - 1)
        except (nx.NetworkXNoPath, nx.NodeNotFound):
            raise FabricError(
                f"gpu:{a} and gpu:{b} meet in no switch above them: traffic between nodes climbs "
                f"{' - '.join(LEVEL)} and down again; wire both to a common leaf or spine"
            ) from None

    def _leaves(self, gpu: int) -> list[str]:
        nodes = self._way_up(f"gpu:{gpu}", LEVEL["leaf"]).nodes
        return sorted(name for name in nodes if _tier(name) == "leaf")

    def _outside(self) -> nx.DiGraph[str]:
        """Return the fabric without GPUs: switches, and the cables between them."""
        found: nx.DiGraph[str] = self._graph.subgraph(
            [name for name in self._graph if LEVEL.get(_tier(name), 0) >= LEVEL["leaf"]]
        )
        return found

    def _meeting_level(self, a: Members, b: Members) -> int | None:
        """Return the lowest level at which every GPU of *a* shares a switch with some GPU of *b*, if any."""
        for level in sorted(set(LEVEL.values()))[1:]:
            theirs = frozenset[str]().union(*(self._way_up(f"gpu:{gpu}", level).nodes for gpu in b))
            if all(self._way_up(f"gpu:{gpu}", level).nodes & theirs for gpu in a):
                return level
        for level in sorted(set(LEVEL.values()))[1:]:  # by way of a neighbour, over NVLink
            ours, theirs = (self._switches(self._domain[gpus[0]], level) for gpus in (a, b))
            if ours & theirs:
                return level
        return None

    def _switches(self, domain: int, level: int) -> frozenset[str]:
        """Return the switches up to *level* that the GPUs of a domain reach, the idle ones among them too."""
        found: set[str] = set()
        reached = {f"gpu:{gpu}" for gpu, number in self._domain.items() if number == domain}
        while reached:
            above = {up for name in reached for up in self._above(name) if LEVEL[_tier(up)] <= level}
            reached = above - found
            found |= reached
        return frozenset(found)

    def _way_up(self, node: str, level: int) -> _WayUp:
        """Return the way of one GPU's traffic from *node* up to *level*."""
        key = (node, level)
        if key not in self._ways_up:
            # GPUs are no place to meet in, switches are.
            share, latency_s, nodes = inf, 0.0, frozenset({node} if LEVEL[_tier(node)] else set())
            for above in self._above(node):
                if LEVEL[_tier(above)] <= level:
                    edge = self._graph.edges[node, above]
                    rest = self._way_up(above, level)
                    # A flow is counted in GPUs: bandwidth over that is what each of them gets.
                    share = min(
                        share, edge["bandwidth_bytes_per_s"] / self._flows()[node, above], rest.bytes_per_s
                    )
                    latency_s = max(latency_s, edge["latency_s"] + rest.latency_s)
                    nodes |= rest.nodes
            self._ways_up[key] = _WayUp(share, latency_s, nodes)
        return self._ways_up[key]

    def _above(self, node: str) -> list[str]:
        level = LEVEL[_tier(node)]
        return [above for above in self._graph.successors(node) if LEVEL.get(_tier(above), -1) > level]

    def _flows(self) -> dict[tuple[str, str], float]:
        """Return how many GPUs' worth of traffic climbs each link when all placed GPUs send."""
        if self._flow is None:
            self._flow = defaultdict(float)
            through: dict[str, float] = defaultdict(float, {f"gpu:{gpu}": 1.0 for gpu in self._placed})
            climbing = (name for name in self._graph if _tier(name) in LEVEL)
            # From the bottom up: what goes through a switch is known only when all below it have sent.
            for node in sorted(climbing, key=lambda name: LEVEL[_tier(name)]):
                above = self._above(node)
                widths = [self._graph.edges[node, up]["bandwidth_bytes_per_s"] for up in above]
                for up, width in zip(above, widths, strict=True):
                    part = through[node] * width / sum(widths)
                    self._flow[node, up] = part
                    through[up] += part
        return self._flow


@dataclass(frozen=True, slots=True)
class _WayUp:
    """Rate at which one GPU can climb, the latency of the climb, and the switches on the way."""

    bytes_per_s: float
    latency_s: float
    nodes: frozenset[str]


def _tier(name: str) -> str:
    return name.partition(":")[0]


def tiers(cluster: Cluster) -> list[Tier]:
    """Return what one GPU of *cluster* gets at every distance, nearest first.

    A machine whose fabric is given by its kind is taken to be large enough to have every tier, because a
    small one may have fewer. Raises FabricError.
    """
    full = _with_every_tier(cluster)
    reach = Reach(fabric(full), range(full.n_gpus))
    found: dict[str, Tier] = {}
    for other in range(1, full.n_gpus):
        name = reach.tier_name(0, other)
        # The nearest pair stands for a level; whether the others reach each other has to be found out.
        if name == "peer" or name not in found:
            found.setdefault(name, reach.tier(0, other))
    return sorted(found.values(), key=lambda tier: LEVEL.get(tier.name, 0))


def _with_every_tier(cluster: Cluster) -> Cluster:
    spec = cluster.fabric_spec
    if spec.links or cluster.nic is None or spec.kind in {"node", "torus"}:
        return cluster
    # One node more than a leaf, or a group, holds: some pair then has to go above it.
    n_nodes = max(spec.nodes_per_leaf, spec.group_nodes) + 1
    return cluster.sized(max(cluster.n_gpus, cluster.gpus_per_node * n_nodes))
