"""Who meets whom in a program: numbers communications, joins their participants, asks what they cost."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from foretrace.simulator.builder.groups import Groups
from foretrace.simulator.program import Int32Array, Int64Array, Transfer
from foretrace.simulator.workload.dispatch import Routing
from foretrace.traces.layout import Group


class Message(NamedTuple):
    """A communication as one rank sees it.

    Attributes:
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``send`` or ``recv``.
        scope: whose group carries it, one of ``simulator.builder.groups.SCOPES``; ``"pp"`` for p2p.
        size_bytes: the whole array as in nccl-tests; p2p: the message.
        peer_pp: p2p: pipeline rank at the other end.
        boundary: p2p: the stage before which it crosses over, in either direction.
        top_k: copies of each token, if a GPU and a node get a token once, see ``workload.ops.Comm``.
        max_nodes: most nodes that they may go to; 0: any number.
    """

    kind: str
    scope: str
    size_bytes: int
    dtype: str
    peer_pp: int = -1
    boundary: int = -1
    top_k: int = 0
    max_nodes: int = 0


class Network(Protocol):
    """What the builder asks of a network; ``simulator.network.cost.Network`` is one."""

    def collective(self, kind: str, size_bytes: int, ranks: Sequence[int], dtype: str) -> Transfer:
        """Return the cost of a collective among *ranks*."""

    def p2p(self, size_bytes: int, src: int, dst: int) -> Transfer:
        """Return the cost of one message."""

    def experts(self, routing: Routing, ranks: Sequence[int]) -> Transfer:
        """Return the cost of a dispatch or combine that sends a token once to a GPU and to a node."""

    def unlike(self, groups: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Return *groups* without those whose communications cost the same as those of another."""


class Answers(Protocol):
    """What a program asks about its messages; ``Costs`` are the answers of a network."""

    @property
    def uneven(self) -> Collection[str]:
        """Scopes in which a rank stands for groups of different speed."""

    def channel(self, rank: int, message: Message) -> tuple[int, int, int]:
        """Return ``(group, source, destination)`` of *message* on *rank*; -1, -1 for a collective."""

    def transfer(self, rank: int, message: Message) -> Transfer:
        """Return the cost of *message* as *rank* carries it out."""


class Communications(NamedTuple):
    """Those fields of a ``Program`` that have to do with communication."""

    instance: Int64Array
    peer: Int32Array
    instance_size_bytes: Int64Array
    instance_group: Int32Array
    instance_sequence: Int64Array
    instance_participants: Int32Array
    transfers: tuple[Transfer, ...]
    instance_transfer: Int32Array


class Costs:
    """Answers which group carries a message of a rank, and at what cost.

    *folded*: each rank stands for all of its pipeline stage. It then carries the slowest of the groups that
    it stands for: whoever waits for all of them waits for that one. *takes*: adds to the cost of a message
    among so many ranks what it takes of their GPUs.
    """

    def __init__(
        self,
        groups: Groups,
        network: Network,
        *,
        folded: bool,
        takes: Callable[[Transfer, Message, int], Transfer] = lambda transfer, *_: transfer,
    ) -> None:
        self._groups = groups
        self._network = network
        self._folded = folded
        self._takes = takes
        self._uneven: set[str] = set()
        self._alike = groups.alike.setdefault(network, {})

    @property
    def uneven(self) -> Collection[str]:
        """Scopes in which a rank was found to stand for groups of different speed."""
        return self._uneven

    def channel(self, rank: int, message: Message) -> tuple[int, int, int]:
        """Return ``(group, source, destination)`` of *message* on *rank*; -1, -1 for a collective."""
        group = self._group(rank, message)
        if message.peer_pp < 0:
            return group.id, -1, -1
        peer = self._peer(rank, message)
        return (group.id, rank, peer) if message.kind == "send" else (group.id, peer, rank)

    def transfer(self, rank: int, message: Message) -> Transfer:
        """Return the cost of *message* as *rank* carries it out."""
        if not self._folded:
            _, *ends = self.channel(rank, message)
            return self._cost(
                self._group(rank, message).ranks if message.peer_pp < 0 else tuple(ends), message
            )
        pp = self._groups.layout.coord(rank).pp
        found = {self._cost(ranks, message) for ranks in self._stood_for(pp, message)}
        if len(found) > 1:
            self._uneven.add(message.scope)
        return max(found, key=lambda t: (t.latency_ns + t.wire_ns, t))

    def _stood_for(self, pp: int, message: Message) -> list[tuple[int, ...]]:
        """Return who carries out *message* on pipeline rank *pp*, of groups that are alike only one."""
        key = (pp, message.scope, message.peer_pp, message.kind == "send")
        if key not in self._alike:
            if message.peer_pp >= 0:
                ends = [self._groups.of_pipeline_rank(at) for at in (pp, message.peer_pp)]
                ways = zip(*(ends if message.kind == "send" else reversed(ends)), strict=True)
                self._alike[key] = self._network.unlike(list(ways))
            else:
                groups = self._groups.on_pipeline_rank(message.scope, pp)
                self._alike[key] = self._network.unlike(groups)
        return self._alike[key]

    def _cost(self, ranks: tuple[int, ...], message: Message) -> Transfer:
        if message.top_k:
            routing = Routing(
                tokens=1,
                token_bytes=message.size_bytes // message.top_k,
                top_k=message.top_k,
                max_nodes=message.max_nodes,
            )
            alone = self._network.experts(routing, ranks)
        elif message.peer_pp < 0:
            alone = self._network.collective(message.kind, message.size_bytes, ranks, message.dtype)
        else:
            alone = self._network.p2p(message.size_bytes, *ranks)
        return self._takes(alone, message, len(ranks))

    def _group(self, rank: int, message: Message) -> Group:
        group = self._groups.of(message.scope, rank)
        if group is None:
            raise LookupError(f"rank {rank} has no {message.scope} group for {message.kind}")
        return group

    def _peer(self, rank: int, message: Message) -> int:
        layout = self._groups.layout
        return layout.rank(layout.coord(rank)._replace(pp=message.peer_pp))


