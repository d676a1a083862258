"""Collectives inside a node where a user narrows what NCCL may do: its algorithms or its protocols.

What was measured there is what NCCL takes when it is free to choose. A way that is asked for takes what
NCCL's own constants say of it, over links as fast as they were measured on long arrays, and is never faster
than the free choice was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, log2
from typing import Final

from foretrace.simulator.network.collectives import bus_factor, ring_steps
from foretrace.simulator.network.nccl import IN_ALL, NVLS_INTRA_S, OVER_PCIE, PROTOCOLS, Choice, Protocol

Parts = tuple[float, float]
"""Latency and wire time, in seconds."""

LONG_BYTES: Final = 1 << 29
"""Array on which links inside a node are as fast as they get."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """A collective of *n* neighbours as NCCL does it when it is free to choose.

    Attributes:
        kind: of collective.
        size_bytes: of the array.
        n: ranks.
        total_s: what it takes.
        wire_s: of that, what its bytes take.
        wire_per_byte_s: wire time of a ring per byte of a long array.
        reduced: whether switches reduce it.
        pcie: whether hops go over PCIe rather than NVLink.
    """

    kind: str
    size_bytes: float
    n: int
    total_s: float
    wire_s: float
    wire_per_byte_s: float
    reduced: bool
    pcie: bool = False


def narrowed(choice: Choice, kind: str) -> bool:
    """Return whether *choice* leaves less for *kind* inside a node than NCCL's own choice."""
    return bool(_algorithms(choice, kind)) or (
        kind not in ("all_to_all", "p2p") and set(choice.protocols) != set(PROTOCOLS)
    )


def ways(choice: Choice, free: Free) -> Iterator[tuple[str, Parts]]:
    """Yield name, and latency and wire time, of every way that *choice* leaves."""
    for algorithm in _algorithms(choice, free.kind) or ("ring",):
        for name in _protocols(choice, algorithm, pcie=free.pcie):
            protocol = OVER_PCIE[name] if free.pcie else PROTOCOLS[name]
            latency_s, factor = _cost(algorithm, free.kind, free.n, protocol)
            wire_s = factor / bus_factor(free.kind, free.n) * free.size_bytes * free.wire_per_byte_s
            wire_s /= PROTOCOLS[name].share
            yield f"{algorithm}/{name}", (max(latency_s, free.total_s - wire_s), wire_s)
    if free.reduced and "simple" in choice.protocols:
        yield "nvls/simple", (max(NVLS_INTRA_S, free.total_s - free.wire_s), free.wire_s)


def _algorithms(choice: Choice, kind: str) -> tuple[str, ...]:
    """Return the algorithms asked for that are not what a ring or switches do, which was measured."""
    if not choice.forced or kind not in ABLE or {"ring", "nvls"} & set(choice.algorithms):
        return ()
    return tuple(name for name in choice.algorithms if name in ABLE[kind])


def _protocols(choice: Choice, algorithm: str, *, pcie: bool) -> Sequence[str]:
    """Return the protocols of *algorithm*: Simple alone of textbooks'; over PCIe LL128 only if left alone."""
    names = [name for name in choice.protocols if algorithm in IN_ALL or name == "simple"]
    return [name for name in names if not (pcie and name == "ll128")] or names


def _cost(algorithm: str, kind: str, n: int, protocol: Protocol) -> Parts:
    """Return the latency of a way inside a node, and what it moves over each link as a multiple of ``S``."""
    passes = 2 if kind == "all_reduce" else 1
    if algorithm == "tree":  # inside a node a chain: up and down again
        return protocol.tree_base_s + passes * (n - 1) * protocol.tree_intra_s, 2.0
    if algorithm == "halving_doubling":
        steps, odd = passes * ceil(log2(n)), n & (n - 1) > 0
        return protocol.ring_base_s + steps * protocol.ring_intra_s, bus_factor(kind, n) + passes * odd
    if algorithm == "direct":
        return protocol.ring_base_s + passes * protocol.ring_intra_s, bus_factor(kind, n)
    return protocol.ring_base_s + ring_steps(kind, n) * protocol.ring_intra_s, bus_factor(kind, n)


ABLE: Final = {
    "all_reduce": ("tree", "halving_doubling", "direct"),
    "all_gather": ("halving_doubling", "direct"),
    "reduce_scatter": ("halving_doubling", "direct"),
}
"""What else than a ring, or switches that reduce, does a collective inside a node."""
