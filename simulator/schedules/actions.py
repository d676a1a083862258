"""What schedules are made of: actions, and plans of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple


class Action(NamedTuple):
    """One piece of work on one stage and micro-batch.

    *kind*: ``"F"`` forward, ``"B"`` full backward, ``"I"`` input gradient, ``"W"`` weight gradient. *stage*:
    index of the stage, 0 holds the embedding.
    """

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Plan = tuple[tuple[Action, ...], ...]
"""Actions in order, for every pipeline rank."""

Build = Callable[[int, int, int], Plan]
"""Makes the plan of ``(n_ranks, n_microbatches, virtual_stages)``."""

ACTION_KINDS: Final = ("F", "B", "I", "W")


class Script:
    """Actions of one rank, written down one by one; every stage goes through its micro-batches in order."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._next: Counter[tuple[str, int]] = Counter()

    def add(self, kind: str, stage: int) -> Action:
        """Append *kind* for the next micro-batch of *stage*; a full backward counts as both its halves."""
        done = self._next
        action = Action(kind, stage, done["I" if kind == "B" else kind, stage])
        if kind == "B":
            done["I", stage] += 1
            done["W", stage] += 1
        else:
            done[kind, stage] += 1
        self.actions.append(action)
        return action


def holders(plan: Plan) -> dict[tuple[int, int], int]:
    """Return which pipeline rank takes each ``(stage, microbatch)`` through its stage."""
    return {(action.stage, action.microbatch): rank for rank, own in enumerate(plan) for action in own}


def held_stages(actions: Sequence[Action]) -> tuple[int, ...]:
    """Return the stages that a rank with *actions* holds, in the order in which it first uses them."""
    return tuple(dict.fromkeys(action.stage for action in actions))


def in_flight(actions: Sequence[Action]) -> int:
    """Return the most micro-batches that wait for their backward at once on a rank, over all its stages.

    Their activations are held from the forward to the end of the backward (``"B"``, or ``"W"`` if split).

    >>> in_flight([Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 0), Action("B", 0, 1)])
    2
    """
    held = most = 0
    for action in actions:
        held += (action.kind == "F") - (action.kind in "BW")
        most = max(most, held)
    return most
