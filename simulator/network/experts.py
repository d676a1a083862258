"""How tokens go to their experts and back: over the NICs and NVLink at once, or over the NICs alone."""

from __future__ import annotations

from typing import Final

from foretrace.simulator.errors import SimulationError
from foretrace.simulator.network.collectives import bus_factor
from foretrace.simulator.network.way import Way
from foretrace.simulator.network.ways_simple import Inside
from foretrace.simulator.workload.dispatch import Routing, exchange_s, handed_on_s, rdma_exchange_s
from foretrace.topologies.cluster import Cluster
from foretrace.topologies.shape import GroupShape

LARGE: Final = 1 << 29
"""Bytes at which a collective inside a node goes as fast as it can."""

NOTIFY_S: Final = 68e-6
"""Time in which ranks of several nodes tell each other how many tokens will come, and clean their queues:
68 us in one dispatch and 82 in another between two nodes of H200 (uccl-project/uccl pull request 441), 96 and
more among four of H100 (deepseek-ai/DeepEP issue 397)."""


def over_rails(cluster: Cluster, routing: Routing, shape: GroupShape, inside: Inside) -> Way:
    """Return the way of a dispatch or combine over the NIC of each rail and NVLink from there.

    Between nodes kernels take tokens from the NIC and hand them on, which may be slower than both.

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
    if shape.n_domains == 1:
        return Way(cluster.intra.latency_s, near_s, "experts/rails", near_s)
    kernels_s = handed_on_s(routing, shape, cluster.intra.experts_bytes_per_s)
    latency_s = shape.inter_latency_s + NOTIFY_S
    return Way(latency_s, max(near_s, far_s, kernels_s), "experts/rails", near_s, far_s)


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
