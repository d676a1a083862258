"""How full transfers make the links between switches: from leaves to spines, from spines to the core.

A group that reaches beyond a leaf is taken to send all that leaves a node up to where its members meet, at
the rate that the network answers with: the fair share when all ranks do the same. So these links are never
filled beyond their width by what fits through the ranks' own ways; what they show is where the traffic
goes, and a change of their width holds up everyone behind them.

``link_changes`` reads what ``--link-changes`` says of any link: a slow NIC, one that fails and comes back.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pyarrow as pa

from foretrace.simulator.builder.groups import Groups
from foretrace.simulator.engine.changes import FAR, IN, NEAR, OUT, SWITCHES, Above, Change, Way
from foretrace.simulator.engine.filled import Filled
from foretrace.simulator.errors import JobError
from foretrace.simulator.network.cost import Network
from foretrace.simulator.program import Int64Array, Program, to_ns
from foretrace.topologies.errors import UnitError
from foretrace.topologies.units import parse_time
from foretrace.traces.timeline import LINKS


def link_changes(text: str) -> list[Change]:
    """Return the changes that *text* lists, ``rank:tier:capacity[@time]`` separated by commas.

    A tier is ``near``, the rank's way into its node, or ``far``, its way out; or ``leaf`` or ``spine``, the
    way of the switch of that number upward. Capacity is what is left of the width, 0 if it is down. Both
    directions change. Raises JobError if a part is not of that form.

    >>> [(change.at_ns, change.way.rank, change.capacity) for change in link_changes("3:far:0.25@2 ms")][:1]
    [(2000000, 3, 0.25)]
    """
    return [change for part in text.split(",") if part.strip() for change in _changes(part.strip())]


def _changes(part: str) -> Iterator[Change]:
    what, _, when = part.partition("@")
    rank, _, rest = what.partition(":")
    tier, _, capacity = rest.partition(":")
    try:
        # No time: from the start on.
        at_ns = to_ns(parse_time(when)) if "@" in part else 0
        found = int(rank), float(capacity)
    except (ValueError, UnitError):
        raise JobError(
            f"link_changes: {part!r} is not rank:tier:capacity or rank:tier:capacity@time, "
            "e.g. 3:far:0.25@2ms"
        ) from None
    if tier not in {NEAR, FAR, *SWITCHES}:
        raise JobError(
            f"link_changes: {part!r}: no tier {tier!r}; near and far are ways of a rank, leaf and spine of a "
            "switch"
        )
    if found[0] < 0 or not 0 <= found[1] <= 1:
        raise JobError(
            f"link_changes: {part!r}: a rank or number of at least 0, and a capacity between 0 and 1, the "
            "share of the width that is left"
        )
    for direction in (IN, OUT):
        yield Change(at_ns, Way(found[0], tier, direction), found[1])


def links_table(filled: Filled, changes: Sequence[Change] = ()) -> pa.Table:
    """Return how full links were in the columns of ``LINKS``, by link and time.

    The metadata of the schema hold *changes* under ``"changes"``: a list in JSON of ``rank``, ``tier``,
    ``direction``, ``at_ns`` and ``capacity``, the share of the width from then on.
    """
    rank = np.array([way.rank for way in filled.ways], np.int32)[filled.way]
    tier = _names([way.tier for way in filled.ways], filled.way)
    direction = _names([way.direction for way in filled.ways], filled.way)
    said = [
        {**change.way._asdict(), "at_ns": change.at_ns, "capacity": change.capacity} for change in changes
    ]
    return pa.Table.from_arrays(
        [rank, tier, direction, filled.start_ns, filled.end_ns, filled.used],
        schema=LINKS.with_metadata({"changes": json.dumps(said)}) if said else LINKS,
    )


def _names(of: Sequence[str], chosen: Int64Array) -> pa.DictionaryArray:
    """Return the *chosen* ones of names that come up many times."""
    # Dictionaries of arrow take each name once; the rows hold its number.
    names = sorted(set(of))
    numbers = np.array([names.index(name) for name in of], np.int32)
    return pa.DictionaryArray.from_arrays(numbers[chosen], pa.array(names, pa.string()))


SLACK: Final = 1 - 1e-9
"""Share of a link that is counted as all of it, so that rounding never fills one that is just full."""


def uplinks(
    program: Program, network: Network, groups: Groups, stands_for: Sequence[int] | None = None
) -> Above:
    """Return what each communication of *program* fills of the links between switches.

    *network*: where the ranks are. *stands_for*: for each rank the one that is simulated in its place; what
    it sends counts as often.
    """
    asked = _Uplinks(network, groups, stands_for or range(len(network.placement)))
    # Communications of the same kind between the same ranks fill the same links: each is worked out once.
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
    # Every member of a communication has a task; the first stands for all.
    instances, first = np.unique(program.instance[tasks], return_index=True)
    tasks = tasks[first]
    sends = np.array([label.kind == "send" for label in program.labels], np.bool_)[program.label[tasks]]
    rank, peer = program.rank[tasks], program.peer[tasks]
    # What is received is seen from its sender: both sides of a send make the same meeting.
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
            # Of a folded program one group stands for all those whose ranks are simulated by the same ones.
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
                # Groups of the same axis and size have the same places, so that the same two of each
                # exchange.
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
