"""Which ranks of a world behave alike, which hand results on, and which are rehearsed again together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from foretrace.tracer.rehearse.data.stated import SHARED, UNHEARD
from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.world.acting import MOST_SENDERS, Troupe
from foretrace.tracer.rehearse.world.communicating import KINDS
from foretrace.tracer.rehearse.world.letters import Address, left
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


# Pipelines by hand: ranks that hand results on by plain transfers, in a group that is not one of a
# pipeline.


SIDES: Final = 2
"""Most neighbours in a chain."""


def acted_chain(
    troupe: Troupe,
    outcomes: dict[int, dict[str, Any]],
    first: int,
    also: Collection[int] | None = None,
) -> tuple[int, ...]:
    """Return the chain that *first* is in, unless the script has a pipeline with a group of its own."""
    if any(group.axis == "pp" for group in groups_of(outcomes)):
        return ()
    added: dict[int, dict[str, Any]] = {}

    def act(ranks: Collection[int]) -> Collection[int]:
        known = {*outcomes, *(also or ()), *added}
        if also is not None and (wanted := [rank for rank in ranks if rank not in known]):
            added.update(troupe.act(wanted))
        return [rank for rank in ranks if rank in {*known, *added}]

    found = chain(first, troupe.world_size, troupe.tables, act)
    for rank, outcome in added.items():
        if rank in found:
            outcomes[rank] = outcome
        else:
            troupe.forget(rank)
    return found


def transfers(tables: RankTables) -> list[tuple[str, int]]:
    """Return what a rank sends to which other, and receives from which, in order."""
    kinds, peers = (tables.messages[name].to_pylist() for name in ("kind", "peer"))
    what, items = (tables.events[name].to_pylist() for name in ("what", "item"))
    return [
        (kinds[item], peers[item])
        for event, item in zip(what, items, strict=True)
        if WHAT[event] == "communication" and peers[item] >= 0
    ]


def is_ring(rank: int, found: Sequence[tuple[str, int]], world_size: int) -> bool:
    """Whether a *rank* receives from one side what it sends to the other, as if all did as it does.

    >>> is_ring(0, [("send", 1), ("recv", 3)], 4), is_ring(0, [("send", 1), ("recv", 1)], 4)
    (True, False)
    """
    sent = Counter((peer - rank) % world_size for kind, peer in found if kind == "send")
    return sent == Counter((rank - peer) % world_size for kind, peer in found if kind != "send")


def chain(
    first: int,
    world_size: int,
    tables_of: Callable[[int], RankTables],
    act: Callable[[Collection[int]], Collection[int]],
) -> tuple[int, ...]:
    """Return the ranks of the chain that *first* is in, from one end to the other; none if it is in none."""
    found = transfers(tables_of(first))
    if is_ring(first, found, world_size) and not _are_two(first, found, tables_of, act):
        return ()
    neighbours: dict[int, list[int]] = {}
    wanted = {first}
    while wanted and len(neighbours) + len(wanted) <= MOST_RANKS:
        # Each member names its neighbours, until no new one turns up.
        for rank in act(sorted(wanted)):
            neighbours[rank] = sorted({peer for _, peer in transfers(tables_of(rank))})
        if not wanted <= neighbours.keys() or any(len(peers) > SIDES for peers in neighbours.values()):
            return ()
        wanted = {peer for peers in neighbours.values() for peer in peers} - neighbours.keys()
    ends = sorted(rank for rank, peers in neighbours.items() if len(peers) == 1)
    return () if wanted or not ends else _walked(first if first in ends else ends[0], neighbours)


def _are_two(
    first: int,
    found: Sequence[tuple[str, int]],
    tables_of: Callable[[int], RankTables],
    act: Callable[[Collection[int]], Collection[int]],
) -> bool:
    """Whether a rank hands results on to the only one it meets: in a ring of two, both do the same in turn.

    Half a world apart, each receives from the side that it sends to, whichever of the two it is.
    """
    peers = {peer for _, peer in found}
    if len(peers) != 1 or not act([*peers]):
        return False
    return [kind for kind, _ in found] != [kind for kind, _ in transfers(tables_of(*peers))]


def _walked(end: int, neighbours: dict[int, list[int]]) -> tuple[int, ...]:
    """Return the ranks of a chain in order, from its *end* on."""
    found = [end]
    while after := [peer for peer in neighbours[found[-1]] if peer not in found]:
        found.append(after[0])
    return tuple(found)


# Rehearses ranks again that send each other numbers, until each has received those that it needs.


MOST_RANKS: Final = 64
"""Ranks of a chain that are rehearsed, or of a group because what its members tell each other differs."""

MOST_ROUNDS: Final = 6
"""How often ranks are rehearsed: with each round what depends on others is known one exchange further."""

ALIKE: Final = (
    "ranks {} of a group of {} send each other different numbers, and each was assumed to receive its own "
    "from all others: rehearse the whole group (--ranks) if shapes depend on them"
)

UNSETTLED: Final = "what ranks {} send each other still changed after {} rehearsals of each"


def hear_senders(
    act: Callable[[Sequence[int]], None], outcomes: Mapping[int, Mapping[str, Any]], *, adds: bool
) -> None:
    """Rehearse ranks again, in the order of stages, that assumed other shapes or numbers than are sent.

    Args:
        act: rehearses ranks, whether or not they have been.
        outcomes: what is known of ranks that have been rehearsed; *act* adds to it.
        adds: whether senders are rehearsed that have not been.

    Raises:
        RehearsalError: a script reads what a rank has sent that is not rehearsed.
    """

    def first_stage(rank: int) -> int:
        return min(map(int, outcomes[rank]["taken"]), default=0)

    n_before = len(outcomes)
    # A sender may need what others send: they are rehearsed as well, as long as there are few.
    while (
        adds and (missing := _senders(outcomes)) and len(outcomes) - n_before + len(missing) <= MOST_SENDERS
    ):
        act(missing)
    for rank in sorted(outcomes, key=first_stage):
        has_missed = not outcomes.keys().isdisjoint(outcomes[rank]["missed"])
        if has_missed or shapes_that_differ(outcomes, only=rank):
            act([rank])
    if missing := _senders(outcomes):
        lines = (line for one in outcomes.values() for line in one["stated"] if UNHEARD in line)
        which = ", ".join(map(str, missing))
        said = next(lines, "a script reads numbers").partition(" (")[0]
        raise RehearsalError(f"{said}: rehearse also {which} (--ranks)")


def _senders(outcomes: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """Return the ranks that have not been rehearsed, and send what others have needed."""
    return sorted({rank for one in outcomes.values() for rank in one["missed"]} - outcomes.keys())


def together(
    act: Callable[[Sequence[int]], None],
    outcomes: Mapping[int, Mapping[str, Any]],
    folder: Path,
    *,
    adds: bool,
) -> tuple[list[tuple[int, ...]], list[str]]:
    """Rehearse ranks again that send each other different numbers.

    Args:
        act: rehearses ranks, whether or not they have been.
        outcomes: what is known of ranks that have been rehearsed; *act* adds to it.
        folder: in which ranks write what they send to others.
        adds: whether members that have not been rehearsed are added; too many are reported instead.

    Returns:
        Groups whose members were all rehearsed for this reason; sentences to report.
    """
    if not any(SHARED in told for one in outcomes.values() for told in one["stated"]):
        return [], []
    groups, acted = {group.id: group.ranks for group in groups_of(outcomes)}, {*outcomes}
    whole, said, added = set[int](), list[str](), list[tuple[int, ...]]()
    for number in sorted(differing(left(folder)) & groups.keys()):
        members = tuple(groups[number])
        if not set(members) <= acted | whole:
            if not adds or len(members) > MOST_RANKS:
                there = ", ".join(map(str, sorted(acted.intersection(members))))
                said += [ALIKE.format(there, len(members))] if adds else []
                continue
            added.append(members)
        whole.update(members)
    if not whole or _settle(act, sorted(whole), folder):
        return added, said
    return added, [*said, UNSETTLED.format(", ".join(map(str, sorted(whole))), MOST_ROUNDS)]


def differing(letters: Mapping[Any, bytes]) -> set[int]:
    """Return the groups in which ranks have sent each other different numbers."""
    seen: dict[Any, set[bytes]] = {}
    for address, content in letters.items():
        if isinstance(address, Address) and address.kind in KINDS:
            seen.setdefault((address.kind, address.group, address.sequence), set()).add(content)
    return {group for (_, group, _), contents in seen.items() if len(contents) > 1}


def _settle(act: Callable[[Sequence[int]], None], ranks: Sequence[int], folder: Path) -> bool:
    """Rehearse *ranks* until none tells others anything new; return whether that is so."""
    for _ in range(MOST_ROUNDS):
        before = left(folder)
        act(ranks)
        if left(folder) == before:
            return True
    return False
