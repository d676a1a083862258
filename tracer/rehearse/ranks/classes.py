"""Which ranks of a world behave alike, by the groups that a run has shown, and whether they do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from traces.layout import Group
from traces.rehearsal import WHAT, RankTables

SHOWN = 3
"""Most differences that are listed."""


class Line:
    """The group of one rank, to which those of others are alike.

    Args:
        groups: ranks of each group that is known.
        first: the rank whose group it is.

    Attributes:
        ranks: of the longest group that *first* is in, in order; itself if there is none.
    """

    def __init__(self, groups: Sequence[Sequence[int]], first: int) -> None:
        longest = max((ranks for ranks in groups if first in ranks), key=len, default=())
        self.ranks = tuple(longest) if len(longest) > 1 else (first,)
        self._places = {rank: at for ranks in groups for at, rank in enumerate(ranks)}

    def place(self, rank: int) -> int:
        """Return the place of *rank* in its group.

        Groups that are not known are taken to be cut like the one that is: its ranks come at even
        distances, and the next such groups fill the gaps, then follow. Of one with other distances, ranks
        between two neighbours belong to the first of them.
        """
        if rank in self._places:
            return self._places[rank]
        distances = {after - before for before, after in pairwise(self.ranks)}
        if len(distances) == 1:
            return rank // distances.pop() % len(self.ranks)
        before = [at for at, other in enumerate(self.ranks) if other <= rank]
        return before[-1] if before else 0


class Classes:
    """Classes of ranks: those at the same place of a pipeline, with the same experts, are one.

    Args:
        world_size: ranks of the world.
        groups: process groups that the first rank has shown.
        first: the rank that has shown them.
        dealt: ranks of groups over which experts of unlike loads are dealt out; none where loads are alike.

    Attributes:
        pipeline: the ranks of the first one's pipeline, in order; itself if there is none.
        members: a rank of each class: those of the pipeline, each with the ranks that have the other experts.
    """

    def __init__(
        self,
        world_size: int,
        groups: Sequence[Group],
        first: int = 0,
        dealt: Sequence[tuple[int, ...]] = (),
    ) -> None:
        self._world_size = world_size
        self._stages = Line([group.ranks for group in groups if group.axis == "pp"], first)
        self._experts = Line(dealt, first)
        self.pipeline = self._stages.ranks
        shifts = [rank - first for rank in self._experts.ranks]
        shifted = [rank + shift for rank in self.pipeline for shift in shifts]
        self.members = tuple(rank for rank in shifted if 0 <= rank < world_size)

    def place(self, rank: int) -> tuple[int, int]:
        """Return the places of *rank* in its pipeline, and among those over which experts are dealt out."""
        return self._stages.place(rank), self._experts.place(rank)

    def representatives(self, acted: Sequence[int]) -> list[int]:
        """Return for every rank the one of *acted* that stands for it: of its place, or else the nearest."""
        of_place: dict[tuple[int, int], int] = {}
        for rank in acted:
            of_place.setdefault(self.place(rank), rank)
        found = []
        for rank in range(self._world_size):
            nearest = max((other for other in acted if other <= rank), default=acted[0])
            found.append(rank if rank in acted else of_place.get(self.place(rank), nearest))
        return found

    def samples(self, n: int) -> Iterator[tuple[int, int]]:
        """Yield ranks that others stand for, the last of a class each, and who stands for them."""
        stands = self.representatives(self.members)
        for representative in [*dict.fromkeys((self.members[0], self.members[-1]))][:n]:
            members = [rank for rank, other in enumerate(stands) if other == representative != rank]
            if members:
                yield members[-1], representative


def groups_of(outcomes: Mapping[int, Mapping[str, Any]]) -> tuple[Group, ...]:
    """Return every group that ranks of which these are the *outcomes* have shown, once."""
    found: dict[int, Group] = {}
    for outcome in outcomes.values():
        for one in outcome["groups"]:
            found.setdefault(one["id"], Group(id=one["id"], axis=one["axis"], ranks=tuple(one["ranks"])))
    return tuple(found[number] for number in sorted(found))


def peers_of(rank: int, groups: Sequence[Group]) -> list[int]:
    """Return the other ranks of the pipeline of *rank*: it waits for them, and they for it."""
    line = Line([group.ranks for group in groups if group.axis == "pp"], rank)
    return [other for other in line.ranks if other != rank]


def shapes_that_differ(outcomes: Mapping[int, Mapping[str, Any]], only: int | None = None) -> list[str]:
    """Return a sentence for each stage, of the rank *only* if given, that got what is not sent to it."""
    sent = {stage: shape for one in outcomes.values() for stage, shape in one["sent"].items()}
    return [
        f"stage {stage} was given {taken} as its input, but stage {int(stage) - 1} sends {sent[before]}"
        for rank, one in outcomes.items()
        if only in {None, rank}
        for stage, taken in one["taken"].items()
        if (before := str(int(stage) - 1)) in sent and sent[before] != taken
    ]


def differences(one: RankTables, other: RankTables) -> str:
    """Return in what two ranks differ, in words; empty if they do the same work and communication.

    Groups and peers are others by nature; kinds, sizes and numbers are held against each other.
    """
    ours, theirs = _counted(one), _counted(other)
    found = [
        f"{key} {ours[key]} against {theirs[key]} times"
        for key in sorted({*ours, *theirs})
        if ours[key] != theirs[key]
    ]
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return "; ".join(found[:SHOWN]) + more


def _counted(tables: RankTables) -> Counter[str]:
    works = [f"{row['name']} ({row['shapes']})" for row in tables.works.to_pylist()]
    messages = [f"{row['kind']} of {row['size_bytes']} bytes" for row in tables.messages.to_pylist()]
    found: Counter[str] = Counter()
    for what, item in zip(*(tables.events[name].to_pylist() for name in ("what", "item")), strict=True):
        if WHAT[what] == "op":
            found[works[item]] += 1
        elif WHAT[what] == "communication":
            found[messages[item]] += 1
    return found