def communications(
    rank: Int32Array, message: Int32Array, batch: Int64Array, messages: Sequence[Message], costs: Answers
) -> Communications:
    """Join the tasks of all ranks that take part in the same communication.

    The n-th task of a rank in a group takes part in the n-th collective there, as in NCCL: nothing but the
    order of calls says what belongs together. A transfer between two ranks joins those who send and receive
    the same micro-batch across the same stage boundary; its sequence is its place among what the sender
    sends to that rank.

    Args:
        rank: rank of each task; shape ``(n_tasks,)``.
        message: index into *messages* of each task, -1 if it does not communicate; shape ``(n_tasks,)``.
        batch: a number for the step and micro-batch of each task; shape ``(n_tasks,)``.
        messages: the distinct messages.
        costs: which group carries a message, and at what cost.
    """
    tasks = np.flatnonzero(message >= 0)
    # Two numbers of 32 bits as one of 64: unique over one column is many times as fast as over pairs.
    uses, use = np.unique(rank[tasks].astype(np.int64) << 32 | message[tasks], return_inverse=True)
    pairs = [(int(key >> 32), messages[int(key & 0xFFFFFFFF)]) for key in uses]
    channels: dict[tuple[int, int, int], int] = {}
    of_use = [channels.setdefault(costs.channel(*pair), len(channels)) for pair in pairs]
    channel = np.array(of_use, np.int64)[use]
    boundary = np.array([pair[1].boundary for pair in pairs], np.int64)[use]
    receives = np.array([pair[1].kind == "recv" for pair in pairs], np.bool_)[use]
    sequence = _occurrence(rank[tasks].astype(np.int64) * len(channels) + channel)
    _take_from_sender(sequence, np.stack([channel, boundary, batch[tasks]]), boundary >= 0, receives)
    span = int(sequence.max()) + 1 if len(tasks) else 1
    keys, first, member, counts = np.unique(
        channel * span + sequence, return_index=True, return_inverse=True, return_counts=True
    )
    instance = np.full(len(rank), -1, np.int64)
    instance[tasks] = member
    transfers, instance_transfer = _transfers(pairs, use[first], costs)
    return Communications(
        instance=instance,
        peer=_peers(rank, tasks, list(channels), channel),
        instance_size_bytes=np.array([pair[1].size_bytes for pair in pairs], np.int64)[use[first]],
        instance_group=np.array([key[0] for key in channels], np.int32)[keys // span],
        instance_sequence=keys % span,
        instance_participants=counts.astype(np.int32),
        transfers=transfers,
        instance_transfer=instance_transfer,
    )


def _take_from_sender(
    sequence: Int64Array, keys: Int64Array, is_p2p: NDArray[np.bool_], receives: NDArray[np.bool_]
) -> None:
    """Give every receive in *sequence* the number of the send with the same column of *keys*.

    A plan that has been checked has a send for every receive.
    """
    code = np.zeros(int(is_p2p.sum()), np.int64)
    for key in keys[:, is_p2p]:  # one after the other: many times as fast as all columns at once
        values, value = np.unique(key, return_inverse=True)
        _, code = np.unique(code * len(values) + value, return_inverse=True)
    sent, numbers = ~receives[is_p2p], sequence[is_p2p]
    of_code = np.zeros(len(numbers), np.int64)
    of_code[code[sent]] = numbers[sent]
    sequence[is_p2p] = of_code[code]


def _occurrence(keys: Int64Array) -> Int64Array:
    """Return how many equal keys come before each one.

    >>> _occurrence(np.array([5, 7, 5, 5, 7])).tolist()
    [0, 0, 1, 2, 1]
    """
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])) if len(keys) else order
    lengths = np.diff(np.append(starts, len(keys)))
    found = np.empty(len(keys), np.int64)
    found[order] = np.arange(len(keys)) - np.repeat(starts, lengths)
    return found


def _transfers(
    pairs: Sequence[tuple[int, Message]], use: NDArray[np.int64], costs: Answers
) -> tuple[tuple[Transfer, ...], Int32Array]:
    """Return the distinct costs, and which one each communication has; *use* indexes *pairs*."""
    distinct: dict[Transfer, int] = {}
    number = np.zeros(len(pairs), np.int32)
    for at in np.unique(use).tolist():
        number[at] = distinct.setdefault(costs.transfer(*pairs[at]), len(distinct))
    return tuple(distinct), number[use]


def _peers(
    rank: Int32Array, tasks: Int64Array, channels: Sequence[tuple[int, int, int]], channel: Int64Array
) -> Int32Array:
    """Return the other rank of each p2p task, -1 for all other tasks."""
    ends = np.array(channels, np.int32).reshape(-1, 3)[:, 1:]
    source, destination = ends[channel, 0], ends[channel, 1]
    peer = np.full(len(rank), -1, np.int32)
    peer[tasks] = np.where(source == rank[tasks], destination, source)
    return peer
