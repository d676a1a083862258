"""From the tasks of rehearsed ranks to a program: who meets whom, and what it costs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np

from foretrace.simulator.network.collectives import KINDS
from foretrace.simulator.network.cost import Network
from foretrace.simulator.program import Int32Array, Program, Transfer
from foretrace.simulator.rehearsed.rank import Meeting, RankTask, even, sent_bytes
from foretrace.traces.layout import Group

LIKE: Final = {"gather": "all_gather", "scatter": "all_gather"}
"""Collectives that are priced as another: a root takes in, or sends out, what an all-gather moves."""


class RankTasks(NamedTuple):
    """The tasks of a rank and the places that they refer to."""

    rank: int
    tasks: Sequence[RankTask]
    places: Sequence[Mapping[str, Any]]


class Joiner:
    """Finds who takes part in the same communication, and asks what it costs.

    *representatives*: index rank, value the rehearsed rank that stands for it. *took_ns*: how long
    communication took that is not priced, by kind, group, size and peer.

    *network*: prices the others. *keys*: numbers of the communications, by what their participants have in
    common. *meetings*: of each, the rank that decides about it, and its part.
    """

    def __init__(
        self,
        network: Network,
        groups: Mapping[int, Group],
        representatives: Sequence[int],
        took_ns: Mapping[tuple[str, int, int, int], int] = MappingProxyType({}),
    ) -> None:
        self.network, self._groups, self._stands_for = network, groups, representatives
        self._took_ns = took_ns
        self._places = {
            rank: at for group in groups.values() if group.axis == "pp" for at, rank in enumerate(group.ranks)
        }
        self.keys: dict[tuple[Any, ...], int] = {}
        self.meetings: list[tuple[int, Meeting]] = []
        self.participants: list[int] = []
        self._exchanges: dict[int, dict[int, Meeting]] = {}
        self._n_assumed = 0
        self._transfers: dict[Transfer, int] = {}
        self._costs: dict[tuple[Any, ...], int] = {}

    def number(self, rank: int, meeting: Meeting) -> int:
        """Return the number of the communication of which *meeting* is the part of *rank*."""
        key = self._key(rank, meeting)
        number = self.keys.setdefault(key, len(self.keys))
        if number == len(self.meetings):
            self.meetings.append((rank, meeting))
            self.participants.append(0)
        self.participants[number] += 1
        if meeting.kind == "all_to_all":
            self._exchanges.setdefault(number, {})[rank] = meeting
        if meeting.size_bytes > self.meetings[number][1].size_bytes and meeting.peer < 0:
            self.meetings[number] = (rank, meeting)  # of unlike parts the largest decides
        return number

    def _key(self, rank: int, meeting: Meeting) -> tuple[Any, ...]:
        """Return what all participants of a communication have in common.

        A rank that stands for others meets itself: what it sends three places further in a ring is what it
        receives from three places back.
        """
        if meeting.peer < 0:
            return (meeting.group, meeting.sequence)
        sender, receiver = (rank, meeting.peer) if meeting.kind == "send" else (meeting.peer, rank)
        ranks = self._groups[meeting.group].ranks if meeting.group in self._groups else (sender, receiver)
        # Round the group: a rank that stands for others meets itself at the same distance.
        distance = (ranks.index(receiver) - ranks.index(sender)) % len(ranks)
        stands = self._stands_for
        if not self._is_acted(meeting, ranks):
            return (meeting.group, meeting.sequence, sender, receiver, meeting.kind)
        return (meeting.group, meeting.sequence, stands[sender], stands[receiver], distance)

    def _is_acted(self, meeting: Meeting, ranks: Sequence[int]) -> bool:
        """Whether the rank that stands for the peer is at the same place of its pipeline, if it is in one."""
        group = self._groups.get(meeting.group)
        if group is None or group.axis != "pp":
            return True
        return self._places.get(self._stands_for[meeting.peer]) == ranks.index(meeting.peer)

    def alone(self) -> list[tuple[int, Meeting]]:
        """Return transfers of which one side is nobody's."""
        return [
            found
            for found, n in zip(self.meetings, self.participants, strict=True)
            if found[1].peer >= 0 and n == 1
        ]

    def short(self, rehearsed: Collection[int]) -> int:
        """Return how many collectives ranks of their group that were *rehearsed* take no part in."""
        own = {group.id: len({*group.ranks} & {*rehearsed}) for group in self._groups.values()}
        return sum(
            meeting.peer < 0 and n < own.get(meeting.group, 0)
            for (_, meeting), n in zip(self.meetings, self.participants, strict=True)
        )

    def costs(self) -> tuple[tuple[Transfer, ...], Int32Array]:
        """Return the distinct costs, and which one each communication has."""
        # Each rank of an uneven exchange has sizes of its own; all others agree on one.
        which = [
            self._uneven(number) if self._is_uneven(number) else self._cost(rank, meeting)
            for number, (rank, meeting) in enumerate(self.meetings)
        ]
        return tuple(self._transfers), np.array(which, np.int32)

    def _cost(self, rank: int, meeting: Meeting) -> int:
        # Of a collective it does not matter which rank was asked, of a transfer it does.
        key = (
            meeting.kind,
            meeting.size_bytes,
            meeting.group,
            meeting.peer,
            rank if meeting.peer >= 0 else -1,
        )
        if key not in self._costs:
            transfer = self._transfer(rank, meeting)
            self._costs[key] = self._transfers.setdefault(transfer, len(self._transfers))
        return self._costs[key]

    def assumed(self) -> list[str]:
        """Return sentences about communication with ranks that were not rehearsed or traced, if any."""
        if self._took_ns:
            words = "communication with ranks of which there is no trace takes what it took, waiting included"
            return [f"{words}: neither other links nor other work change it"]
        if not self._n_assumed:
            return []
        words = f"{self._n_assumed} all-to-alls are uneven, and ranks that were not rehearsed take part"
        stands = "the rank that stands for them sends and gets"
        return [f"{words}: what these send each other is in proportion to what {stands}"]

    def _is_uneven(self, number: int) -> bool:
        parts = self._exchanges.get(number, {})
        return any(part.splits is not None for part in parts.values())

    def _uneven(self, number: int) -> int:
        """Return which cost an all-to-all has in which ranks send each other different amounts."""
        parts = self._exchanges[number]
        ranks = self._groups[self.meetings[number][1].group].ranks
        known = {rank: part.splits or even(part.size_bytes, len(ranks)) for rank, part in parts.items()}
        self._n_assumed += len(known) < len(ranks)
        # The sizes themselves are the key: equal exchanges of later steps are priced once.
        key = (ranks, tuple(known.items()))
        if key not in self._costs:
            sent = sent_bytes(ranks, known, self._stands_for)
            transfer = self.network.all_to_all_v(sent, ranks)
            self._costs[key] = self._transfers.setdefault(transfer, len(self._transfers))
        return self._costs[key]

    def _transfer(self, rank: int, meeting: Meeting) -> Transfer:
        key = (meeting.kind, meeting.group, meeting.size_bytes, meeting.peer)
        if key in self._took_ns:
            return Transfer(self._took_ns[key], 0, "as it took")
        if meeting.peer >= 0:
            ends = (rank, meeting.peer) if meeting.kind == "send" else (meeting.peer, rank)
            return self.network.p2p(meeting.size_bytes, *ends)
        group = self._groups.get(meeting.group)
        ranks = group.ranks if group is not None else (rank,)
        if meeting.kind == "barrier":
            return self.network.barrier(ranks)
        kind = LIKE.get(meeting.kind, meeting.kind)
        # A collective that is not modelled is taken for the simplest: all bytes over each link.
        return self.network.collective(kind if kind in KINDS else "broadcast", meeting.size_bytes, ranks)


