"""Schedules with one stage per rank and full backwards."""

from __future__ import annotations

from foretrace.simulator.schedules.actions import Action, Plan


def naive(n_ranks: int, n_microbatches: int, virtual_stages: int) -> Plan:
    """Return a plan without pipelining: a micro-batch leaves before the next one enters."""
    del virtual_stages  # always one
    return tuple(
        tuple(Action(kind, stage, i) for i in range(n_microbatches) for kind in "FB")
        for stage in range(n_ranks)
    )


def gpipe(n_ranks: int, n_microbatches: int, virtual_stages: int) -> Plan:
    """Return the plan of GPipe: all forwards, then all backwards, both in order of micro-batch."""
    del virtual_stages
    return tuple(
        tuple(Action(kind, stage, i) for kind in "FB" for i in range(n_microbatches))
        for stage in range(n_ranks)
    )


def looped_bfs(n_ranks: int, n_microbatches: int, virtual_stages: int) -> Plan:
    """Return the plan of breadth-first pipelining: all micro-batches of a stage, then the rank's next stage.

    Backward goes the other way round, through stages and micro-batches alike.

    >>> [str(action) for action in looped_bfs(2, 2, 2)[1]]
    ['1F0', '1F1', '3F0', '3F1', '3B1', '3B0', '1B1', '1B0']
    """

    def actions(rank: int) -> tuple[Action, ...]:
        forwards = [
            Action("F", stage, i)
            for stage in range(rank, n_ranks * virtual_stages, n_ranks)
            for i in range(n_microbatches)
        ]
        return (*forwards, *(action._replace(kind="B") for action in reversed(forwards)))

    return tuple(actions(rank) for rank in range(n_ranks))
