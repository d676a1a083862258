"""Rehearses ranks again that send each other numbers, until each has received those that it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.peers.gathering import KINDS
from foretrace.tracer.rehearse.peers.letters import Address, left
from foretrace.tracer.rehearse.ranks.classes import groups_of, shapes_that_differ
from foretrace.tracer.rehearse.values.stated import SHARED, UNHEARD

MOST_RANKS: Final = 64
"""Ranks of a group that are rehearsed only because what they tell each other differs."""

MOST_ROUNDS: Final = 6
"""How often ranks are rehearsed: with each round what depends on others is known one exchange further."""

ALIKE: Final = (
    "ranks {} of a group of {} send each other different numbers, and each was assumed to receive its own "
    "from all others: rehearse the whole group (--ranks) if shapes depend on them"
)

MOST_SENDERS: Final = 16
"""Ranks that are rehearsed only because others need what they send."""

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
    for number in sorted(differing(left(folder, "letters")) & groups.keys()):
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
        before = left(folder, "letters")
        act(ranks)
        if left(folder, "letters") == before:
            return True
    return False
