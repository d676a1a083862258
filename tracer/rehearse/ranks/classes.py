"""Which ranks of a world behave alike, derived from their process groups, and checks whether they do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from foretrace.traces.layout import Group
from foretrace.traces.rehearsal import WHAT, RankTables


class Line:
    """The group of one rank, of which the groups of other ranks are copies.

    Args:
        groups: ranks of each known group.
        first: the rank whose group it is.

    Attributes:
        ranks: ranks of the longest group that *first* is in, in order; only *first* if there is none.
    """

    def __init__(self, groups: Sequence[Sequence[int]], first: int) -> None:
        longest = max((ranks for ranks in groups if first in ranks), key=len, default=())
        self.ranks = tuple(longest) if len(longest) > 1 else (first,)
        self._places = {rank: at for ranks in groups for at, rank in enumerate(ranks)}

    def place(self, rank: int) -> int:
        """Return the place of *rank* in its group.

        Unknown groups are assumed to be laid out like the known one: its ranks are evenly spaced, and the
        next such groups fill the gaps, then follow. If they are not evenly spaced, ranks between two
        neighbours belong to the first of them.
        """
        if rank in self._places:
            return self._places[rank]
        distances = {after - before for before, after in pairwise(self.ranks)}
        if len(distances) == 1:
            return rank // distances.pop() % len(self.ranks)
        before = [at for at, other in enumerate(self.ranks) if other <= rank]
        return before[-1] if before else 0


class Classes:
    """Classes of ranks: ranks at the same stage of a pipeline, with the same experts, form one class.

    Args:
        world_size: ranks of the world.
        groups: process groups that the first rank has used.
        first: that rank.
        dealt: ranks of groups over which experts of unequal loads are spread; empty if loads are equal.

    Attributes:
        pipeline: the ranks of the pipeline of *first*, in order; only *first* if there is none.
        members: one rank of each class: those of the pipeline, and for each the ranks with the other experts.
    """

    def __init__(
        self,
        world_size: int,
        groups: Sequence[Group],
        first: int = 0,
        dealt: Sequence[tuple[int, ...]] = (),
    ) -> None:
        self._world_size, self._groups = world_size, groups
        self._stages = Line([group.ranks for group in groups if group.axis == "pp"], first)
        self._experts = Line(dealt, first)
        self.pipeline = self._stages.ranks
        shifts = [rank - first for rank in self._experts.ranks]
        shifted = [rank + shift for rank in self.pipeline for shift in shifts]
        self.members = tuple(rank for rank in shifted if 0 <= rank < world_size)

    def place(self, rank: int) -> tuple[int, int]:
        """Return the place of *rank* in its pipeline, and among the ranks over which experts are spread."""
        return self._stages.place(rank), self._experts.place(rank)

    def representatives(self, acted: Sequence[int]) -> list[int]:
        """Return for every rank the one of *acted* that represents it: one at its place, else the nearest."""
        of_place: dict[tuple[int, int], int] = {}
        for rank in acted:
            of_place.setdefault(self.place(rank), rank)
        found = []
        for rank in range(self._world_size):
            nearest = max((other for other in acted if other <= rank), default=acted[0])
            found.append(rank if rank in acted else of_place.get(self.place(rank), nearest))
        return found

    def samples(self, n: int, acted: Sequence[Group] = ()) -> Iterator[tuple[int, int]]:
        """Yield represented ranks with the rank that represents them: of *n* classes, some along every group.

        Along each group in which a representative communicates, that is the last other rank of its class. A
        class whose representative communicates with none has the last rank of all.

        Args:
            n: classes to check: the first one, then the last.
            acted: groups of ranks that have been acted out, such as of the last rank of the world.
        """
        stands = self.representatives(self.members)
        for representative in [*dict.fromkeys((self.members[0], self.members[-1]))][:n]:
            members = [rank for rank, other in enumerate(stands) if other == representative != rank]
            own = [group.ranks for group in self._groups if representative in group.ranks]
            along = ([rank for rank in ranks if rank in members] for ranks in sorted(own, key=len))
            ends = [*dict.fromkeys(ranks[-1] for ranks in along if ranks)] or members[-1:]
            for end in self._with_corner(representative, ends, members, acted):
                yield end, representative

    def _with_corner(
        self, representative: int, ends: list[int], members: Sequence[int], acted: Sequence[Group]
    ) -> list[int]:
        """Return *ends* with the last rank of the world, if that is of the class.

        It has mostly been acted out beside the first, and may be in no group of the representative. It takes
        the place of an end where it shares a group with another: along the axis of the first it differs from
        the second, so that the first need not be run.
        """
        corner = self._world_size - 1
        if corner not in members:
            return ends
        others = [end for end in ends if end != corner]
        apart = [group.ranks for group in acted if representative not in group.ranks]
        near = [end for end in others if any({end, corner} <= {*ranks} for ranks in apart)]
        spare = [end for end in reversed(others) if end != near[0]][:1] if near else []
        return [*(end for end in others if end not in spare), corner]


def groups_of(outcomes: Mapping[int, Mapping[str, Any]], chain: Sequence[int] = ()) -> tuple[Group, ...]:
    """Return every group that ranks of which these are the *outcomes* have shown, once.

    Ranks of a *chain*, which hand results on by hand, are one more, as stages of a pipeline.
    """
    found: dict[int, Group] = {}
    for outcome in outcomes.values():
        for one in outcome["groups"]:
            found.setdefault(one["id"], Group(id=one["id"], axis=one["axis"], ranks=tuple(one["ranks"])))
    if chain:
        number = max(found, default=-1) + 1
        found[number] = Group(id=number, axis="pp", ranks=tuple(chain))
    return tuple(found[number] for number in sorted(found))


def peers_of(rank: int, groups: Sequence[Group]) -> list[int]:
    """Return the other ranks of the pipeline of *rank*."""
    line = Line([group.ranks for group in groups if group.axis == "pp"], rank)
    return [other for other in line.ranks if other != rank]


def shapes_that_differ(outcomes: Mapping[int, Mapping[str, Any]], only: int | None = None) -> list[str]:
    """Return a sentence for each stage, of the rank *only* if given, that received what is not sent to it."""
    sent = {stage: shape for one in outcomes.values() for stage, shape in one["sent"].items()}
    return [
        f"stage {stage} was given {taken} as its input, but stage {int(stage) - 1} sends {sent[before]}"
        for rank, one in outcomes.items()
        if only in {None, rank}
        for stage, taken in one["taken"].items()
        if (before := str(int(stage) - 1)) in sent and sent[before] != taken
    ]


def differences(one: RankTables, other: RankTables) -> str:
    """Return how two ranks differ, in words; empty if they do the same work and communication.

    Groups and peers always differ; kinds, sizes and counts are compared.
    """
    ours, theirs = _counted(one), _counted(other)
    kinds = sorted({*ours, *theirs})
    found = [key for key in kinds if ours[key] != theirs[key]]
    if not found:
        return ""
    first = found[0]
    return (
        f"{len(found)} of {len(kinds)} kinds of work and messages are done a different number of times "
        f"({first.replace(' -> )', ')')}: {ours[first]} against {theirs[first]})"
    )


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
