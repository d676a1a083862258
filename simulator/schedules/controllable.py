"""Schedules that go down the ranks and back up and hold less than 1F1B: one pattern, repeated and tightened.

A pattern says when one micro-batch passes each rank, in slots of one action (forward, input gradient and
weight gradient take a slot each). The next micro-batch does the same ``PERIOD`` slots later. How long a
micro-batch stays on a rank is what the schedule holds: V-Min holds a third of 1F1B, V-Half a half. What
repetition leaves empty at both ends is then filled as far as that memory allows, and gaps are closed.

Reference: Qi et al. 2024, Pipeline Parallelism with Controllable Memory, arXiv:2405.15362, sections 3 and 4;
their order, github.com/sail-sg/zero-bubble-pipeline-parallelism ``zbv_greedy.py`` @ 39f2c186.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from foretrace.simulator.schedules.actions import Action, Plan

PERIOD: Final = 6
"""Slots from one micro-batch to the next: two stages with a forward and two halves of a backward each."""

DOWN, UP, BACK_UP, BACK_DOWN, WEIGHTS = range(5)
"""What fills a slot: a forward on the way down or up, the input gradients of either, a weight gradient."""

_HELD: Final = (1, 1, 0, 0, -1)
"""Parts of micro-batches that a rank holds more of after it."""

_Slots = list[list[list[int]]]
"""By rank and kind, the slot of each micro-batch."""

Pattern = Callable[[int, int], tuple[int, int, int, int]]
"""Slots of micro-batch 0 on ``(rank, n_ranks)``, by kind."""


def v_half(n_ranks: int, n_microbatches: int, virtual_stages: int) -> Plan:
    """Return the plan of V-Half: half the activations of 1F1B, half its bubble."""
    del virtual_stages
    return _plan(_v_half, n_ranks, n_microbatches)


def v_min(n_ranks: int, n_microbatches: int, virtual_stages: int) -> Plan:
    """Return the plan of V-Min: a third of the activations of 1F1B, two thirds of its bubble if F = I = W."""
    del virtual_stages
    return _plan(_v_min, n_ranks, n_microbatches)


def _v_half(r: int, p: int) -> tuple[int, int, int, int]:
    late = 3 if p % 2 == 0 else 0  # otherwise two actions of a rank would want the same slot
    return 2 * r, 3 * p - r - 2, 3 * p + late + 2 * r - 1, 6 * p + late - r - 2


def _v_min(r: int, p: int) -> tuple[int, int, int, int]:
    # As above, where p is a multiple of 3.
    late = 2 if p % 3 == 0 else 0
    return r, 2 * p - r - 1, 2 * p + late + r, 4 * p + late - r - 1


def _plan(pattern: Pattern, n_ranks: int, n_microbatches: int) -> Plan:
    """Return the plan that repeats *pattern*: its start is filled first, then its end."""
    slots: _Slots = [
        [[first + PERIOD * m for m in range(n_microbatches)] for first in pattern(rank, n_ranks)]
        for rank in range(n_ranks)
    ]
    with_weights = [[*own, sorted(_weight_slots(own))] for own in slots]
    filled = _tightened(_filled(with_weights, start=True))
    # Weight gradients are taken out again: they fill whatever stays free.
    ended = _filled([own[:WEIGHTS] for own in filled], start=False)
    tight = _tightened([[*own, sorted(_weight_slots(own))] for own in ended])
    return tuple(_actions(own[:WEIGHTS], rank, n_ranks) for rank, own in enumerate(tight))


def _actions(own: list[list[int]], rank: int, n_ranks: int) -> tuple[Action, ...]:
    """Return the actions of *rank* in the order of their slots."""
    # The second stage of a rank is as far from the last one as the rank is from the first.
    down, up = rank, 2 * n_ranks - 1 - rank
    steps = ((DOWN, "F", down), (UP, "F", up), (BACK_UP, "I", up), (BACK_DOWN, "I", down))
    found = {slot: Action(name, stage, m) for kind, name, stage in steps for m, slot in enumerate(own[kind])}
    counts = {up: 0, down: 0}
    for slot, kind in _weight_slots(own).items():
        stage = up if kind == BACK_UP else down
        found[slot] = Action("W", stage, counts[stage])
        # Weight gradients of a stage come in the order of their input gradients.
        counts[stage] += 1
    return tuple(found[slot] for slot in sorted(found))


def _weight_slots(own: list[list[int]]) -> dict[int, int]:
    """Return the free slots that weight gradients take, and whose input gradient each belongs to.

    Each takes the next free slot after its input gradient, those of the way up first.
    """
    kinds = {slot: kind for kind, slots in enumerate(own) for slot in slots}
    due, found, slot = {BACK_UP: 0, BACK_DOWN: 0}, {}, 0
    last = max(kinds)
    while slot <= last or any(due.values()):
        kind = kinds.get(slot)
        if kind in due:
            due[kind] += 1
        elif kind is None and any(due.values()):
            found[slot] = BACK_UP if due[BACK_UP] else BACK_DOWN
            due[found[slot]] -= 1
        slot += 1
    return found


def _filled(slots: _Slots, *, start: bool) -> _Slots:
    """Return *slots* with actions moved ahead into free ones, within the memory that *slots* hold.

    From the return of the first micro-batch to rank 0 to the start of the last the pattern stays as it is;
    and so does all before that unless the *start* is filled too.
    """
    ranks = [_Rank(own) for own in slots]
    most = max(max(rank.held) for rank in ranks)
    begins, stops = (slots[0][BACK_DOWN][0] if start else 0), (slots[0][DOWN][-1], 0)
    found: _Slots = [[list(times) for times in own] for own in slots]
    for slot, rank, kind, m in _in_order(slots):
        if slot >= begins and (slot, rank) <= stops:
            continue
        after = [found[rank][kind][m - 1]] if m else []
        if kind == WEIGHTS:
            # The m-th weight gradient belongs to the m-th input gradient, of whichever stage.
            after.append(sorted(found[rank][BACK_UP] + found[rank][BACK_DOWN])[m])
        after += [found[other][what][m] for other, what in _needed(rank, kind, len(slots))]
        found[rank][kind][m] = ranks[rank].moved(slot, max(after, default=-1) + 1, most)
    return found


def _tightened(slots: _Slots) -> _Slots:
    """Return *slots* without those in which a rank waits for nothing."""
    found: _Slots = [[list(times) for times in own] for own in slots]
    free = [0] * len(slots)
    # In order of their slots: what an action waits for has its new place already.
    for _, rank, kind, m in _in_order(slots):
        after = [found[other][what][m] + 1 for other, what in _needed(rank, kind, len(slots))]
        found[rank][kind][m] = max([free[rank], *after])
        free[rank] = found[rank][kind][m] + 1
    return found


def _in_order(slots: _Slots) -> list[tuple[int, int, int, int]]:
    """Return slot, rank, kind and micro-batch of every action, by slot and then by rank."""
    return sorted(
        (slot, rank, kind, m)
        for rank, own in enumerate(slots)
        for kind, times in enumerate(own)
        for m, slot in enumerate(times)
    )


def _needed(rank: int, kind: int, n_ranks: int) -> list[tuple[int, int]]:
    """Return the ranks and kinds whose results an action of the same micro-batch waits for."""
    if kind == WEIGHTS:
        return []
    own = [(rank, kind - 1)] if kind else []
    other = rank - 1 if kind in (DOWN, BACK_UP) else rank + 1
    return [*own, (other, kind)] if 0 <= other < n_ranks else own


class _Rank:
    """What one rank does and holds, slot by slot.

    *held*: parts of micro-batches that it holds before each slot.
    """

    def __init__(self, own: list[list[int]]) -> None:
        self._kinds = {slot: kind for kind, times in enumerate(own) for slot in times}
        self._fills_gaps = len(own) == WEIGHTS
        self.held, self._due = [0], [0]
        for slot in range(max(self._kinds) + 1):
            held, due = self._after(slot, self.held[-1], self._due[-1])
            self.held.append(held)
            self._due.append(due)

    def _after(self, slot: int, held: int, due: int) -> tuple[int, int]:
        """Return what is held, and how many weight gradients are due, after *slot*."""
        kind = self._kinds.get(slot)
        if kind is not None:
            # Where gaps are filled with weight gradients, an input gradient makes one that is due.
            return held + _HELD[kind], due + (self._fills_gaps and kind in (BACK_UP, BACK_DOWN))
        # A free slot takes a weight gradient that is due, which lets go of what it needed.
        return (held - 1, due - 1) if due else (held, due)

    def moved(self, slot: int, first: int, most: int) -> int:
        """Move the action in *slot* to the first free one from *first* on where no more than *most* is held.

        Returns:
            where it is now: *slot* if there is no such one.
        """
        for at in range(first, slot):
            if at in self._kinds:
                continue
            # Tried, and taken back if too much would be held then.
            self._kinds[at] = self._kinds.pop(slot)
            if self._holds(at, slot, most):
                return at
            self._kinds[slot] = self._kinds.pop(at)
        return slot

    def _holds(self, at: int, slot: int, most: int) -> bool:
        """Return whether no more than *most* is held from *at* on, and if so keep what is."""
        held, due, states = self.held[at], self._due[at], []
        for now in range(at, len(self.held) - 1):
            # Behind the old slot all is as it was as soon as the numbers are the same again.
            if now > slot and (held, due) == (self.held[now], self._due[now]):
                break
            held, due = self._after(now, held, due)
            if held > most:
                return False
            states.append((held, due))
        # Only now: while something may still be too full nothing is written.
        for now, (held, due) in enumerate(states, at + 1):
            self.held[now], self._due[now] = held, due
        return True
