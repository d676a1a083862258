"""What a collective costs inside a node: measured, fitted, or a ring."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, log2
from typing import Final

from foretrace.simulator.errors import SimulationError
from foretrace.simulator.network.collectives import (
    bus_factor,
    half_size_s,
    measured_s,
    nvls_factor,
    ring_steps,
)
from foretrace.simulator.network.nccl import (
    IN_ALL,
    NVLS_INTRA_S,
    NVLS_RANKS,
    OVER_PCIE,
    PROTOCOLS,
    Choice,
    Protocol,
    unable,
)
from foretrace.topologies.cluster import Cluster
from foretrace.topologies.link import LinkSpec

# Collectives inside a node where a user narrows what NCCL may do: its algorithms or its protocols.
#
# What was measured there is what NCCL takes when it is free to choose. A way that is asked for takes what
# NCCL's own constants say of it, over links as fast as they were measured on long arrays, and is never
# faster than the free choice was.

Parts = tuple[float, float]
"""Latency and wire time, in seconds."""

LONG_BYTES: Final = 1 << 29
"""Array on which links inside a node are as fast as they get."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """A collective of *n* neighbours as NCCL does it when it is free to choose.

    Attributes:
        wire_s: part of *total_s* that its bytes take.
        wire_per_byte_s: wire time of a ring per byte of a long array.
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
            # No faster than the free choice: what is missing to its time counts as latency.
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


