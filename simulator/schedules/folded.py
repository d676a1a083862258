"""Schedules whose stages go down the ranks and back up, so that the first rank has the last stage too."""

from __future__ import annotations

from collections import deque
from typing import Final

from foretrace.simulator.schedules.actions import Action, Plan, Script

STAGES: Final = 2
"""Stages per rank of all of them: rank *r* of *p* has stages *r* and *2p - 1 - r*."""


def zb_v(n_ranks: int, n_microbatches: int, virtual_stages: int) -> Plan:
    """Return the plan of ZB-V: no rank idles between start and end, with the memory of 1F1B.

    Made for at least ``2 p - 1`` micro-batches; with fewer, those that are not there are left out. The order
    is that of torch's ``ScheduleZBVZeroBubble``. Reference: Qi et al. 2023, arXiv:2401.10241, section 6.
    """
    del virtual_stages
    # The pattern needs so many; what was added is left out again below.
    n_scheduled = max(2 * n_ranks - 1, n_microbatches)
    plans = (_zb_v_rank(rank, n_ranks, n_scheduled) for rank in range(n_ranks))
    return tuple(tuple(a for a in actions if a.microbatch < n_microbatches) for actions in plans)


def _zb_v_rank(rank: int, n_ranks: int, n_microbatches: int) -> list[Action]:
    script, down, up = Script(), rank, 2 * n_ranks - 1 - rank

    def write(times: int, *steps: tuple[str, int]) -> None:
        for _ in range(times):
            for kind, stage in steps:
                script.add(kind, stage)

    write(2 * (n_ranks - rank) - 1, ("F", down))
    write(rank, ("F", up), ("F", down))
    write(n_ranks - rank, ("F", up), ("I", up), ("W", up))
    n_down, n_up = 2 * n_ranks - rank - 1, n_ranks  # forwards so far
    while n_up < n_down or n_down < n_microbatches:
        if n_down < n_microbatches:
            write(1, ("F", down))
            n_down += 1
        write(1, ("I", down), ("W", down), ("F", up), ("I", up), ("W", up))
        n_up += 1
    write(rank, ("I", down), ("I", up))
    write(n_ranks - rank, ("I", down), ("W", down))
    write(rank, ("W", up))
    write(rank, ("W", down))
    return script.actions


def dualpipe_v(n_ranks: int, n_microbatches: int, virtual_stages: int) -> Plan:
    """Return the plan of DualPipeV: forward and backward of different micro-batches in pairs.

    The order is that of torch's ``ScheduleDualPipeV`` with its pairs one after the other. References:
    DeepSeek-V3, arXiv:2412.19437, section 3.2.1; github.com/deepseek-ai/DualPipe.
    """
    del virtual_stages
    return tuple(_dualpipe_v_rank(rank, n_ranks, n_microbatches)[0] for rank in range(n_ranks))


def dualpipe_v_pairs(n_ranks: int, n_microbatches: int) -> frozenset[Action]:
    """Return the forwards of DualPipeV that run together with the backward after them."""
    ranks = (_dualpipe_v_rank(rank, n_ranks, n_microbatches) for rank in range(n_ranks))
    return frozenset(action for _, paired in ranks for action in paired)


def _dualpipe_v_rank(rank: int, n_ranks: int, n_microbatches: int) -> tuple[tuple[Action, ...], list[Action]]:
    """Return the actions of one rank of DualPipeV, in the eight steps of its authors, and its pairs.

    The first pair of the last rank is none: there, the backward waits for the forward.
    """
    down, up, above = rank, 2 * n_ranks - 1 - rank, n_ranks - rank - 1
    script = _PairedScript()
    for _ in range(2 * above):
        script.add("F", down)
    for _ in range(rank + 1):
        script.add("F", down)
        script.add("F", up)
    for _ in range(above):
        script.inputs(up)
        script.weights()
        script.add("F", up)
    for at in range(n_microbatches - 2 * n_ranks + rank + 1):
        # The last rank has no forward that the backward does not wait for.
        if at == 0 and above == 0:
            script.add("F", down)
            script.add("B", up)
        else:
            script.pair(down, up)
        script.pair(up, down)
    for _ in range(above):
        script.add("B", up)
        script.pair(up, down)
    for at in range(2 * (rank + 1)):
        stage = down if at % 2 else up
        if at <= rank:
            script.add("B", stage)
        else:
            script.inputs(stage)
    for _ in range(above):
        script.weights()
        script.inputs(down)
    while script.due:
        script.weights()
    return tuple(script.actions), script.paired


class _PairedScript(Script):
    """Actions of one rank with forwards that run beside a backward, and weight gradients that wait.

    *paired*: forwards that run together with the backward after them. *due*: stages whose weight gradients
    are still to be computed, the oldest first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.paired: list[Action] = []
        self.due: deque[int] = deque()

    def pair(self, forward: int, backward: int) -> None:
        """Append a forward of one stage and a backward of another, to run together."""
        self.paired.append(self.add("F", forward))
        self.add("B", backward)

    def inputs(self, stage: int) -> None:
        """Append the input gradient of *stage*; its weight gradient is due from then on."""
        self.due.append(stage)
        self.add("I", stage)

    def weights(self) -> None:
        """Append the weight gradient that has been due longest, if there is one."""
        if self.due:
            self.add("W", self.due.popleft())


def dualpipe(n_ranks: int, n_microbatches: int, virtual_stages: int) -> Plan:
    """Return the plan of DualPipe: two copies of the model, fed from both ends at once.

    Rank *r* has stages *r* and *p - 1 - r*, as rank *p - 1 - r* does. The first half of the micro-batches
    goes from rank 0 to rank *p - 1*, the second half the other way. Seen from its own half, a rank does what
    DualPipeV does with half the ranks. Reference: github.com/deepseek-ai/DualPipe, ``dualpipe.py``.
    """
    del virtual_stages
    half = n_microbatches // 2
    one_end = dualpipe_v(n_ranks // 2, half, STAGES)
    return (
        *(_seen_from(actions, 0, n_ranks, half) for actions in one_end),
        *(_seen_from(actions, 1, n_ranks, half) for actions in reversed(one_end)),
    )


def dualpipe_pairs(n_ranks: int, n_microbatches: int) -> frozenset[Action]:
    """Return the forwards of DualPipe that run together with the backward after them."""
    half = n_microbatches // 2
    one_end = tuple(dualpipe_v_pairs(n_ranks // 2, half))
    return frozenset(action for end in (0, 1) for action in _seen_from(one_end, end, n_ranks, half))


def _seen_from(actions: tuple[Action, ...], end: int, n_ranks: int, half: int) -> tuple[Action, ...]:
    """Return *actions* of DualPipeV for the rank near *end*; its near stage gets micro-batches from there."""
    # Of the two stages of a rank the far one gets micro-batches from the other end.
    ends = (end if a.stage < n_ranks // 2 else 1 - end for a in actions)
    return tuple(a._replace(microbatch=a.microbatch + half * e) for a, e in zip(actions, ends, strict=True))
