"""How tokens go to their experts and back: over the NICs and NVLink at once, or over the NICs alone."""

from __future__ import annotations

from typing import Final

from simulator.errors import SimulationError
from simulator.network.collectives import bus_factor
from simulator.network.way import Way
from simulator.network.ways_simple import Inside
from simulator.workload.dispatch import Routing, exchange_s, rdma_exchange_s
from topologies.cluster import Cluster
from topologies.reach import GroupShape

LARGE: Final = 1 << 29
"""Bytes at which a collective inside a node goes as fast as it can."""


def over_rails(cluster: Cluster, routing: Routing, shape: GroupShape, inside: Inside) -> Way:
    """Return the way of a dispatch or combine over the NIC of each rail and NVLink from there.

    Args:
        cluster: the machine.
        routing: how tokens choose experts.
        shape: of the group.
        inside: what a collective inside a node takes.
    """
    near_share = 1.0
    if shape.n_local > 1:
        _, wire_s = inside("all_to_all", LARGE, shape.n_local, shape.intra_bytes_per_s)
        near_share = bus_factor("all_to_all", shape.n_local) * LARGE / wire_s / shape.intra_bytes_per_s
    far_share = cluster.nic.efficiency if cluster.nic else 1.0
    near_s, far_s = exchange_s(routing, shape, near_share, far_share)
    latency_s = shape.inter_latency_s or cluster.intra.latency_s
    return Way(latency_s, max(near_s, far_s), "experts/rails", near_s, far_s)


def over_nics(cluster: Cluster, routing: Routing, shape: GroupShape) -> Way:
    """Return the way of the low-latency form: every token straight to each of its experts over the NICs.

    Raises:
        SimulationError: the machine has no NICs.
    """
    nic = cluster.nic
    if nic is None:
        raise SimulationError(f"cluster {cluster.name} has no NICs, which the low-latency form needs")
    rail = nic.efficiency * nic.bandwidth_bytes_per_s * cluster.nics_per_node / cluster.gpus_per_node
    wire_s = rdma_exchange_s(routing, shape.n_domains, rail)
    return Way(nic.latency_s, wire_s, "experts/rdma", 0.0, wire_s)
