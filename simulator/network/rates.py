"""How fast the members of one node send out of it together, and how long that way takes to fill."""

from __future__ import annotations

from math import inf

from simulator.network.nccl import (
    LL_OF_NVLINK,
    P2P_CHANNELS,
    PROTOCOLS,
    STAGED_BYTES_PER_S,
    STAGED_ONE_WAY_BYTES_PER_S,
    Protocol,
)
from topologies.cluster import Cluster
from topologies.reach import GroupShape


def rate(cluster: Cluster, shape: GroupShape, protocol: Protocol, kind: str = "all_reduce") -> float:
    """Return what the members of a group in one node send out of it together in *protocol*, in bytes/s.

    A ring leaves a node by one NIC, so that a group has no more NICs than rings; sends take the nearest.
    """
    nic, width = cluster.nic, shape.inter_bytes_per_s
    if nic is None:
        return min(width * protocol.share, most(cluster, protocol))
    if cluster.nics_used:
        width *= cluster.nics_used / cluster.nics_per_node
    if cluster.rings_out and kind not in ("p2p", "all_to_all"):
        width = min(width, cluster.rings_out * nic.bandwidth_bytes_per_s)
    used = nic.efficiency
    if not nic.gpu_direct:
        staged = STAGED_ONE_WAY_BYTES_PER_S if kind == "p2p" else STAGED_BYTES_PER_S
        used = min(used, staged / nic.bandwidth_bytes_per_s)
    found = min(width * used * protocol.share, most(cluster, protocol))
    return min(found, P2P_CHANNELS * nic.flow_bytes_per_s) if kind == "p2p" else found


def most(cluster: Cluster, protocol: Protocol) -> float:
    """Return what *protocol* carries at most out of a node, however wide its NICs are, in bytes/s."""
    intra, low_latency = cluster.intra, protocol.share <= PROTOCOLS["ll"].share
    return LL_OF_NVLINK * intra.bandwidth_bytes_per_s if low_latency and intra.kind == "nvlink" else inf


def fill_s(cluster: Cluster, size_bytes: int, shape: GroupShape, hops: int, protocol: Protocol) -> float:
    """Return how long the first chunk takes through *hops* that each pass on whole chunks only.

    A link that delivers out of order lets nobody read a chunk before its last byte. Chunks shrink for small
    arrays, so that there are at least half as many as hops.
    """
    nic = cluster.nic
    if not nic or not nic.chunk_bytes or protocol.share < 1:
        return 0.0
    rails = max(1.0, min(float(shape.n_local), shape.inter_bytes_per_s / nic.bandwidth_bytes_per_s))
    chunk_bytes = min(nic.chunk_bytes * rails * hops, 2.0 * size_bytes)
    return chunk_bytes / shape.inter_bytes_per_s
