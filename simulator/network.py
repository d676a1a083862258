"""What a communication costs: the fabric says how wide the way is, NCCL's rules how it is used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from simulator.clock import to_ns
from simulator.collectives import (
    KINDS,
    POST_S,
    PROTOCOLS,
    Protocol,
    bus_factor,
    half_size_s,
    hierarchical_s,
    measured_s,
    nvls_factor,
    ring_steps,
    tree_factor,
    tree_hops,
)
from simulator.errors import SimulationError
from simulator.program import Transfer
from topologies.cluster import Cluster
from topologies.reach import GroupShape, Reach


class Network:
    """Answers how long transfers take between ranks placed on a cluster; never looks at other traffic.

    Every bandwidth comes from the fabric graph, shared as ``topologies.reach`` explains. Inside a node the
    time is measured, fitted or, for a link with neither, that of a ring. Between nodes it is the fastest of
    ring and tree in NCCL's three protocols. Answers are remembered by kind, size and shape of the group.

    Args:
        cluster: the machine.
        placement: the GPU of every rank; ranks on GPUs of the same number if left out.
    """

    def __init__(self, cluster: Cluster, placement: Sequence[int] | None = None) -> None:
        self.cluster = cluster
        self.placement = range(cluster.n_gpus) if placement is None else placement
        self._reach = Reach(cluster.fabric(), self.placement)
        self._shapes: dict[tuple[int, ...], GroupShape] = {}
        self._transfers: dict[tuple[str, int, GroupShape], Transfer] = {}

    def collective(self, kind: str, size_bytes: int, ranks: Sequence[int], dtype: str = "") -> Transfer:
        """Return the cost of a collective of *ranks* over an array of *size_bytes* in all.

        The size is that of the whole array, as in nccl-tests; an all-to-all moves *size_bytes* per rank. The
        time does not depend on *dtype*: reductions keep up with the wire.

        Raises:
            SimulationError: no such collective.
            FabricError: the fabric does not join the ranks.
        """
        del dtype
        if kind not in KINDS:
            raise SimulationError(f"collective {kind!r}: one of {', '.join(KINDS)}")
        return self._transfer(kind, size_bytes, tuple(ranks))

    def p2p(self, size_bytes: int, src: int, dst: int) -> Transfer:
        """Return the cost of sending *size_bytes* from rank *src* to rank *dst*."""
        return self._transfer("p2p", size_bytes, (src, dst))

    def shape(self, ranks: Sequence[int]) -> GroupShape:
        """Return what the group of *ranks* gets out of the fabric."""
        key = tuple(ranks)
        if key not in self._shapes:
            self._shapes[key] = self._reach.shape([self.placement[rank] for rank in key])
        return self._shapes[key]

    def _transfer(self, kind: str, size_bytes: int, ranks: tuple[int, ...]) -> Transfer:
        if len(set(ranks)) < 2:
            return Transfer(0, 0, "none")
        key = (kind, size_bytes, self.shape(ranks))
        if key not in self._transfers:
            ways = self._inside_one(*key) if key[2].n_domains == 1 else self._between(*key)
            latency_s, wire_s, name = min(ways, key=lambda way: way[0] + way[1])
            self._transfers[key] = Transfer(to_ns(latency_s), to_ns(wire_s), name)
        return self._transfers[key]

    def _inside_one(
        self, kind: str, size_bytes: int, shape: GroupShape
    ) -> Iterator[tuple[float, float, str]]:
        """Yield the one way of a group that lies in one node."""
        latency_s, wire_s = self._inside(kind, size_bytes, shape.n_ranks, shape.intra_bytes_per_s)
        turns_s = ring_steps(kind, shape.n_ranks) * self.cluster.turn_s
        yield latency_s + turns_s, wire_s, self._source(kind)

    def _source(self, kind: str) -> str:
        """Return where the times of *kind* inside a node come from."""
        link = self.cluster.intra
        measured = kind in link.tables or (kind == "broadcast" and "all_gather" in link.tables)
        return f"{link.name}/{'measured' if measured else 'fitted' if kind in link.curves else 'ring'}"

    def _inside(self, kind: str, size_bytes: float, n: int, bytes_per_s: float) -> tuple[float, float]:
        """Return latency and wire time among *n* neighbours that can each send *bytes_per_s*."""
        link = self.cluster.intra
        wire_bytes = bus_factor(kind, n) * size_bytes
        if kind in link.tables:
            table = link.tables[kind]
            latency_s, wire_s = measured_s(table, kind, size_bytes, n)
            return latency_s, wire_s * table.bytes_per_s / bytes_per_s
        if kind in link.curves:
            return half_size_s(link.curves[kind], size_bytes, n, wire_bytes, bytes_per_s)
        if kind == "broadcast" and "all_gather" in link.tables:  # both pass every byte on around the ring
            latency_s, wire_s = self._inside("all_gather", size_bytes, n, bytes_per_s)
            return latency_s, wire_s / bus_factor("all_gather", n)
        if kind == "all_reduce" and link.reduces:
            wire_bytes = min(wire_bytes, nvls_factor(n) * size_bytes)
        return ring_steps(kind, n) * link.latency_s, wire_bytes / (link.efficiency * bytes_per_s)

    def _between(self, kind: str, size_bytes: int, shape: GroupShape) -> Iterator[tuple[float, float, str]]:
        """Yield latency, wire time and name of every way to do it across nodes."""
        for name, protocol in PROTOCOLS.items():
            if kind == "all_to_all":
                yield *self._all_to_all(size_bytes, shape, protocol), f"pairwise/{name}"
            else:
                yield *self._ring(kind, size_bytes, shape, protocol), f"ring/{name}"
            if kind == "all_reduce":
                tree = "nvls-tree" if self.cluster.intra.reduces else "tree"
                yield *self._tree(size_bytes, shape, protocol), f"{tree}/{name}"

    def _ring(self, kind: str, size_bytes: int, shape: GroupShape, protocol: Protocol) -> tuple[float, float]:
        """Return latency and wire time of one ring through all ranks, on as many rails as the group has.

        Latency as in NCCL 2.30.7, ``src/graph/tuning.cc``: every step is a hop, most of them inside a node.
        """
        n, n_local = shape.n_ranks, shape.n_local
        net_steps = ring_steps(kind, shape.n_domains)
        latency_s = protocol.base_s + (ring_steps(kind, n) - net_steps) * protocol.intra_hop_s
        latency_s += net_steps * shape.inter_latency_s * protocol.ring_hops
        wire_s = self._net_s(bus_factor(kind, n) * size_bytes, shape, protocol)
        if n_local < 2:
            return latency_s, wire_s
        kinds = ("reduce_scatter", "all_gather") if kind == "all_reduce" else (kind,)
        local_s = sum(self._inside(part, size_bytes, n_local, shape.intra_bytes_per_s)[1] for part in kinds)
        return hierarchical_s(
            (0.0, local_s * bus_factor(kind, n) / bus_factor(kind, n_local)), (latency_s, wire_s)
        )

    def _tree(self, size_bytes: int, shape: GroupShape, protocol: Protocol) -> tuple[float, float]:
        """Return latency and wire time of an all-reduce inside nodes joined by two trees between them.

        Where the switches of a node do not reduce, its GPUs form a chain that moves ``2 S`` instead of the
        ``2(n-1)/n S`` of a ring. Latency as in NCCL 2.30.7, ``src/graph/tuning.cc``.
        """
        n_local = shape.n_local
        hop_s = shape.inter_latency_s * protocol.tree_hops
        latency_s = (
            protocol.base_s + 2 * (n_local - 1) * protocol.intra_hop_s + tree_hops(shape.n_domains) * hop_s
        )
        wire_s = self._net_s(tree_factor(shape.n_domains) * size_bytes, shape, protocol)
        if n_local < 2:
            return latency_s, wire_s
        local_s = self._inside("all_reduce", size_bytes, n_local, shape.intra_bytes_per_s)[1]
        chain = 1.0 if self.cluster.intra.reduces else 2 / bus_factor("all_reduce", n_local)
        return hierarchical_s((0.0, local_s * chain), (latency_s, wire_s))

    def _all_to_all(self, size_bytes: int, shape: GroupShape, protocol: Protocol) -> tuple[float, float]:
        """Return latency and wire time of every rank sending to every other, near and far at once."""
        n, n_local = shape.n_ranks, shape.n_local
        far = n - n_local
        latency_s = protocol.base_s + shape.inter_latency_s * protocol.ring_hops + far * POST_S
        wire_s = self._net_s(n_local * far / n * size_bytes, shape, protocol)
        if n_local < 2:
            return latency_s, wire_s
        near = self._inside("all_to_all", size_bytes * n_local / n, n_local, shape.intra_bytes_per_s)
        return hierarchical_s((0.0, near[1]), (latency_s, wire_s))

    def _net_s(self, wire_bytes: float, shape: GroupShape, protocol: Protocol) -> float:
        """Return the time of *wire_bytes* out of a node through the NICs that the group can use."""
        efficiency = self.cluster.nic.efficiency if self.cluster.nic else 1.0
        return wire_bytes / (shape.inter_bytes_per_s * efficiency * protocol.share)
