"""What the fabric says of a group of GPUs, and how a ring through its nodes differs from all with all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import fsum, inf

Members = tuple[int, ...]
"""GPUs of a group that lie in one domain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """All that the cost of a collective depends on, besides its kind and size.

    Attributes:
        n_ranks: members of the group.
        n_domains: NVLink domains (nodes) they lie in.
        n_local: members in the fullest domain.
        intra_bytes_per_s: what the slowest member can send inside its domain; ``inf`` without neighbours.
        inter_bytes_per_s: what the members in one domain can send out of it together to those anywhere else,
            in the domain that can send least; ``inf`` if there is one domain.
        inter_latency_s: from one domain to the farthest next.
        ring_bytes_per_s: as ``inter_bytes_per_s``, around a ring in the order of the ranks.
        ring_latency_s: from one domain to the next, in the mean of that ring.
    """

    n_ranks: int
    n_domains: int
    n_local: int
    intra_bytes_per_s: float
    inter_bytes_per_s: float = inf
    inter_latency_s: float = 0.0
    ring_bytes_per_s: float = inf
    ring_latency_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """What one GPU can send to GPUs at one distance, when all do the same.

    Attributes:
        name: ``"node"`` or the tier of the switch at which the traffic turns around.
        bytes_per_s: per GPU and direction.
        latency_s: one way.
    """

    name: str
    bytes_per_s: float
    latency_s: float


def ways_out(
    climb: Callable[[Members, int], tuple[float, float]],
    hops: Mapping[tuple[Members, Members], tuple[int, int]],
    sites: int,
) -> dict[str, float]:
    """Return the figures of a ``GroupShape`` that speak of the ways between domains.

    All that a domain sends to those anywhere else climbs to where the widest apart meet. Around a ring most
    hops turn around lower: where ``p`` of them reach a level, so do ``p`` of the bytes, for the sibling
    groups are taken to do alike, and the links up to it let ``1/p`` times the rate through. Two trees over
    neighbours cross no more often.

    Latencies are those of hops that stay in a site, all as long as the longest, for under which leaf a node
    is matters little, and of hops between sites.

    Args:
        climb: what members of a domain send up to a level together, in bytes/s, and the latency in seconds.
        hops: from a domain to the next of the ring: the level where they meet, and how many hops are such.
        sites: the level above sites, or groups of a dragonfly.
    """
    domains = {a for a, _ in hops}
    top = max(level for level, _ in hops.values())
    total = sum(count for _, count in hops.values())
    reaching = {
        level: sum(count for found, count in hops.values() if found >= level) / total
        for level in range(1, top + 1)
    }
    single = [
        climb(a, at)[1] + climb(b, at)[1]
        for (a, b), (level, count) in hops.items()
        for at in (max(level, min(top, sites - 1)),)
        for _ in range(count)
    ]
    return {
        "inter_bytes_per_s": min(climb(domain, top)[0] for domain in domains),
        "inter_latency_s": 2 * max(climb(domain, top)[1] for domain in domains),
        "ring_bytes_per_s": min(
            climb(domain, level)[0] / share for domain in domains for level, share in reaching.items()
        ),
        "ring_latency_s": fsum(single) / total,
    }
