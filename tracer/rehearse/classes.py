"""Which ranks of a world behave alike, by the groups that a run has shown, and whether they do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from traces.layout import Group
from traces.rehearsal import WHAT, RankTables

SHOWN = 3
"""Most differences that are listed."""


class Classes:
    """Classes of ranks: those at the same place of a pipeline are one.

    Args:
        world_size: ranks of the world.
        groups: process groups that the first rank has shown.
        first: the rank that has shown them.

    Attributes:
        pipeline: the ranks of the first one's pipeline, in order; itself if there is none.
    """

    def __init__(self, world_size: int, groups: Sequence[Group], first: int = 0) -> None:
        self._world_size = world_size
        own = [group for group in groups if group.axis == "pp" and first in group.ranks]
        longest = max(own, key=lambda group: len(group.ranks), default=None)
        self.pipeline = longest.ranks if longest is not None and len(longest.ranks) > 1 else (first,)
        self._places = self._places_of([group for group in groups if group.axis == "pp"])

    def place(self, rank: int) -> int:
        """Return the place of *rank* in its pipeline.

        Pipelines of which no group is known are taken to be cut like the one that is: its ranks come at even
        distances, and the next such pipelines fill the gaps, then follow. Of one with other distances, ranks
        between two neighbours belong to the first of them.
        """
        if rank in self._places:
            return self._places[rank]
        distances = {after - before for before, after in pairwise(self.pipeline)}
        if len(distances) == 1:
            return rank // distances.pop() % len(self.pipeline)
        before = [at for at, other in enumerate(self.pipeline) if other <= rank]
        return before[-1] if before else 0

    def representatives(self, acted: Sequence[int]) -> list[int]:
        """Return for every rank the one of *acted* that stands for it: of its place, or else the nearest."""
        of_place: dict[int, int] = {}
        for rank in acted:
            of_place.setdefault(self.place(rank), rank)
        found = []
        for rank in range(self._world_size):
            nearest = max((other for other in acted if other <= rank), default=acted[0])
            found.append(rank if rank in acted else of_place.get(self.place(rank), nearest))
        return found

    def samples(self, n: int) -> Iterator[tuple[int, int]]:
        """Yield ranks that others stand for, the last of a class each, and who stands for them."""
        stands = self.representatives(self.pipeline)
        for representative in [*dict.fromkeys((self.pipeline[0], self.pipeline[-1]))][:n]:
            members = [rank for rank, other in enumerate(stands) if other == representative != rank]
            if members:
                yield members[-1], representative

    @staticmethod
    def _places_of(groups: Sequence[Group]) -> dict[int, int]:
        return {rank: at for group in groups for at, rank in enumerate(group.ranks)}


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