def assembled(ranks: Sequence[RankTasks], joiner: Joiner, first_step: int) -> Program:
    """Return the program of *ranks*; steps are counted from *first_step*."""
    tasks = [task for one in ranks for task in one.tasks]
    streams: dict[str, int] = {}
    labels: dict[Any, int] = {}
    instance = [
        -1 if task.meeting is None else joiner.number(one.rank, task.meeting)
        for one in ranks
        for task in one.tasks
    ]
    places = [one.places[task.place] for one in ranks for task in one.tasks]
    dep_start, deps = _dependencies(ranks)
    return Program(
        rank=_ints([one.rank for one in ranks for _ in one.tasks], np.int32),
        stream=_ints([streams.setdefault(task.stream, len(streams)) for task in tasks], np.int32),
        label=_ints([labels.setdefault(task.label, len(labels)) for task in tasks], np.int32),
        duration_ns=_ints([task.duration_ns for task in tasks], np.int64),
        instance=_ints(instance, np.int64),
        **{
            name: _ints([place[name] for place in places], np.int32)
            for name in ("microbatch", "layer", "stage", "virtual_stage")
        },
        step=_ints([place["step"] - first_step for place in places], np.int32),
        peer=_ints([task.meeting.peer if task.meeting else -1 for task in tasks], np.int32),
        flops=_ints([task.flops for task in tasks], np.int64),
        bytes_moved=_ints([task.bytes_moved for task in tasks], np.int64),
        memory_bound=_ints([task.memory_bound for task in tasks], np.int32),
        dep_start=dep_start,
        deps=deps,
        streams=tuple(streams),
        labels=tuple(labels),
        **_instances(joiner),
    )


def _dependencies(ranks: Sequence[RankTasks]) -> tuple[Any, Any]:
    """Return what every task of *ranks* waits for, as ``dep_start`` and ``deps`` of a program."""
    after, offset = [], 0
    for one in ranks:
        # Tasks are numbered anew over all ranks, one rank after another.
        after += [[other + offset for other in task.after] for task in one.tasks]
        offset += len(one.tasks)
    dep_start = np.zeros(len(after) + 1, np.int64)
    np.cumsum([len(found) for found in after], out=dep_start[1:])
    return dep_start, _ints([other for found in after for other in found], np.int64)


def _instances(joiner: Joiner) -> dict[str, Any]:
    """Return what a program says of its communications, by the names of its fields."""
    transfers, which = joiner.costs()
    met = [meeting for _, meeting in joiner.meetings]
    return {
        "instance_size_bytes": _ints([meeting.size_bytes for meeting in met], np.int64),
        "instance_group": _ints([meeting.group for meeting in met], np.int32),
        "instance_sequence": _ints([meeting.sequence for meeting in met], np.int64),
        "instance_participants": _ints(joiner.participants, np.int32),
        "transfers": transfers,
        "instance_transfer": which,
    }


def _ints(values: Sequence[int], kind: type[np.signedinteger[Any]]) -> Any:
    return np.array(values, kind)
