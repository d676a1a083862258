"""Ways between nodes that pass on whole chunks only: SHARP, PAT, and those of textbooks.

Each takes the kind, the bytes, the shape of the group, the way out of a node, and what a collective inside a
node takes; and returns latency, time between nodes and time inside them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil, log2
from types import MappingProxyType
from typing import Final, NamedTuple

from foretrace.simulator.network.collectives import bus_factor, ring_steps
from foretrace.simulator.network.nccl import (
    COLLNET_S,
    PAT_BASE_S,
    PAT_NET,
    PAT_RANK_S,
    PAT_SHARE,
    POST_S,
    PROTOCOLS,
)
from foretrace.topologies.shape import GroupShape

Inside = Callable[[str, float, int, float], tuple[float, float]]
"""Latency and wire time of a collective inside a node: kind, bytes, ranks, bytes per second of a rank."""


class Out(NamedTuple):
    """The way out of a node.

    Attributes:
        bytes_per_s: what the members of one node send out of it together.
        hop_s: what a hop between nodes takes.
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
    odd = n & (n - 1) > 0
    steps = passes * (n.bit_length() - 1 + odd)
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


SIMPLE_WAYS: Final[Mapping[str, Callable[[str, int, GroupShape, Out, Inside], Cost]]] = MappingProxyType(
    {
        "collnet": collnet,
        "pat": pat,
        "halving_doubling": halving_doubling,
        "direct": direct,
        "hierarchical": hierarchical,
    }
)
"""Ways in the protocol with fences, by name."""

ANYWHERE: Final = ("pat", "halving_doubling", "direct")
"""Ways that send across all nodes at once, not to neighbours in a ring or a tree."""

SERIAL: Final = ("hierarchical",)
"""Ways whose parts inside and between nodes follow one another."""
