"""Schedules that alternate forward and backward: 1F1B, interleaved, and with split backward.

All of them are one pattern: warm-up forwards, then pairs of a forward and a backward, then the backwards that
are left. They differ in how many forwards come first, and in how far weight gradients stay behind.
"""

from __future__ import annotations

from collections.abc import Iterable

from simulator.schedules.actions import Action, Plan, Script


def one_f_one_b(n_ranks: int, n_microbatches: int, virtual_stages: int) -> Plan:
    """Return the plan of 1F1B.

    >>> [str(action) for action in one_f_one_b(2, 3, 1)[0]]
    ['0F0', '0F1', '0B0', '0F2', '0B1', '0B2']
    """
    return _plan(n_ranks, n_microbatches, virtual_stages, warmup_per_hop=1)


def interleaved_1f1b(n_ranks: int, n_microbatches: int, virtual_stages: int) -> Plan:
    """Return the plan of interleaved 1F1B: micro-batches go in rounds through the stages of a rank.

    Two more warm-up forwards per hop from the last rank: one for the way there, one for the way back.
    """
    return _plan(n_ranks, n_microbatches, virtual_stages, warmup_per_hop=2)


def zb_h1(n_ranks: int, n_microbatches: int, virtual_stages: int) -> Plan:
    """Return the plan of ZB-H1, or with virtual stages ZB1P interleaved: memory at most that of 1F1B.

    The warm-up is that of 1F1B; the weight gradients of rank *r* stay *r* micro-batches behind, to fill what
    would be the bubble of its cool-down.

    >>> [str(action) for action in zb_h1(2, 3, 1)[1]]
    ['1F0', '1I0', '1F1', '1I1', '1W0', '1F2', '1I2', '1W1', '1W2']
    """
    return _plan(n_ranks, n_microbatches, virtual_stages, warmup_per_hop=1, lag_per_rank=1)


def zb_h2(n_ranks: int, n_microbatches: int, virtual_stages: int) -> Plan:
    """Return the plan of ZB-H2: twice the memory of 1F1B, and no rank ever idles between start and end."""
    return _plan(n_ranks, n_microbatches, virtual_stages, warmup_per_hop=2, lag_per_rank=2)


def _plan(
    n_ranks: int, n_microbatches: int, virtual_stages: int, *, warmup_per_hop: int, lag_per_rank: int = 0
) -> Plan:
    """Return the plan of every rank.

    Args:
        n_ranks: pipeline ranks.
        n_microbatches: micro-batches.
        virtual_stages: stages per rank.
        warmup_per_hop: forwards before the first backward, per hop from the last rank.
        lag_per_rank: micro-batches by which weight gradients stay behind, times the rank; 0: not split.
    """
    per_round = n_microbatches // (rounds(n_ranks, n_microbatches) if virtual_stages > 1 else 1)
    return tuple(
        _rank(
            [chunk * n_ranks + rank for chunk in range(virtual_stages)],
            n_microbatches,
            per_round,
            warmup=(virtual_stages - 1) * per_round + warmup_per_hop * (n_ranks - 1 - rank),
            lag=lag_per_rank * rank if lag_per_rank else None,
        )
        for rank in range(n_ranks)
    )


def rounds(n_ranks: int, n_microbatches: int) -> int:
    """Return the rounds in which micro-batches go through the stages of a rank; all must be alike."""
    return max(1, n_microbatches // n_ranks)


def _rank(
    stages: list[int], n_microbatches: int, per_round: int, *, warmup: int, lag: int | None
) -> tuple[Action, ...]:
    """Return the actions of a rank.

    Args:
        stages: stages of the rank, in order.
        n_microbatches: micro-batches.
        per_round: micro-batches of a round.
        warmup: forwards before the first pair.
        lag: backwards by which weight gradients stay behind; None: backward is not split.
    """
    total = len(stages) * n_microbatches
    turns = [stage for _ in range(0, n_microbatches, per_round) for stage in stages for _ in range(per_round)]
    back = [
        s for _ in range(0, n_microbatches, per_round) for s in reversed(stages) for _ in range(per_round)
    ]
    script = Script()
    _add_all(script, "F", turns[:warmup])
    for k, stage in enumerate(back):
        _add_all(script, "F", turns[warmup + k : warmup + k + 1])
        script.add("B" if lag is None else "I", stage)
        if lag is not None and k >= lag:
            script.add("W", back[k - lag])
    if lag is not None:
        _add_all(script, "W", back[max(total - lag, 0) :])
    return tuple(script.actions)


def _add_all(script: Script, kind: str, stages: Iterable[int]) -> None:
    for stage in stages:
        script.add(kind, stage)
