"""Costs of communications: the fabric gives the available bandwidth, NCCL's rules how it is used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from math import inf
from typing import Any, Final

import numpy as np

from foretrace.simulator.errors import SimulationError
from foretrace.simulator.job import Job
from foretrace.simulator.network.algorithms import Between, Inside, Way
from foretrace.simulator.network.collectives import KINDS, bus_factor, ring_steps
from foretrace.simulator.network.exchange import is_even, load, over_links
from foretrace.simulator.network.nccl import P2P_CHANNELS, Choice, choice
from foretrace.simulator.network.within import Within
from foretrace.simulator.program import Transfer, to_ns
from foretrace.simulator.workload.dispatch import Routing, exchange_s, handed_on_s, rdma_exchange_s
from foretrace.topologies.cluster import Cluster
from foretrace.topologies.folded import reach
from foretrace.topologies.placement import place
from foretrace.topologies.reach import Reach
from foretrace.topologies.shape import GroupShape
from foretrace.topologies.wiring import fabric

KEPT_SETS: Final = 4096
"""Sets of groups that are remembered to be alike or not: those of some hundreds of layouts."""

KEPT_RANKS: Final = 1 << 12
"""Ranks of a set of groups above which it is not remembered."""

MANY: Final = 1024
"""GPUs of a group above which not all are kept: it may have a million."""


class Network:
    """Computes how long transfers take between ranks placed on a cluster, without regard to other traffic.

    Every bandwidth comes from the fabric graph, shared as ``topologies.reach`` explains. Inside a node the
    time is measured, fitted or, for a link with neither, that of a ring. Between nodes it is the fastest of
    ring and tree in NCCL's three protocols. Results are cached by kind, size and shape of the group.

    *placement*: the GPU of every rank; by default, ranks are on GPUs of the same number. *choice*: algorithms
    and protocols that may be used, see ``simulator.network.nccl.choice``; as NCCL if left out.

    *kinds*: the network if all nodes were of one kind, for each of ``Cluster.kinds`` if there are several.

    On a machine of several kinds of node a communication takes as long as it would if all nodes were like the
    slowest of those that take part.
    """

    def __init__(
        self, cluster: Cluster, placement: Sequence[int] | None = None, choice: Choice | None = None
    ) -> None:
        self.cluster = cluster
        self.placement = range(cluster.n_gpus) if placement is None else placement
        self._gpus = np.asarray(self.placement)
        self.choice = choice or Choice()
        self._within = Within(cluster, self.choice)
        self._between = Between(cluster, self._within.parts, self.choice)
        self._reach = reach(cluster, self.placement)
        # Each of these has nodes of one kind, and so no kinds of its own: the recursion ends there.
        self.kinds = [
            Network(kind, self.placement, self.choice) for kind in (cluster.kinds if cluster.others else ())
        ]
        self._whole: Reach | None = None
        # Layouts share most of their groups; the bound is against large machines.
        self._unlike = lru_cache(KEPT_SETS)(self._unlike_of)
        self._shapes: dict[Sequence[int], GroupShape] = {}
        self._transfers: dict[tuple[str, int, GroupShape], Transfer] = {}

    def kind(self, rank: int) -> int:
        """Return the kind of machine that *rank* is on, its place in ``Cluster.kinds``."""
        return self.cluster.kind_at(self.placement[rank])

    def _slowest(self, ranks: Sequence[int], ask: Callable[[Network], Transfer]) -> Transfer:
        """Return the costliest answer of the kinds of machine that *ranks* are on."""
        found = (ask(self.kinds[kind]) for kind in {self.kind(rank) for rank in ranks})
        return max(found, key=lambda one: one.latency_ns + one.wire_ns)

    def collective(self, kind: str, size_bytes: int, ranks: Sequence[int], dtype: str = "") -> Transfer:
        """Return the cost of a collective of *ranks* over an array of *size_bytes* in all.

        The size is that of the whole array, as in nccl-tests; an all-to-all moves *size_bytes* per rank. The
        time does not depend on *dtype*: reductions keep up with the wire. Raises SimulationError if there is
        no such collective, and FabricError if the fabric does not join the ranks.
        """
        del dtype
        if kind not in KINDS:
            raise SimulationError(f"collective {kind!r}: one of {', '.join(KINDS)}")
        return self._transfer(kind, size_bytes, tuple(ranks))

    def p2p(self, size_bytes: int, src: int, dst: int) -> Transfer:
        """Return the cost of sending *size_bytes* from rank *src* to rank *dst*."""
        return self._transfer("p2p", size_bytes, (src, dst))

    def shift(self, size_bytes: int, ranks: Sequence[int]) -> Transfer:
        """Return the cost of every rank sending *size_bytes* to the next of *ranks* and receiving as much.

        One step of a ring: no faster than the slowest send alone, nor, inside a node, than a ring. A node
        sends to the next one once, over a NIC that is not shared.
        """
        pairs = self.unlike(list(zip(ranks, [*ranks[1:], *ranks[:1]], strict=True)))
        # By the whole time, latency and wire.
        slowest = max((self._alone(size_bytes, pair) for pair in pairs), key=lambda sent: sum(sent[:2]))
        shape = self.shape(ranks)
        if shape.n_domains > 1 or shape.n_ranks < 3:
            return slowest
        # The array of which a ring sends *size_bytes* over each link: ``(n-1)/n`` of it.
        ring = self.collective("all_gather", round(size_bytes * shape.n_ranks / (shape.n_ranks - 1)), ranks)
        return slowest._replace(wire_ns=max(slowest.wire_ns, ring.wire_ns))

    def _alone(self, size_bytes: int, pair: tuple[int, ...]) -> Transfer:
        """Return the cost of a send over NICs that nobody else uses."""
        if self.shape(pair).n_domains == 1:
            return self.p2p(size_bytes, *pair)
        # A network with these two ranks alone: nobody else is there to share the NIC.
        network = Network(self.cluster, [self.placement[rank] for rank in pair], self.choice)
        return network.p2p(size_bytes, 0, 1)

    def n_nodes(self, ranks: Sequence[int]) -> int:
        """Return the number of nodes (NVLink domains) that *ranks* lie in."""
        return len({self._reach.domain(self.placement[rank]) for rank in ranks})

    def unlike(self, groups: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Return *groups* without those whose communications cost the same as those of another."""
        few = sum(map(len, groups)) <= KEPT_RANKS
        return (self._unlike if few else self._unlike_of)(tuple(groups))

    def _unlike_of(self, groups: tuple[tuple[int, ...], ...]) -> list[tuple[int, ...]]:
        if not self.kinds and len({len(ranks) for ranks in groups}) == 1:
            gpus = self._reach.first_alike(self._gpus[np.array(groups)])
            groups = tuple({row.tobytes(): ranks for row, ranks in zip(gpus, groups, strict=True)}.values())
        # Later groups take the place of earlier ones that are alike: any of them will do.
        some = {(self.shape(ranks), *map(self.kind, ranks if self.kinds else ())): ranks for ranks in groups}
        return list(some.values())

    def barrier(self, ranks: Sequence[int]) -> Transfer:
        """Return the cost of a barrier of *ranks*: in PyTorch, an all-reduce of a single number."""
        return self._transfer("all_reduce", BARRIER_BYTES, tuple(ranks))

    def all_to_all_v(self, sent_bytes: Sequence[Sequence[int]], ranks: Sequence[int]) -> Transfer:
        """Return the cost of an all-to-all in which ranks send each other different amounts.

        The busiest sender, the busiest receiver or the busiest link between two of them determines the time.
        Everything that leaves a node is assumed to go as far as the largest distance in the group, so that no
        link above is fuller than the uplink of the busiest rank.

        *sent_bytes*: bytes that each of *ranks* sends to each of them; shape ``(n, n)``. Raises
        SimulationError if *sent_bytes* does not fit *ranks*. Raises FabricError if the fabric does not join
        the ranks.
        """
        nodes = [self._reach.domain(self.placement[rank]) for rank in ranks]
        if self.kinds:
            return self._slowest(ranks, lambda one: one.all_to_all_v(sent_bytes, ranks))
        busiest, shape = load(sent_bytes, nodes), self.shape(ranks)
        if is_even(sent_bytes):
            # Rows hold what goes to each rank; the size of an all-to-all is that of a row, what a rank keeps
            # included.
            return self._transfer("all_to_all", sent_bytes[0][-1] * shape.n_ranks, tuple(ranks))
        busiest = over_links(
            busiest, sent_bytes, nodes, shape, lambda i, j: self._link_bytes_per_s(ranks[i], ranks[j])
        )
        if shape.n_domains > 1:
            return self._priced(self._between.exchange(busiest, shape), "all_to_all", shape)
        n = shape.n_ranks
        # As above: the array of which each rank sends the busiest one's bytes to the others.
        array_bytes = round(busiest.near_bytes * n / (n - 1)) if n > 1 else 0
        return self._transfer("all_to_all", array_bytes, tuple(ranks))

    def _link_bytes_per_s(self, a: int, b: int) -> float:
        """Return what the way from rank *a* to rank *b* carries, one connection per channel between nodes."""
        shape, nic = self.shape((a, b)), self.cluster.nic
        if shape.n_domains == 1:
            return shape.intra_bytes_per_s
        flow = inf if nic is None else P2P_CHANNELS * nic.flow_bytes_per_s
        return min(shape.inter_bytes_per_s, flow)

    def ways(self, kind: str, size_bytes: int, ranks: Sequence[int]) -> list[Way]:
        """Return all ways to do a collective, fastest first, whichever of them NCCL would choose.

        Raises SimulationError if there is no such collective.
        """
        if kind not in KINDS:
            raise SimulationError(f"collective {kind!r}: one of {', '.join(KINDS)}")
        shape = self.shape(ranks)
        one = shape.n_domains == 1
        found = (
            self._inside_one(kind, size_bytes, shape)
            if one
            else self._between.ways(kind, size_bytes, shape, tuned=False)
        )
        return sorted(found, key=lambda way: way.total_s)

    def uplinks(self, ranks: Sequence[int], sending: Sequence[int] = ()) -> dict[tuple[str, str], float]:
        """Return the share of links between switches that a group of *ranks* uses, see ``Reach.uplinks``."""
        if self._whole is None:
            self._whole = Reach(fabric(self.cluster), self.placement)
        gpus, senders = ([self.placement[rank] for rank in found] for found in (ranks, sending))
        return self._whole.uplinks(gpus, senders)

    def neighbours_s(self, kind: str, size_bytes: int, n_ranks: int) -> float:
        """Return the time of a collective among *n_ranks* neighbours of one node, whatever the placement."""
        if n_ranks < 2:
            return 0.0
        if self.kinds:
            return max(one.neighbours_s(kind, size_bytes, n_ranks) for one in self.kinds)
        # Where a node has fewer GPUs than ranks are asked for, all of the node stands for them.
        gpus = range(min(n_ranks, self.cluster.gpus_per_node))
        alone = self._reach.shape(gpus)
        free = self._within.free(kind, alone.n_ranks, alone.intra_bytes_per_s)
        return min(way.total_s for way in self._inside_one(kind, size_bytes, alone, free))

    def experts(self, routing: Routing, ranks: Sequence[int], *, low_latency: bool = False) -> Transfer:
        """Return the cost of one dispatch or combine of experts that are spread evenly over *ranks*.

        *low_latency*: send every token directly to each of its experts over the NICs, also inside a node.
        Raises SimulationError if the low-latency form was requested on a machine without NICs.
        """
        if self.kinds:
            return self._slowest(ranks, lambda one: one.experts(routing, ranks, low_latency=low_latency))
        shape = self.shape(ranks)
        if low_latency:
            way = over_nics(self.cluster, routing, shape)
        else:
            way = over_rails(self.cluster, routing, shape, self._within.parts)
        return self._priced([way], "all_to_all", shape)

    def shape(self, ranks: Sequence[int]) -> GroupShape:
        """Return what the group of *ranks* gets out of the fabric."""
        # Groups that lie alike in a machine of sets of nodes that are alike are one.
        key: Sequence[int] = tuple(self._reach.first_alike(self._gpus[np.array([ranks])])[0].tolist())
        if len(key) > MANY:  # GPUs that are equally far apart, as most are, by their ends
            evenly = range(key[0], key[-1] + 1, max(key[1] - key[0], 1))
            key = evenly if tuple(evenly) == key else key
        if key not in self._shapes:
            self._shapes[key] = self._reach.shape(key)
        return self._shapes[key]

    def _transfer(self, kind: str, size_bytes: int, ranks: tuple[int, ...]) -> Transfer:
        if len(set(ranks)) < 2:
            return Transfer(0, 0, "none")
        if self.kinds:
            return self._slowest(ranks, lambda one: one._transfer(kind, size_bytes, ranks))  # noqa: SLF001
        # By shape, not by ranks: thousands of groups of a large job have a handful of shapes.
        key = (kind, size_bytes, self.shape(ranks))
        if key not in self._transfers:
            ways = self._inside_one(*key) if key[2].n_domains == 1 else self._between.ways(*key)
            self._transfers[key] = self._priced(ways, kind, key[2])
        return self._transfers[key]

    def _priced(self, ways: Iterable[Way], kind: str, shape: GroupShape) -> Transfer:
        """Return the cost of the fastest of *ways*."""
        way = min(ways, key=lambda way: way.total_s)
        near, far = way.shares
        latency, wire = self._factors("near" if shape.n_domains == 1 else "far", kind)
        return Transfer(to_ns(latency * way.latency_s), to_ns(wire * way.wire_s), way.name, near, far)

    def _factors(self, link: str, kind: str) -> tuple[float, float]:
        """Return what a calibration says of the latency and the wire time of *kind* over *link*."""
        known = self.cluster.transfer_factors
        if not known:
            return 1.0, 1.0
        latency, wire = (
            known.get(f"{link}.{kind}.{part}", known.get(f"{link}.others.{part}", 1.0))
            for part in ("latency", "wire")
        )
        return latency, wire

    def _inside_one(
        self, kind: str, size_bytes: int, shape: GroupShape, within: Within | None = None
    ) -> Iterator[Way]:
        """Yield the ways of a group that lies in one node: one, unless a user narrows what NCCL may do."""
        # Where processes outnumber cores, each step of the ring waits for its turn on one.
        turns_s = ring_steps(kind, shape.n_ranks) * self.cluster.turn_s
        for name, (latency_s, wire_s) in (within or self._within).ways(
            kind, size_bytes, shape.n_ranks, shape.intra_bytes_per_s
        ):
            yield Way(latency_s + turns_s, wire_s, name, wire_s, 0.0)


