"""Pipeline schedules: the order of actions on each pipeline rank, as data.

A schedule can be printed, compared and tested without simulating: it says what each rank does and in which
order, never when. The names of actions are those of ``torch.distributed.pipelining``. A rank may hold
several stages; the schedules here give it one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from simulator.errors import ScheduleError


class Action(NamedTuple):
    """One piece of work on one stage and micro-batch.

    Attributes:
        kind: ``"F"`` forward, ``"B"`` full backward, ``"I"`` input gradient, ``"W"`` weight gradient.
        stage: index of the stage, 0 holds the embedding.
        microbatch: index of the micro-batch.
    """

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Plan = tuple[tuple[Action, ...], ...]
"""Actions in order, for every pipeline rank."""

Schedule = Callable[[int, int], Plan]
"""Builds the plan of ``(n_ranks, n_microbatches)``."""

ACTION_KINDS: Final = ("F", "B", "I", "W")


def naive(n_ranks: int, n_microbatches: int) -> Plan:
    """Return a plan without pipelining: a micro-batch leaves before the next one enters."""
    return tuple(
        tuple(Action(kind, stage, i) for i in range(n_microbatches) for kind in "FB")
        for stage in range(n_ranks)
    )


def gpipe(n_ranks: int, n_microbatches: int) -> Plan:
    """Return the plan of GPipe: all forwards, then all backwards, both in order of micro-batch."""
    return tuple(
        tuple(Action(kind, stage, i) for kind in "FB" for i in range(n_microbatches))
        for stage in range(n_ranks)
    )


def one_f_one_b(n_ranks: int, n_microbatches: int) -> Plan:
    """Return the plan of 1F1B: warm-up forwards, then forward/backward pairs, then cool-down backwards.

    >>> [str(action) for action in one_f_one_b(2, 3)[0]]
    ['0F0', '0F1', '0B0', '0F2', '0B1', '0B2']
    """
    return tuple(_one_f_one_b_rank(stage, n_ranks, n_microbatches) for stage in range(n_ranks))


def _one_f_one_b_rank(stage: int, n_ranks: int, n_microbatches: int) -> tuple[Action, ...]:
    """Return the actions of one rank; the later its stage, the fewer forwards of warm-up."""
    warmup = min(n_ranks - stage - 1, n_microbatches)
    forwards = [Action("F", stage, i) for i in range(n_microbatches)]
    backwards = [Action("B", stage, i) for i in range(n_microbatches)]
    steady = [action for pair in zip(forwards[warmup:], backwards, strict=False) for action in pair]
    return (*forwards[:warmup], *steady, *backwards[n_microbatches - warmup :])


SCHEDULES: Final[Mapping[str, Schedule]] = MappingProxyType(
    {
        "naive": naive,  # model parallelism as in Huang et al. 2019, figure 2(b)
        "gpipe": gpipe,  # Huang et al. 2019, arXiv:1811.06965
        "1f1b": one_f_one_b,  # Narayanan et al. 2019, PipeDream; flushed: arXiv:2104.04473, figure 3
    }
)
"""Schedules by name."""


def plan(name: str, n_ranks: int, n_microbatches: int) -> Plan:
    """Return the plan of schedule *name*.

    Raises:
        ScheduleError: the name is unknown, or there is nothing to schedule.
    """
    if name not in SCHEDULES:
        raise ScheduleError(f"unknown schedule {name!r}: one of {', '.join(SCHEDULES)}")
    for what, n in (("ranks", n_ranks), ("micro-batches", n_microbatches)):
        if n < 1:
            raise ScheduleError(f"schedule {name}: {n} {what}; at least 1")
    return SCHEDULES[name](n_ranks, n_microbatches)


def in_flight(actions: tuple[Action, ...]) -> int:
    """Return the most micro-batches that wait for their backward at once on a rank.

    Their activations are held from the forward to the backward (``"B"``, or ``"W"`` if it is split).

    >>> [in_flight(actions) for actions in one_f_one_b(4, 16)]
    [4, 3, 2, 1]
    """
    last = "W" if any(action.kind == "W" for action in actions) else "B"
    held = most = 0
    for action in actions:
        held += (action.kind == "F") - (action.kind == last)
        most = max(most, held)
    return most
