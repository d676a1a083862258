"""How full transfers make the links between switches: from leaves to spines, from spines to the core.

A group that reaches beyond a leaf is taken to send all that leaves a node up to where its members meet, at
the rate that the network answers with: the fair share when all ranks do the same. So these links are never
filled beyond their width by what fits through the ranks' own ways; what they show is where the traffic
goes, and a change of their width holds up everyone behind them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from foretrace.simulator.builder.groups import Groups
from foretrace.simulator.engine.changes import IN, OUT, Above, Way
from foretrace.simulator.network.cost import Network
from foretrace.simulator.program import Int64Array, Program

SLACK: Final = 1 - 1e-9
"""Share of a link that is counted as all of it, so that rounding never fills one that is just full."""


def uplinks(
    program: Program, network: Network, groups: Groups, stands_for: Sequence[int] | None = None
) -> Above:
    """Return what each communication of *program* fills of the links between switches.

    Args:
        program: with the ranks that are simulated.
        network: where the ranks are.
        groups: the process groups that the program speaks of.
        stands_for: for each rank the one that is simulated in its place; what it sends counts as often.
    """
    asked = _Uplinks(network, groups, stands_for or range(len(network.placement)))
    kinds, kind = np.unique(_meetings(program), axis=0, return_inverse=True)
    loads: list[Mapping[Way, float]] = []
    for transfer, group, source, target in kinds.tolist():
        far = program.transfers[transfer].far
        load: Mapping[Way, float] = {}
        if far > 0:
            load = asked.of_group(group) if source < 0 else asked.of_pair(group, source, target)
        loads.append({way: share * far * SLACK for way, share in load.items()})
    return Above(tuple(loads), kind.reshape(-1))


def _meetings(program: Program) -> Int64Array:
    """Return transfer, group, sender and receiver of each communication; -1 where all send."""
    tasks = np.flatnonzero(program.instance >= 0)
    instances, first = np.unique(program.instance[tasks], return_index=True)
    tasks = tasks[first]
    sends = np.array([label.kind == "send" for label in program.labels], np.bool_)[program.label[tasks]]
    rank, peer = program.rank[tasks], program.peer[tasks]
    source, target = np.where(sends, rank, peer), np.where(sends, peer, rank)
    pair = [np.where(peer < 0, -1, end) for end in (source, target)]
    of = program.instance_transfer[instances], program.instance_group[instances]
    return np.stack([*of, *pair], axis=1).astype(np.int64)


@dataclass(slots=True)
class _Uplinks:
    """Remembers what groups and pairs fill, those included that do the same elsewhere."""

    network: Network
    groups: Groups
    stands_for: Sequence[int]
    known: dict[tuple[int, ...], Mapping[Way, float]] = field(default_factory=dict)

    def of_group(self, group_id: int) -> Mapping[Way, float]:
        """Return what a collective of a group fills, in both directions."""
        if (group_id,) not in self.known:
            group = self.groups.all[group_id]
            role = frozenset(self.stands_for[rank] for rank in group.ranks)
            alike = [
                other.ranks
                for other in self.groups.all
                if other.axis == group.axis
                and len(other.ranks) == len(group.ranks)
                and frozenset(self.stands_for[rank] for rank in other.ranks) == role
            ]
            load: dict[Way, float] = defaultdict(float)
            for ranks in alike:
                for (below, _), share in self.network.uplinks(ranks).items():
                    for direction in (IN, OUT):
                        load[_way(below, direction)] += share
            self.known[group_id,] = load
        return self.known[group_id,]

    def of_pair(self, group_id: int, source: int, target: int) -> Mapping[Way, float]:
        """Return what a transfer from *source* to *target* fills: up from one, down to the other."""
        key = (group_id, source, target)
        if key not in self.known:
            ranks = self.groups.all[group_id].ranks
            places = ranks.index(source), ranks.index(target)
            load: dict[Way, float] = defaultdict(float)
            for other in self.groups.all:
                if other.axis != self.groups.all[group_id].axis or len(other.ranks) != len(ranks):
                    continue
                pair = [other.ranks[place] for place in places]
                if [self.stands_for[rank] for rank in pair] != [
                    self.stands_for[source],
                    self.stands_for[target],
                ]:
                    continue
                for rank, direction in zip(pair, (OUT, IN), strict=True):
                    for (below, _), share in self.network.uplinks(pair, (rank,)).items():
                        load[_way(below, direction)] += share
            self.known[key] = load
        return self.known[key]


def _way(below: str, direction: str) -> Way:
    """Return the way of a switch upward, ``"leaf:3"``: its number, its tier, and the direction."""
    tier, _, number = below.partition(":")
    return Way(int(number), tier, direction)
