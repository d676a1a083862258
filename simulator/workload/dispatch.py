"""What the dispatch and combine of a mixture of experts move: closed forms over evenly spread experts.

A token goes once to every node, and once to every GPU of it, that holds one of its experts: between nodes
over the NIC of its own rail, and from there over NVLink. Reference: DeepSeek-V3 technical report 2024,
arXiv:2412.19437, section 3.2; deepseek-ai/DeepEP is the code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from foretrace.simulator.errors import SimulationError
from foretrace.topologies.shape import GroupShape

CROWD_SHARE: Final = 0.84
"""What is left of a port when senders of many nodes meet there: 39 of 46 GB/s, dispatch to experts in 16 and
more nodes against one (deepseek-ai/DeepEP README, 1a0c8f6)."""

RAIL_SHARE: Final = 0.96
"""What tokens reach, straight to the GPU of the same rail, of what the ring of an all-reduce does: 45.4 GB/s
in the middle, of 47.5 per NIC of 50. DeepEP's second version, whose kernels hold nothing up, gets 45.0
between 2 nodes and 45.8 among 4 (its README, 0297fc8: 90 and 61 GB/s, of which a half and three quarters
leave a node)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How tokens choose experts.

    *tokens*: per rank. *max_nodes*: most nodes that the experts of a token may lie in; 0 is no limit.
    """

    tokens: int
    token_bytes: int
    top_k: int
    max_nodes: int = 0

    def __post_init__(self) -> None:
        if min(self.tokens, self.token_bytes, self.top_k) < 1 or self.max_nodes < 0:
            raise SimulationError(
                f"routing of {self.tokens} tokens of {self.token_bytes} bytes to {self.top_k} experts in "
                f"{self.max_nodes} nodes: all but the last are at least 1, and that is at least 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Copies that one token makes, on average.

    *near_hops*: ways over NVLink, in all nodes together.
    """

    nodes: float
    far_nodes: float
    gpus: float
    near_hops: float


def traffic(routing: Routing, n_nodes: int, n_local: int) -> Traffic:
    """Return the copies of a token among *n_nodes* nodes of *n_local* ranks with evenly spread experts.

    ``k`` experts fall on ``m (1 - (1 - 1/m)^k)`` of ``m`` places. A node or GPU is as likely as any other to
    be the token's own.

    >>> traffic(Routing(tokens=1, token_bytes=1, top_k=8, max_nodes=4), 8, 8).nodes
    4.0
    """
    free = expected_places(n_nodes, routing.top_k)
    limit = min(n_nodes, routing.max_nodes or n_nodes)
    # With at least two experts for each allowed node the limit is taken to be reached.
    nodes = float(limit) if limit < n_nodes and routing.top_k >= 2 * limit else min(free, limit)
    # Experts of a token that are in one node fall on its GPUs at random.
    gpus = nodes * expected_places(n_local, routing.top_k / nodes)
    return Traffic(
        nodes=nodes,
        far_nodes=nodes * (1 - 1 / n_nodes),
        gpus=gpus,
        near_hops=gpus * (1 - 1 / n_local),
    )


def expected_places(n_places: int, n_balls: float) -> float:
    """Return how many of *n_places* hold one of *n_balls* thrown at random.

    >>> expected_places(8, 1)
    1.0
    """
    return n_places * (1 - (1 - 1 / n_places) ** n_balls) if n_places > 1 else 1.0


def exchange_s(
    routing: Routing, shape: GroupShape, near_share: float, far_share: float
) -> tuple[float, float]:
    """Return what one dispatch or combine takes inside the nodes and between them, in a group of *shape*.

    Rails and NVLink work at the same time; the slower one sets the pace, or ``handed_on_s`` does.
    """
    copies = traffic(routing, shape.n_domains, shape.n_local)
    rank_bytes = routing.tokens * routing.token_bytes
    near_s = (
        copies.near_hops * rank_bytes / (near_share * shape.intra_bytes_per_s) if shape.n_local > 1 else 0.0
    )
    # The rail of one rank: what a node sends is shared out to the members of the group in it.
    rail_bytes_per_s = RAIL_SHARE * far_share * shape.inter_bytes_per_s / shape.n_local
    far_s = copies.far_nodes * rank_bytes / rail_bytes_per_s if shape.n_domains > 1 else 0.0
    return near_s, far_s


def handed_on_s(routing: Routing, shape: GroupShape, bytes_per_s: float) -> float:
    """Return what kernels take to hand the GPUs of a node the tokens that come from a rail, or stay there.

    *bytes_per_s*: that they copy on one GPU, what it keeps itself included.
    """
    copies = traffic(routing, shape.n_domains, shape.n_local)
    return copies.gpus * routing.tokens * routing.token_bytes / bytes_per_s


def rdma_exchange_s(routing: Routing, n_nodes: int, rail_bytes_per_s: float) -> float:
    """Return the wire time of the low-latency form: every token straight to each of its experts.

    *n_nodes*: nodes with an equal share of the experts.
    """
    rank_bytes = routing.tokens * routing.top_k * routing.token_bytes
    far = 1 - 1 / n_nodes
    # Copies within the node meet nobody; those from other nodes share a port with others.
    return rank_bytes * (1 - far + far / CROWD_SHARE) / rail_bytes_per_s
