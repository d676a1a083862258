"""Which of ring and tree NCCL takes for an all-reduce between nodes: its own estimate, not what is fastest.

NCCL estimates ``latency + S / bandwidth`` for each algorithm and protocol and takes the least. It counts the
algorithm bandwidth of a tree as half of the bandwidth between nodes, also for two nodes, where each has but
one child and could have all of it: large arrays go round a ring there though a tree would take half the time.

Reference: NCCL, ``src/graph/tuning.cc``, ``ncclTopoTuneModel`` and ``ncclTopoGetAlgoTime``.
"""

from __future__ import annotations

from math import log2
from typing import Final, NamedTuple

from foretrace.simulator.network.collectives import ring_steps, tree_hops
from foretrace.simulator.network.nccl import LL_TREE, Protocol
from foretrace.topologies.shape import GroupShape

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
        1,
        1,
        1,
        1,
        1,
        0.9,
        0.8,
        0.8,
        0.8,
        0.7,
        0.6,
        0.6,
        0.6,
        0.6,
        0.6,
        0.6,
        0.8,
        0.9,
        0.9,
        0.9,
        0.9,
        1,
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
        bytes_per_s: that NCCL counts of the wire.
        most_bytes_per_s: that a protocol can carry whatever the wire.
        ring_hop_s: what a hop of a ring inside a node takes.
        channels_bytes_per_s: that the channels of this algorithm carry at most in this protocol.
    """

    bytes_per_s: float
    most_bytes_per_s: float
    ring_hop_s: float
    channels_bytes_per_s: float


def ring_estimate_s(
    size_bytes: float, shape: GroupShape, name: str, protocol: Protocol, rates: Rates
) -> float:
    """Return what NCCL expects of a ring.

    Args:
        size_bytes: of the array.
        shape: of the group.
        name: of the protocol.
        protocol: its figures.
        rates: what there is between nodes.
    """
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
    step = int(log2(size_bytes / 64)) if size_bytes >= 64 else 0
    if step < len(CORRECTION[name]):
        bytes_per_s *= CORRECTION[name][step]
    return latency_s + 2 * size_bytes / bytes_per_s