BARRIER_BYTES: Final = 4
"""What a barrier reduces."""


def job_network(job: Job) -> Network:
    """Return the network of the machine of *job*, with its ranks on the GPUs that run them."""
    return network_of(job.cluster, job.layout.world_size, **placed(job))


def placed(job: Job) -> dict[str, Any]:
    """Return the settings of ``network_of`` for *job*."""
    settings = {name: getattr(job, name) for name in ("placement", "nccl_algo", "nccl_proto")}
    return {**settings, "ranks_per_node": job.ranks_per_node or job.filled_per_node}


def network_of(
    cluster: Cluster,
    n_ranks: int,
    *,
    ranks_per_node: int = 0,
    placement: str = "packed",
    nccl_algo: str = "",
    nccl_proto: str = "",
) -> Network:
    """Return the network of *n_ranks* on *cluster*; the settings are those of a job.

    With ``ranks_per_node`` the machine has as many nodes as the ranks then fill.
    """
    ways = choice(nccl_algo, nccl_proto)
    if not ranks_per_node:
        return Network(cluster, place(n_ranks, cluster, placement), ways)
    full = cluster.gpus_per_node
    machine = cluster.sized(-(-n_ranks // ranks_per_node) * full)
    # Nodes are filled with so many ranks each; the GPUs behind them stay idle.
    gpus = [rank // ranks_per_node * full + rank % ranks_per_node for rank in range(n_ranks)]
    return Network(machine, gpus, ways)


LARGE: Final = 1 << 29
"""Bytes at which a collective inside a node goes as fast as it can."""

NOTIFY_S: Final = 68e-6
"""Time in which ranks of several nodes tell each other how many tokens will come, and clean their queues:
68 us in one dispatch and 82 in another between two nodes of H200 (uccl-project/uccl pull request 441), 96 and
more among four of H100 (deepseek-ai/DeepEP issue 397)."""


def over_rails(cluster: Cluster, routing: Routing, shape: GroupShape, inside: Inside) -> Way:
    """Return the way of a dispatch or combine over the NIC of each rail and NVLink from there.

    Between nodes kernels take tokens from the NIC and hand them on, which may be slower than both.
    """
    near_share = 1.0
    if shape.n_local > 1:
        _, wire_s = inside("all_to_all", LARGE, shape.n_local, shape.intra_bytes_per_s)
        # Of a long array, to leave the latency out.
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

    Raises SimulationError if the machine has no NICs.
    """
    nic = cluster.nic
    if nic is None:
        raise SimulationError(f"cluster {cluster.name} has no NICs, which the low-latency form needs")
    # The NICs of a node are dealt out to its GPUs.
    rail = nic.efficiency * nic.bandwidth_bytes_per_s * cluster.nics_per_node / cluster.gpus_per_node
    wire_s = rdma_exchange_s(routing, shape.n_domains, rail)
    return Way(nic.latency_s, wire_s, "experts/rdma", 0.0, wire_s)
