"""Groups that communicate in every layer and lie across nodes (NVLink domains), and what that costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from foretrace.simulator.network.cost import Network
from foretrace.topologies.units import format_time
from foretrace.traces.layout import Layout

CHATTY: Final = {"tp": "all_reduce", "cp": "all_gather", "ep": "all_to_all"}
"""Axes that communicate in every layer of every micro-batch, and what they do most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowAxis:
    """An axis whose groups lie across nodes.

    *time_s*: time of one collective of *ranks*. *inside_s*: time of one among neighbours in a node, as many
    as fit; 0 where a node has one GPU. *fits*: whether the whole group would fit into one node.
    """

    axis: str
    ranks: tuple[int, ...]
    n_nodes: int
    time_s: float
    inside_s: float
    fits: bool

    def sentence(self, size_bytes: int) -> str:
        """Return what is slow and what it costs, as one line."""
        cure = (
            "another placement would keep it inside"
            if self.fits
            else f"no node has {len(self.ranks)} GPUs: a smaller {self.axis} would stay inside"
        )
        # A node of one GPU has no neighbours to compare with.
        beside = (
            f", {self.time_s / self.inside_s:.1f} times what it takes inside a node" if self.inside_s else ""
        )
        return (
            f"{self.axis}={len(self.ranks)} lies across {self.n_nodes} nodes (ranks {_ranks(self.ranks)}): "
            f"{CHATTY[self.axis]} of {size_bytes:,} bytes takes {format_time(self.time_s)}{beside}; {cure}"
        )


def across(layout: Layout, network: Network) -> list[str]:
    """Return the axes that communicate in every layer and have groups across nodes.

    Raises FabricError if the fabric does not join the ranks of a group.
    """
    return [
        axis
        for axis in CHATTY
        if any(len(group) > 1 and network.n_nodes(group) > 1 for group in layout.groups(axis))
    ]


def slow_axes(layout: Layout, network: Network, size_bytes: int) -> list[SlowAxis]:
    """Return the axes of ``across``, each with its slowest group.

    *network*: what the groups run over, with its placement. Raises FabricError if the fabric does not join
    the ranks of a group.
    """
    found = []
    for axis in across(layout, network):
        kind = CHATTY[axis]
        groups = [group for group in layout.groups(axis) if network.n_nodes(group) > 1]
        times_s = [_seconds(network, kind, size_bytes, group) for group in groups]
        time_s = max(times_s)
        ranks = groups[times_s.index(time_s)]
        per_node = min(len(ranks), network.cluster.gpus_per_node)
        inside_s = network.neighbours_s(kind, size_bytes, per_node)
        found.append(
            SlowAxis(
                axis=axis,
                ranks=tuple(ranks),
                n_nodes=network.n_nodes(ranks),
                time_s=time_s,
                inside_s=inside_s,
                fits=len(ranks) <= network.cluster.gpus_per_node,
            )
        )
    return found


def _seconds(network: Network, kind: str, size_bytes: int, ranks: tuple[int, ...]) -> float:
    transfer = network.collective(kind, size_bytes, ranks)
    return (transfer.latency_ns + transfer.wire_ns) * 1e-9


def _ranks(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:4])
    return shown if len(ranks) <= 4 else f"{shown}, ..."