@dataclass(frozen=True, slots=True)
class Within:
    """Answers what collectives among neighbours cost.

    *choice*: algorithms and protocols that may be used.
    """

    cluster: Cluster
    choice: Choice

    def link(self, bytes_per_s: float) -> LinkSpec:
        """Return the link inside a node that a ring of *bytes_per_s* per rank runs over."""
        # A pair that a bridge joins is faster than the way over the host; any other group goes over that.
        host = self.cluster.node.host
        if host and bytes_per_s <= host.bandwidth_bytes_per_s:
            return host
        return self.cluster.intra

    def how(self, kind: str, bytes_per_s: float) -> str:
        """Return what the answer for *kind* rests on, e.g. ``"nvlink4/measured"``."""
        link = self.link(bytes_per_s)
        measured = kind in link.tables or (kind in LIKE and LIKE[kind] in link.tables)
        return f"{link.name}/{'measured' if measured else 'fitted' if kind in link.curves else 'ring'}"

    def ways(self, kind: str, size_bytes: int, n: int, bytes_per_s: float) -> Iterator[tuple[str, Parts]]:
        """Yield name, and latency and wire time, of the ways among *n* neighbours that the choice leaves.

        One, as NCCL takes it; more where a user narrows that (``Free``). Of other links
        than NVLink and PCIe NCCL has no constants, and gloo takes no notice. Raises SimulationError if none
        of the algorithms that a user asks for does *kind* there.
        """
        link = self.link(bytes_per_s)
        if refusal := self._refusal(kind, n, bytes_per_s):
            raise refusal
        parts = self.parts(kind, size_bytes, n, bytes_per_s)
        if link.kind not in NCCL or n < 2 or not narrowed(self.choice.of(kind), kind):
            yield self.how(kind, bytes_per_s), parts
            return
        # The rate of a ring on a long array, measured if the halves of an all-reduce were.
        ring = replace(self, choice=Choice(("ring",), forced=True))
        long_s = ring.parts(kind, LONG_BYTES, n, bytes_per_s)[1]
        free = Free(
            kind=kind,
            size_bytes=size_bytes,
            n=n,
            total_s=sum(parts),
            wire_s=parts[1],
            wire_per_byte_s=long_s / LONG_BYTES,
            reduced=kind == "all_reduce"
            and link.reduces
            and n >= NVLS_RANKS
            and "nvls" in self.choice.of(kind).algorithms,
            pcie=link.kind == "pcie",
        )
        for name, found in ways(self.choice.of(kind), free):
            yield f"{link.name}/{name}", found

    def free(self, kind: str, n: int, bytes_per_s: float) -> Within:
        """Return these answers, with NCCL free to choose if what is asked for cannot do *kind* here."""
        return replace(self, choice=Choice()) if self._refusal(kind, n, bytes_per_s) else self

    def _refusal(self, kind: str, n: int, bytes_per_s: float) -> SimulationError | None:
        """Return the error that no algorithm asked for does *kind* among *n* neighbours, if none does."""
        link, asked_for = self.link(bytes_per_s), self.choice.of(kind)
        # Gloo, over other links, takes no notice, and sends have no algorithm.
        if not asked_for.forced or n < 2 or link.kind not in NCCL or kind in ("p2p", "all_to_all"):
            return None
        able = ("ring", *ABLE[kind], "hierarchical") if kind in ABLE else ("ring",)
        if kind in ABLE and link.reduces:
            able = (*able, "nvls")
        if set(able) & set(asked_for.algorithms):
            return None
        return unable(asked_for, kind, f"inside a node of {self.cluster.name}", able)

    def parts(self, kind: str, size_bytes: float, n: int, bytes_per_s: float) -> Parts:
        """Return latency and wire time among *n* neighbours that can each send *bytes_per_s*."""
        link = self.link(bytes_per_s)
        # What was measured is done by switches; a ring that is asked for goes through both its halves.
        if kind == "all_reduce" and self._halves(link, n):
            halves = [
                self.parts(half, size_bytes, n, bytes_per_s) for half in ("reduce_scatter", "all_gather")
            ]
            return sum(half[0] for half in halves), sum(half[1] for half in halves)
        if kind in link.tables:
            table = link.tables[kind]
            latency_s, wire_s = measured_s(table, kind, size_bytes, n, reduces=link.reduces)
            # Measured over a link of one width, asked for over another: the wire time goes with the width.
            return latency_s, wire_s * table.bytes_per_s / bytes_per_s
        if kind in link.curves:
            wire_bytes = bus_factor(kind, n) * size_bytes
            return half_size_s(link.curves[kind], size_bytes, n, wire_bytes, bytes_per_s)
        if kind in LIKE and LIKE[kind] in link.tables:
            latency_s, wire_s = self.parts(LIKE[kind], size_bytes, n, bytes_per_s)
            # A ring passes on all bytes over each link here, and only ``(n-1)/n`` of them there.
            return latency_s, wire_s / bus_factor(LIKE[kind], n)
        return self._ring(link, kind, size_bytes, n, bytes_per_s)

    def _ring(self, link: LinkSpec, kind: str, size_bytes: float, n: int, bytes_per_s: float) -> Parts:
        """Return the cost of a ring over a link of which nothing is measured."""
        steps = 1 if kind == "p2p" else ring_steps(kind, n)
        wire_s = bus_factor(kind, n) * size_bytes / (link.efficiency * bytes_per_s)
        if link.kind == "pcie":
            ways = [
                # Over PCIe NCCL leaves LL128 alone unless told to (``OVER_PCIE``).
                (protocol.ring_base_s + steps * protocol.ring_intra_s, wire_s / protocol.share)
                for name, protocol in OVER_PCIE.items()
                if name != "ll128"
            ]
            return min(ways, key=sum)
        if kind == "all_reduce" and link.reduces and not self._ring_only():
            # Never slower than a ring, which NCCL could take instead.
            wire_s *= min(1.0, nvls_factor(n) / bus_factor(kind, n))
        return ring_steps(kind, n) * link.latency_s, wire_s

    def _halves(self, link: LinkSpec, n: int) -> bool:
        """Return whether an all-reduce is a reduce-scatter and an all-gather: a ring is wanted, not measured.

        Among fewer ranks than switches reduce for, what is measured is a ring.
        """
        measured = {"reduce_scatter", "all_gather"} <= set(link.tables)
        return self._ring_only() and measured and not (link.reduces and n < NVLS_RANKS)

    def _ring_only(self) -> bool:
        asked_for = self.choice.of("all_reduce")
        return asked_for.forced and not {"nvls", "nvls_tree"} & set(asked_for.algorithms)


NCCL: Final = ("nvlink", "pcie")
"""Kinds of link inside a node over which NCCL has constants, and minds what a user asks for."""

LIKE: Final = {"broadcast": "all_gather", "reduce": "reduce_scatter"}
"""Operations that pass every byte on around the same ring as another, but all bytes over each link."""
