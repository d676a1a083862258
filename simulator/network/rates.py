"""How fast the members of one node send out of it together, and how long that way takes to fill."""

from __future__ import annotations

from math import inf

from foretrace.simulator.network.nccl import (
    CHANNEL_BYTES_PER_S,
    FEW_CHANNELS,
    FLUSH_S,
    LL_MOST_BYTES_PER_S,
    LL_MOST_ELSEWHERE_BYTES_PER_S,
    P2P_CHANNELS,
    POSTING_ELSEWHERE_S,
    POSTING_S,
    POSTS_OF_SIMPLE,
    PROTOCOLS,
    SENDS,
    STAGED_BYTES_PER_S,
    STAGED_COUNTED_BYTES_PER_S,
    STAGED_ONE_WAY_BYTES_PER_S,
    STAGED_PACE,
    VOLTA,
    WITHOUT_FLUSH,
    Protocol,
)
from foretrace.topologies.cluster import Cluster
from foretrace.topologies.shape import GroupShape


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
    generation = min(int(cluster.device.compute_capability) - VOLTA, 3)
    if way not in CHANNEL_BYTES_PER_S or generation < 0 or cluster.nic is None:
        return inf
    channels = max(1, round(min(shape.n_local, width(cluster, shape) / cluster.nic.bandwidth_bytes_per_s)))
    if channels <= FEW_CHANNELS and cluster.device.compute_capability >= WITHOUT_FLUSH:
        channels *= 2
    return channels * CHANNEL_BYTES_PER_S[way][generation][min(shape.n_domains, 3) - 1]


def _through_host(protocol: Protocol) -> bool:
    """Return whether the buffers of *protocol* lie in the memory of the host, whatever the NICs can reach."""
    return protocol.share <= PROTOCOLS["ll"].share


def ring_hop_s(cluster: Cluster, protocol: Protocol) -> float:
    """Return what a hop inside a node takes in a ring over nodes: no less than posting a message to a NIC."""
    posts = 1 if protocol.share < 1 else POSTS_OF_SIMPLE
    return max(protocol.ring_intra_s, posts * POSTING_S.get(cluster.cpu, POSTING_ELSEWHERE_S))


def net_hop_s(
    cluster: Cluster, shape: GroupShape, protocol: Protocol, beyond_s: float, kind: str = "all_reduce"
) -> float:
    """Return what a hop between nodes takes: the link's latency and what NCCL adds, *beyond_s*.

    Hops of a ring or a tree follow one another, so that their mean counts; of sends the longest does.

    GPUs since Hopper need no flush, a read of what a NIC wrote before the kernel is told of it.
    """
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
