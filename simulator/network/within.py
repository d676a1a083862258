"""What a collective costs inside a node: measured, fitted, or a ring."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from foretrace.simulator.errors import SimulationError
from foretrace.simulator.network import asked
from foretrace.simulator.network.asked import LONG_BYTES, Free, Parts, narrowed
from foretrace.simulator.network.collectives import (
    bus_factor,
    half_size_s,
    measured_s,
    nvls_factor,
    ring_steps,
)
from foretrace.simulator.network.nccl import NVLS_RANKS, OVER_PCIE, Choice, unable
from foretrace.topologies.cluster import Cluster
from foretrace.topologies.link import LinkSpec


@dataclass(frozen=True, slots=True)
class Within:
    """Answers what collectives among neighbours cost.

    Attributes:
        cluster: the machine.
        choice: algorithms and protocols that may be used.
    """

    cluster: Cluster
    choice: Choice

    def link(self, bytes_per_s: float) -> LinkSpec:
        """Return the link inside a node that a ring of *bytes_per_s* per rank runs over."""
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

        One, as NCCL takes it; more where a user narrows that (``simulator.network.asked``). Of other links
        than NVLink and PCIe NCCL has no constants, and gloo takes no notice.

        Raises:
            SimulationError: none of the algorithms that a user asks for does *kind* there.
        """
        link = self.link(bytes_per_s)
        if refusal := self._refusal(kind, n, bytes_per_s):
            raise refusal
        parts = self.parts(kind, size_bytes, n, bytes_per_s)
        if link.kind not in NCCL or n < 2 or not narrowed(self.choice.of(kind), kind):
            yield self.how(kind, bytes_per_s), parts
            return
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
        for name, found in asked.ways(self.choice.of(kind), free):
            yield f"{link.name}/{name}", found

    def free(self, kind: str, n: int, bytes_per_s: float) -> Within:
        """Return these answers, with NCCL free to choose if what is asked for cannot do *kind* here."""
        return replace(self, choice=Choice()) if self._refusal(kind, n, bytes_per_s) else self

    def _refusal(self, kind: str, n: int, bytes_per_s: float) -> SimulationError | None:
        """Return the error that no algorithm asked for does *kind* among *n* neighbours, if none does."""
        link, asked_for = self.link(bytes_per_s), self.choice.of(kind)
        if not asked_for.forced or n < 2 or link.kind not in NCCL or kind in ("p2p", "all_to_all"):
            return None
        able = ("ring", *asked.ABLE[kind], "hierarchical") if kind in asked.ABLE else ("ring",)
        if kind in asked.ABLE and link.reduces:
            able = (*able, "nvls")
        if set(able) & set(asked_for.algorithms):
            return None
        return unable(asked_for, kind, f"inside a node of {self.cluster.name}", able)

    def parts(self, kind: str, size_bytes: float, n: int, bytes_per_s: float) -> Parts:
        """Return latency and wire time among *n* neighbours that can each send *bytes_per_s*."""
        link = self.link(bytes_per_s)
        if kind == "all_reduce" and self._halves(link, n):
            halves = [
                self.parts(half, size_bytes, n, bytes_per_s) for half in ("reduce_scatter", "all_gather")
            ]
            return sum(half[0] for half in halves), sum(half[1] for half in halves)
        if kind in link.tables:
            table = link.tables[kind]
            latency_s, wire_s = measured_s(table, kind, size_bytes, n, reduces=link.reduces)
            return latency_s, wire_s * table.bytes_per_s / bytes_per_s
        if kind in link.curves:
            wire_bytes = bus_factor(kind, n) * size_bytes
            return half_size_s(link.curves[kind], size_bytes, n, wire_bytes, bytes_per_s)
        if kind in LIKE and LIKE[kind] in link.tables:
            latency_s, wire_s = self.parts(LIKE[kind], size_bytes, n, bytes_per_s)
            return latency_s, wire_s / bus_factor(LIKE[kind], n)
        return self._ring(link, kind, size_bytes, n, bytes_per_s)

    def _ring(self, link: LinkSpec, kind: str, size_bytes: float, n: int, bytes_per_s: float) -> Parts:
        """Return the cost of a ring over a link of which nothing is measured."""
        steps = 1 if kind == "p2p" else ring_steps(kind, n)
        wire_s = bus_factor(kind, n) * size_bytes / (link.efficiency * bytes_per_s)
        if link.kind == "pcie":
            ways = [
                (protocol.ring_base_s + steps * protocol.ring_intra_s, wire_s / protocol.share)
                for name, protocol in OVER_PCIE.items()
                if name != "ll128"
            ]
            return min(ways, key=sum)
        if kind == "all_reduce" and link.reduces and not self._ring_only():
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
