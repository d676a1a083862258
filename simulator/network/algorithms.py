"""Algorithms of a collective between nodes: latency and wire time of each, in each protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, log2
from types import MappingProxyType
from typing import Final, NamedTuple

from foretrace.simulator.errors import SimulationError
from foretrace.simulator.network.collectives import bus_factor, ring_steps, tree_factor, tree_hops
from foretrace.simulator.network.exchange import Load
from foretrace.simulator.network.nccl import (
    CHANNEL_BYTES_PER_S,
    COLLNET_S,
    FEW_CHANNELS,
    FLUSH_S,
    LL_MOST_BYTES_PER_S,
    LL_MOST_ELSEWHERE_BYTES_PER_S,
    LL_TREE,
    NVLS_INTRA_S,
    NVLS_NET_S,
    P2P_CHANNELS,
    P2P_CHUNK_BYTES,
    PAT_BASE_S,
    PAT_NET,
    PAT_RANK_S,
    PAT_SHARE,
    POST_S,
    POSTING_ELSEWHERE_S,
    POSTING_S,
    POSTS_OF_SIMPLE,
    PROTOCOLS,
    SENDS,
    STAGED_BYTES_PER_S,
    STAGED_COUNTED_BYTES_PER_S,
    STAGED_ONE_WAY_BYTES_PER_S,
    STAGED_PACE,
    TREE_AS_COUNTED,
    VOLTA,
    WITHOUT_FLUSH,
    Choice,
    Protocol,
    unable,
)
from foretrace.simulator.workload.dispatch import CROWD_SHARE
from foretrace.topologies.cluster import Cluster
from foretrace.topologies.shape import GroupShape

# How fast the members of one node send out of it together, and how long that way takes to fill.


def rate(cluster: Cluster, shape: GroupShape, protocol: Protocol, kind: str = "all_reduce") -> float:
    """Return what the members of a group in one node send out of it together in *protocol*, in bytes/s."""
    nic, wide = cluster.nic, width(cluster, shape, kind)
    if nic is None:
        return min(wide * protocol.share, most(cluster, protocol, shape.n_domains))
    used = nic.efficiency
    if not nic.gpu_direct or _through_host(protocol):
        used = min(used, staged(kind, shape.n_domains) / nic.bandwidth_bytes_per_s)
    found = min(wide * used * protocol.share, most(cluster, protocol, shape.n_domains))
    return min(found, P2P_CHANNELS * nic.flow_bytes_per_s) if kind == "p2p" else found


def staged(kind: str, n_nodes: int) -> float:
    """Return what a NIC carries for *kind* among *n_nodes* where every byte passes the host, in bytes/s."""
    if kind == "p2p":
        return STAGED_ONE_WAY_BYTES_PER_S
    return STAGED_BYTES_PER_S * float(n_nodes**-STAGED_PACE)


def counted(cluster: Cluster, shape: GroupShape) -> float:
    """Return what NCCL takes a group's way out of a node to carry when it chooses, in bytes/s.

    It knows what NICs and PCIe are said to carry, not what they reach.
    """
    nic, wide = cluster.nic, width(cluster, shape)
    if nic is None or nic.gpu_direct:
        return wide
    return wide * min(1.0, STAGED_COUNTED_BYTES_PER_S / nic.bandwidth_bytes_per_s)


def width(cluster: Cluster, shape: GroupShape, kind: str = "all_reduce") -> float:
    """Return the width of the NICs that a group uses, in bytes/s.

    A ring leaves a node by one NIC, so that a group has no more NICs than rings, and climbs above a leaf
    only where it leaves it; sends take the nearest NIC, and go anywhere.
    """
    nic, wide = cluster.nic, shape.inter_bytes_per_s if kind in SENDS else shape.ring_bytes_per_s
    if nic is None:
        return wide
    if cluster.nics_used:
        wide *= cluster.nics_used / cluster.nics_per_node
    if cluster.rings_out and kind not in SENDS:
        wide = min(wide, cluster.rings_out * nic.bandwidth_bytes_per_s)
    return wide


def most(cluster: Cluster, protocol: Protocol, n_nodes: int) -> float:
    """Return what *protocol* carries at most out of one of *n_nodes*, however wide the NICs, in bytes/s."""
    if not _through_host(protocol):
        return inf
    among_two, among_more = LL_MOST_BYTES_PER_S.get(cluster.cpu, LL_MOST_ELSEWHERE_BYTES_PER_S)
    return among_two if n_nodes <= 2 else among_more


def channels_most(cluster: Cluster, shape: GroupShape, way: str) -> float:
    """Return the most bus bandwidth of *way*, e.g. ``"tree/simple"``, over its channels, in bytes/s."""
    # Compute capabilities 7, 8 and 9 are rows 0 to 2; all from 10 on are in the last one.
    generation = min(int(cluster.device.compute_capability) - VOLTA, 3)
    if way not in CHANNEL_BYTES_PER_S or generation < 0 or cluster.nic is None:
        return inf
    # A channel for each NIC that the group reaches, but no more than it has members in a node.
    channels = max(1, round(min(shape.n_local, width(cluster, shape) / cluster.nic.bandwidth_bytes_per_s)))
    if channels <= FEW_CHANNELS and cluster.device.compute_capability >= WITHOUT_FLUSH:
        channels *= 2
    # Columns: one node, two, and more.
    return channels * CHANNEL_BYTES_PER_S[way][generation][min(shape.n_domains, 3) - 1]


def _through_host(protocol: Protocol) -> bool:
    """Return whether the buffers of *protocol* lie in the memory of the host, whatever the NICs can reach."""
    # ``<=``: a tree in LL is asked for with an even smaller share (``LL_TREE``).
    return protocol.share <= PROTOCOLS["ll"].share


def ring_hop_s(cluster: Cluster, protocol: Protocol) -> float:
    """Return what a hop inside a node takes in a ring over nodes: no less than posting a message to a NIC."""
    # Only Simple has all of the wire, a share of 1.
    posts = 1 if protocol.share < 1 else POSTS_OF_SIMPLE
    return max(protocol.ring_intra_s, posts * POSTING_S.get(cluster.cpu, POSTING_ELSEWHERE_S))


def net_hop_s(
    cluster: Cluster, shape: GroupShape, protocol: Protocol, beyond_s: float, kind: str = "all_reduce"
) -> float:
    """Return what a hop between nodes takes: the link's latency and what NCCL adds, *beyond_s*.

    Hops of a ring or a tree follow one another, so that their mean counts; of sends the longest does.

    GPUs since Hopper need no flush, a read of what a NIC wrote before the kernel is told of it.
    """
    # Only Simple, whose share is 1, has the flush in its figure.
    if protocol.share == 1 and cluster.device.compute_capability >= WITHOUT_FLUSH:
        beyond_s -= FLUSH_S
    return (shape.inter_latency_s if kind in SENDS else shape.ring_latency_s) + beyond_s


def wait_s(cluster: Cluster, shape: GroupShape, message_bytes: float, hidden_s: float = 0.0) -> float:
    """Return how long the first message waits for its receiver to say where to put it.

    A short one goes ahead and is copied there later (``eager_bytes``). The word crosses the network once,
    from the start of the collective on, so that *hidden_s* of work before the first message hides as much
    of it; later words come while other messages are under way.
    """
    nic = cluster.nic
    if not nic or not nic.eager_bytes or message_bytes <= nic.eager_bytes:
        return 0.0
    return max(0.0, shape.inter_latency_s - hidden_s)


def fill_s(cluster: Cluster, size_bytes: int, shape: GroupShape, hops: int, protocol: Protocol) -> float:
    """Return how long the first chunk takes through *hops* that each pass on whole chunks only.

    A link that delivers out of order lets nobody read a chunk before its last byte. Chunks shrink for small
    arrays, so that there are at least half as many as hops.
    """
    nic = cluster.nic
    if not nic or not nic.chunk_bytes or protocol.share < 1:
        return 0.0
    rails = max(1.0, min(float(shape.n_local), shape.ring_bytes_per_s / nic.bandwidth_bytes_per_s))
    chunk_bytes = min(nic.chunk_bytes * rails * hops, 2.0 * size_bytes)
    return chunk_bytes / shape.ring_bytes_per_s


# Which of ring and tree NCCL takes for an all-reduce between nodes: its own estimate, not what is fastest.
#
# NCCL estimates latency + S / bandwidth for each algorithm and protocol and takes the least. It counts
# the algorithm bandwidth of a tree as half of the bandwidth between nodes, also for two nodes, where each
# has but one child and could have all of it: large arrays go round a ring there though a tree would take
# half the time.
#
# Reference: NCCL, src/graph/tuning.cc, ncclTopoTuneModel and ncclTopoGetAlgoTime.

TREE_SHARE: Final = 0.92
"""What NCCL takes a tree to reach of the bandwidth between nodes, before it is halved."""

LL128_TREE: Final = 120 / 128
"""Share of that which a tree in LL128 carries."""

PLATEAU: Final = 1.4
PLATEAU_BYTES_PER_RANK: Final = 4096
"""A ring in the protocol with fences is taken to start so many times as late, from this size per rank on."""

CORRECTION: Final = {
    "ll": (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1),
    "ll128": (
        *(1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6),
        *(0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1),
    ),
    "simple": (
        *(0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6),
        *(0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9),
    ),
}
"""Share of that which NCCL expects of a tree at 64 B, 128 B, ... 128 MiB, by protocol."""


class Rates(NamedTuple):
    """What there is between nodes, with all members of a node together.

    Attributes:
        bytes_per_s: rate of the wire, as NCCL counts it.
        most_bytes_per_s: rate that a protocol can carry at most, whatever the wire.
        ring_hop_s: what a hop of a ring inside a node takes.
        channels_bytes_per_s: rate that the channels of this algorithm carry at most in this protocol.
    """

    bytes_per_s: float
    most_bytes_per_s: float
    ring_hop_s: float
    channels_bytes_per_s: float


def ring_estimate_s(
    size_bytes: float, shape: GroupShape, name: str, protocol: Protocol, rates: Rates
) -> float:
    """Return what NCCL expects of a ring."""
    n = shape.n_ranks
    net_steps = ring_steps("all_reduce", shape.n_domains)
    latency_s = protocol.ring_base_s + net_steps * (shape.inter_latency_s + protocol.net_s(shape.n_local))
    latency_s += (ring_steps("all_reduce", n) - net_steps) * rates.ring_hop_s
    if name == "simple" and size_bytes >= n * PLATEAU_BYTES_PER_RANK:
        latency_s *= PLATEAU
    bytes_per_s = min(protocol.share * rates.bytes_per_s, rates.most_bytes_per_s, rates.channels_bytes_per_s)
    return latency_s + ring_steps("all_reduce", n) / n * size_bytes / bytes_per_s


def tree_estimate_s(
    size_bytes: float, shape: GroupShape, name: str, protocol: Protocol, rates: Rates
) -> float:
    """Return what NCCL expects of two trees; arguments as for ``ring_estimate_s``."""
    latency_s = protocol.tree_base_s + 2 * (shape.n_local - 1) * protocol.tree_intra_s
    latency_s += tree_hops(shape.n_domains) * (shape.inter_latency_s + protocol.tree_net_s)
    share = TREE_SHARE * (
        LL128_TREE if name == "ll128" else protocol.share * (LL_TREE if name == "ll" else 1.0)
    )
    bytes_per_s = min(share * rates.bytes_per_s, rates.most_bytes_per_s, rates.channels_bytes_per_s)
    # The first entry is for 64 B, each next one for twice as much.
    step = int(log2(size_bytes / 64)) if size_bytes >= 64 else 0
    if step < len(CORRECTION[name]):
        bytes_per_s *= CORRECTION[name][step]
    return latency_s + 2 * size_bytes / bytes_per_s


class Way(NamedTuple):
    """One way to do a collective: what it costs before the first byte, what the bytes take, its name.

    ``near_s`` and ``far_s`` are what the bytes take inside the nodes and between them; the longer is
    ``wire_s``.
    """

    latency_s: float
    wire_s: float
    name: str
    near_s: float = 0.0
    far_s: float = 0.0

    @property
    def shares(self) -> tuple[float, float]:
        """Share of its wire time for which the way inside a node, and the way out of it, is full."""
        if not self.wire_s:
            return 0.0, 0.0
        return min(self.near_s / self.wire_s, 1.0), min(self.far_s / self.wire_s, 1.0)

    @property
    def total_s(self) -> float:
        """Time if nothing else uses the links."""
        return self.latency_s + self.wire_s


def way_of(latency_s: float, far_s: float, near_s: float, name: str, *, serial: bool = False) -> Way:
    """Return a way whose bytes flow inside nodes and between them at once, or one after the other."""
    wire_s = far_s + near_s if serial else max(far_s, near_s)
    return Way(latency_s, wire_s, name, near_s, far_s)


Inside = Callable[[str, float, int, float], tuple[float, float]]
"""Latency and wire time of a collective inside a node: kind, bytes, ranks, bytes per second of a rank."""


class Out(NamedTuple):
    """The way out of a node.

    *bytes_per_s*: what the members of one node send out of it together.
    """

    bytes_per_s: float
    hop_s: float


Cost = tuple[float, float, float]
"""Latency, time of the bytes between nodes, and time of those inside them, both flowing at once."""


def collnet(kind: str, size_bytes: int, shape: GroupShape, out: Out, inside: Inside) -> Cost:
    """Return the cost where switches between nodes reduce (SHARP): each node sends ``S``.

    For an all-reduce a chain leads through each node to them, and another way back (NCCL's CollNetChain),
    which moves ``2 S`` over each link. Reference: Graham et al. 2016, doi:10.1109/COMHPC.2016.006.
    """
    net_s = size_bytes / out.bytes_per_s
    latency_s = shape.inter_latency_s + COLLNET_S
    if shape.n_local < 2:
        return latency_s, net_s, 0.0
    if kind == "all_reduce":
        return latency_s, net_s, chain_s(size_bytes, shape, inside)
    return latency_s, net_s, inside(kind, size_bytes, shape.n_local, shape.intra_bytes_per_s)[1]


def chain_s(size_bytes: int, shape: GroupShape, inside: Inside) -> float:
    """Return the wire time of a chain through a node, up and down again: ``2 S`` over each link."""
    halves = (
        inside(half, size_bytes, shape.n_local, shape.intra_bytes_per_s)[1]
        for half in ("reduce_scatter", "all_gather")
    )
    # The two halves move ``2(n-1)/n S`` over each link; this scales them to ``2 S``.
    return sum(halves) * 2 / bus_factor("all_reduce", shape.n_local)


def pat(kind: str, size_bytes: int, shape: GroupShape, out: Out, inside: Inside) -> Cost:
    """Return the cost of NCCL's parallel aggregated trees, for one rank per node."""
    n = shape.n_ranks
    latency_s = PAT_BASE_S + ceil(log2(n)) * PAT_NET * out.hop_s + n * PAT_RANK_S
    return latency_s, bus_factor(kind, n) * size_bytes / (PAT_SHARE * out.bytes_per_s), 0.0


def halving_doubling(kind: str, size_bytes: int, shape: GroupShape, out: Out, inside: Inside) -> Cost:
    """Return the cost of recursive halving and doubling: ``log2 n`` steps each way.

    Reference: Thakur, Rabenseifner & Gropp 2005, doi:10.1177/1094342005051521. Ranks beyond a
    power of two are folded in first: one more step, and all bytes once more.
    """
    simple, n = PROTOCOLS["simple"], shape.n_ranks
    passes = 2 if kind == "all_reduce" else 1
    # Whether some ranks are beyond a power of two.
    odd = n & (n - 1) > 0
    steps = passes * (n.bit_length() - 1 + odd)
    # The array is halved among a power of two of ranks, and those beyond send all of it and get it back.
    wire = (bus_factor(kind, 1 << (n.bit_length() - 1)) + passes * odd) * size_bytes
    return simple.ring_base_s + steps * out.hop_s, shape.n_local * wire / out.bytes_per_s, 0.0


def direct(kind: str, size_bytes: int, shape: GroupShape, out: Out, inside: Inside) -> Cost:
    """Return the cost where every rank sends its part to every other at once."""
    simple, n, far = PROTOCOLS["simple"], shape.n_ranks, shape.n_ranks - shape.n_local
    passes = 2 if kind == "all_reduce" else 1
    hop_s = out.hop_s + far * POST_S
    wire = passes * shape.n_local * far / n * size_bytes
    return simple.ring_base_s + passes * hop_s, wire / out.bytes_per_s, 0.0


def hierarchical(kind: str, size_bytes: int, shape: GroupShape, out: Out, inside: Inside) -> Cost:
    """Return the cost of three steps, one after another: inside the nodes, between them, inside again.

    Members of a node scatter the array among them, each of them works with its own kind in other nodes,
    and they gather it. A gather leaves out the first step, a scatter the last. Nothing overlaps, so that
    the ways inside and between never are full at once. Reference: Jia et al. 2018, arXiv:1807.11205.
    """
    simple, nodes, n_local = PROTOCOLS["simple"], shape.n_domains, shape.n_local
    latency_s = simple.ring_base_s + ring_steps(kind, nodes) * out.hop_s
    net_s = bus_factor(kind, nodes) * size_bytes / out.bytes_per_s
    if n_local < 2:
        return latency_s, net_s, 0.0
    steps = ("reduce_scatter", "all_gather") if kind == "all_reduce" else (kind,)
    parts = [inside(step, size_bytes, n_local, shape.intra_bytes_per_s) for step in steps]
    return latency_s + sum(part[0] for part in parts), net_s, sum(part[1] for part in parts)


IN_SIMPLE: Final[Mapping[str, Callable[[str, int, GroupShape, Out, Inside], Cost]]] = MappingProxyType(
    {
        "collnet": collnet,
        "pat": pat,
        "halving_doubling": halving_doubling,
        "direct": direct,
        "hierarchical": hierarchical,
    }
)
"""Algorithms in the protocol with fences alone, which pass on whole chunks: SHARP, PAT, those of textbooks.

Each takes the kind, the bytes, the shape of the group, the way out of a node, and what a collective inside a
node takes; and returns latency, time between nodes and time inside them.
"""

ANYWHERE: Final = ("pat", "halving_doubling", "direct")
"""Those that send across all nodes at once, not to neighbours in a ring or a tree."""

SERIAL: Final = ("hierarchical",)
"""Those whose parts inside and between nodes follow one another."""


@dataclass(frozen=True, slots=True)
class Between:
    """Finds the ways of groups that span nodes.

    *inside*: what the part inside a node takes. *choice*: algorithms and protocols that may be used.
    """

    cluster: Cluster
    inside: Inside
    choice: Choice

    def ways(self, kind: str, size_bytes: int, shape: GroupShape, *, tuned: bool = True) -> Iterator[Way]:
        """Yield the ways to move *size_bytes* by *kind* in a group of *shape*.

        Of ring and tree for an all-reduce only the one that NCCL takes, unless *tuned* is false. Raises
        SimulationError if the choice leaves no protocol that the network bears, or no algorithm.
        """
        shape = self._crowded(shape)
        names = self._protocols(shape, kind, size_bytes)
        # NCCL does not take the fastest: it goes by an estimate of its own, which is followed here.
        taken = self._tuned(size_bytes, shape, names) if tuned and kind == "all_reduce" else None
        for name in names:
            for algorithm, way in self._by_protocol(kind, size_bytes, shape, name):
                if taken is None or (algorithm, name) == taken:
                    yield way_of(*way, f"{algorithm}/{name}")
        for algorithm, way in self._in_simple(kind, size_bytes, shape) if "simple" in names else ():
            yield way_of(*way, f"{algorithm}/simple", serial=algorithm in SERIAL)

    def _protocols(self, shape: GroupShape, kind: str, size_bytes: float) -> list[str]:
        """Return the protocols that may be used for *kind* in a group of *shape*.

        Sends, and those of an all-to-all, are in LL only up to ``P2P_LL_BYTES``, else in Simple, whatever
        ``NCCL_PROTO`` says (``addP2pToPlan`` in src/enqueue.cc).

        NCCL takes LL128 by default only where nothing passes a host's memory, which might hand on half a
        line: over NVLink inside nodes, and NICs that reach the memory of GPUs (``ncclTopoTuneModel`` in
        src/graph/tuning.cc: ``typeIntra <= PATH_NVB``, ``typeInter <= PATH_PXB``). Raises SimulationError if
        the network bears none of them.
        """
        nic = self.cluster.nic
        allowed = nic.protocols if nic and nic.protocols else tuple(PROTOCOLS)
        if kind in SENDS:
            # The size is what a rank has for all, itself included: a message is its part for one of them.
            message_bytes = size_bytes / (shape.n_ranks if kind == "all_to_all" else 1)
            return [
                name for name in ("ll", "simple") if name in allowed and message_bytes <= _most_sent(name)
            ]
        asked = self.choice.of(kind).protocols
        names = [name for name in asked if name in allowed]
        if not names:
            raise SimulationError(
                f"protocol {', '.join(asked)}: link {nic.name if nic else 'none'} bears only "
                f"{', '.join(allowed)}"
            )
        hosts = (nic and not nic.gpu_direct) or (shape.n_local > 1 and self.cluster.intra.kind == "pcie")
        # Nothing else is left if a user asks for LL128 alone: then NCCL takes it, hosts or not.
        return [name for name in names if not (hosts and name == "ll128")] or names

    def _crowded(self, shape: GroupShape) -> GroupShape:
        """Return *shape* with what other jobs leave of its ways out.

        Where they fill a share ``u`` of a link, ``1 - u`` of its bandwidth is left, and a message waits
        ``1 / (1 - u)`` times as long (M/M/1, Kleinrock 1975, Queueing Systems I, section 3.2).
        """
        left = self.cluster.fabric_spec.left_by_others(shape.n_domains)
        if left == 1:
            return shape
        return replace(
            shape,
            inter_bytes_per_s=shape.inter_bytes_per_s * left,
            inter_latency_s=shape.inter_latency_s / left,
            ring_bytes_per_s=shape.ring_bytes_per_s * left,
            ring_latency_s=shape.ring_latency_s / left,
        )

    def _tuned(self, size_bytes: int, shape: GroupShape, names: Sequence[str]) -> tuple[str, str] | None:
        """Return which of ring and tree NCCL takes for an all-reduce, and its protocol.

        None where the software of a link has a tuner of its own, that takes the fastest.
        """
        nic = self.cluster.nic
        algorithms = self._algorithms("all_reduce", shape)
        if (nic and nic.algorithms) or not {"ring", "tree"} <= set(algorithms):
            return None
        estimates = {"ring": ring_estimate_s, "tree": tree_estimate_s}
        found = {
            (algorithm, name): estimate(
                size_bytes,
                shape,
                name,
                PROTOCOLS[name],
                Rates(
                    counted(self.cluster, shape),
                    most(self.cluster, PROTOCOLS[name], shape.n_domains),
                    ring_hop_s(self.cluster, PROTOCOLS[name]),
                    channels_most(self.cluster, shape, f"{algorithm}/{name}"),
                ),
            )
            for algorithm, estimate in estimates.items()
            for name in names
        }
        return min(found, key=lambda key: found[key])

    def _by_protocol(
        self, kind: str, size_bytes: int, shape: GroupShape, name: str
    ) -> Iterator[tuple[str, Cost]]:
        protocol = PROTOCOLS[name]
        if kind == "all_to_all":
            yield "pairwise", self._pairwise(size_bytes, shape, protocol)
            return
        if "ring" in self._algorithms(kind, shape):
            yield "send" if kind == "p2p" else "ring", self._ring(kind, size_bytes, shape, protocol)
        if "tree" in self._algorithms(kind, shape):
            yield "tree", self._tree(size_bytes, shape, name)

    def _in_simple(self, kind: str, size_bytes: int, shape: GroupShape) -> Iterator[tuple[str, Cost]]:
        simple = PROTOCOLS["simple"]
        for algorithm in self._algorithms(kind, shape):
            goes = "all_to_all" if algorithm in ANYWHERE else kind
            out = Out(
                rate(self.cluster, shape, simple, goes),
                net_hop_s(self.cluster, shape, simple, simple.ring_net_s, goes),
            )
            if algorithm == "nvls_tree":
                yield algorithm, self._nvls_tree(size_bytes, shape)
            elif algorithm in IN_SIMPLE:
                yield algorithm, IN_SIMPLE[algorithm](kind, size_bytes, shape, out, self.inside)

    def _algorithms(self, kind: str, shape: GroupShape) -> tuple[str, ...]:
        """Return the algorithms that may do *kind*. Raises SimulationError if none asked for does."""
        nic, asked = self.cluster.nic, self.choice.of(kind)
        if kind in SENDS:
            return ("ring",)
        allowed = nic.algorithms if nic and nic.algorithms and not asked.forced else asked.algorithms
        fit = [name for name in _ABLE.get(kind, ("ring",)) if self._applies(name, shape)]
        found = tuple(name for name in allowed if name in fit)
        if not found and asked.forced:
            raise unable(asked, kind, f"over {shape.n_domains} nodes of {self.cluster.name}", fit)
        return found or ("ring",)

    def _applies(self, algorithm: str, shape: GroupShape) -> bool:
        nic = self.cluster.nic
        return {
            "nvls_tree": self.cluster.intra.reduces and shape.n_local > 1,
            "collnet": bool(nic and nic.reduces),
            "pat": shape.n_local == 1,
        }.get(algorithm, True)

    def _ring(self, kind: str, size_bytes: int, shape: GroupShape, protocol: Protocol) -> Cost:
        """Return the cost of one ring through all ranks, on as many rails as the group has."""
        n, n_local = shape.n_ranks, shape.n_local
        net_steps = ring_steps(kind, shape.n_domains)
        hop_s = net_hop_s(self.cluster, shape, protocol, protocol.net_s(n_local))
        latency_s = protocol.ring_base_s + net_steps * hop_s
        latency_s += (ring_steps(kind, n) - net_steps) * ring_hop_s(self.cluster, protocol)
        latency_s += wait_s(self.cluster, shape, size_bytes / (1 if kind in WHOLE else n))
        net_s = bus_factor(kind, n) * size_bytes / rate(self.cluster, shape, protocol, kind)
        # A send is handed to the NIC chunk by chunk, each posted on its own.
        if kind == "p2p":
            net_s += size_bytes / P2P_CHUNK_BYTES * POST_S
        if n_local < 2:
            return latency_s, net_s, 0.0
        kinds = ("reduce_scatter", "all_gather") if kind == "all_reduce" else (kind,)
        local_s = sum(self.inside(part, size_bytes, n_local, shape.intra_bytes_per_s)[1] for part in kinds)
        # What was measured inside a node is a ring of its members; one through all nodes moves more over the
        # same links.
        return latency_s, net_s, local_s * bus_factor(kind, n) / bus_factor(kind, n_local)

    def _tree(self, size_bytes: int, shape: GroupShape, name: str) -> Cost:
        """Return the cost of an all-reduce by two trees over chains inside the nodes, in the protocol *name*.

        A chain moves ``2 S`` over each link instead of the ``2(n-1)/n S`` of a ring.
        """
        protocol = PROTOCOLS[name]
        n_local, hops = shape.n_local, tree_hops(shape.n_domains)
        hop_s = net_hop_s(self.cluster, shape, protocol, protocol.tree_net_s)
        latency_s = protocol.tree_base_s + 2 * (n_local - 1) * protocol.tree_intra_s + hops * hop_s
        slow = LL_TREE if protocol.share <= PROTOCOLS["ll"].share else 1.0
        carried = protocol._replace(share=slow * protocol.share)
        net_s = tree_factor(shape.n_domains) * size_bytes / rate(self.cluster, shape, carried)
        # Elsewhere the rates of channels are what NCCL chooses by, not what is measured
        # (``TREE_AS_COUNTED``).
        if shape.n_domains > 2 or self.cluster.device.compute_capability >= TREE_AS_COUNTED:
            net_s = max(net_s, 2 * size_bytes / channels_most(self.cluster, shape, f"tree/{name}"))
        latency_s += fill_s(self.cluster, size_bytes, shape, hops + 2 * (n_local - 1), protocol)
        latency_s += wait_s(self.cluster, shape, size_bytes)
        if n_local < 2:
            return latency_s, net_s, 0.0
        return latency_s, net_s, chain_s(size_bytes, shape, self.inside)

    def _nvls_tree(self, size_bytes: int, shape: GroupShape) -> Cost:
        """Return the cost of switches that reduce in each node and two trees between them.

        On EFA it fills as slowly as a chain through the node would: 8 MiB to 1 GiB on two AWS p5.
        """
        simple, hops = PROTOCOLS["simple"], tree_hops(shape.n_domains)
        latency_s = NVLS_INTRA_S + hops * net_hop_s(self.cluster, shape, simple, NVLS_NET_S)
        latency_s += fill_s(self.cluster, size_bytes, shape, hops + 2 * (shape.n_local - 1), simple)
        latency_s += wait_s(self.cluster, shape, size_bytes, hidden_s=NVLS_INTRA_S)
        net_s = tree_factor(shape.n_domains) * size_bytes / rate(self.cluster, shape, simple)
        local_s = self.inside("all_reduce", size_bytes, shape.n_local, shape.intra_bytes_per_s)[1]
        return latency_s, net_s, local_s

    def _pairwise(self, size_bytes: float, shape: GroupShape, protocol: Protocol) -> Cost:
        """Return the cost of every rank sending to every other, near and far at once."""
        n, n_local = shape.n_ranks, shape.n_local
        far, near = (n - n_local) / n * size_bytes, (n_local - 1) / n * size_bytes
        return self._sends(far, near, n - n_local, shape, protocol)

    def _sends(
        self, far_bytes: float, near_bytes: float, far_peers: int, shape: GroupShape, protocol: Protocol
    ) -> Cost:
        """Return the cost where the busiest rank sends so much out of its node and so much inside it.

        From three nodes on, senders of several meet at each port.
        """
        n_local = shape.n_local
        hop_s = net_hop_s(self.cluster, shape, protocol, protocol.ring_net_s, "all_to_all")
        latency_s = protocol.ring_base_s + hop_s + far_peers * POST_S
        latency_s += wait_s(self.cluster, shape, far_bytes / max(far_peers, 1))
        left = CROWD_SHARE if shape.n_domains > 2 else 1.0
        net_s = n_local * far_bytes / (left * rate(self.cluster, shape, protocol, "all_to_all"))
        net_s += far_bytes / P2P_CHUNK_BYTES * POST_S
        if n_local < 2:
            return latency_s, net_s, 0.0
        # The array of which each of the members sends *near_bytes* to the others, keeping its own part.
        array_bytes = near_bytes * n_local / (n_local - 1)
        return latency_s, net_s, self.inside("all_to_all", array_bytes, n_local, shape.intra_bytes_per_s)[1]

    def exchange(self, load: Load, shape: GroupShape) -> Iterator[Way]:
        """Yield the ways of an all-to-all with a *load* of its own, in a group of *shape* over nodes.

        A rank uses the NICs that are nearest to it, so that the busiest rank sets the pace.
        """
        shape = self._crowded(shape)
        message_bytes = load.far_bytes / max(load.far_peers, 1)
        for name in self._protocols(shape, "p2p", message_bytes):
            way = self._sends(load.far_bytes, load.near_bytes, load.far_peers, shape, PROTOCOLS[name])
            yield way_of(*way, f"pairwise/{name}")


WHOLE: Final = ("p2p", "broadcast", "reduce")
"""What passes the whole array along a ring, not the part of one rank after another."""

P2P_LL_BYTES: Final = P2P_CHANNELS * 16384
"""Largest message that NCCL sends in a low-latency protocol: ``NCCL_P2P_LL_THRESHOLD`` in each channel."""


def _most_sent(protocol: str) -> float:
    return P2P_LL_BYTES if protocol == "ll" else inf


_ABLE: Final = {
    "all_reduce": ("ring", "tree", "nvls_tree", "collnet", "halving_doubling", "direct", "hierarchical"),
    **dict.fromkeys(
        ("all_gather", "reduce_scatter"),
        ("ring", "collnet", "pat", "halving_doubling", "direct", "hierarchical"),
    ),
}
"""What does a collective between nodes; others go round a ring."""
