"""Pipelines by hand: ranks that hand results on by plain transfers, in a group that is not one of a pipeline.

A script that calls ``send`` and ``recv`` in the group of all ranks, or in one that it has made, names no
pipeline. Its stages show by whom each of them meets: each its neighbours, the first and the last only one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer.rehearse.ranks.classes import groups_of
from foretrace.traces.rehearsal import WHAT, RankTables

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.ranks.acting import Troupe

MOST_RANKS: Final = 64
"""Ranks of a chain that are rehearsed, as of a group whose members tell each other different numbers."""

SIDES: Final = 2
"""Most neighbours in a chain."""


def acted_chain(
    troupe: Troupe,
    outcomes: dict[int, dict[str, Any]],
    first: int,
    also: Collection[int] | None = None,
) -> tuple[int, ...]:
    """Return the chain that *first* is in, unless the script has a pipeline with a group of its own.

    Args:
        troupe: rehearses ranks; it forgets those that turn out to be in no chain.
        outcomes: what is known of ranks that have been rehearsed; others of the chain are added.
        first: one of them.
        also: ranks that have been rehearsed beside them; None where none may be added to *outcomes*.
    """
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
    """Return the ranks of the chain that *first* is in, from one end to the other; none if it is in none.

    Args:
        first: a rank that has been rehearsed.
        world_size: ranks of the world.
        tables_of: what a rank that has been rehearsed did.
        act: rehearses ranks that have not been, and returns those of them that have been by now.
    """
    found = transfers(tables_of(first))
    if is_ring(first, found, world_size) and not _are_two(first, found, world_size, tables_of, act):
        return ()
    neighbours: dict[int, list[int]] = {}
    wanted = {first}
    while wanted and len(neighbours) + len(wanted) <= MOST_RANKS:
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
    world_size: int,
    tables_of: Callable[[int], RankTables],
    act: Callable[[Collection[int]], Collection[int]],
) -> bool:
    """Whether two ranks that make up a world hand results on: in a ring of two, both do the same in turn."""
    other = 1 - first
    if world_size != SIDES or not found or not act([other]):
        return False
    return [kind for kind, _ in found] != [kind for kind, _ in transfers(tables_of(other))]


def _walked(end: int, neighbours: dict[int, list[int]]) -> tuple[int, ...]:
    """Return the ranks of a chain in order, from its *end* on."""
    found = [end]
    while after := [peer for peer in neighbours[found[-1]] if peer not in found]:
        found.append(after[0])
    return tuple(found)
