"""Schedules that alternate forward and backward, by single micro-batches or by all of a stage.

1F1B, interleaved and with split backward too, is one pattern: warm-up forwards, then pairs of a forward and a
backward, then the backwards that are left. Its schedules differ in how many forwards come first, and in how
far weight gradients stay behind.
"""

from __future__ import annotations

from collections.abc import Iterable

from foretrace.simulator.schedules.actions import Action, Plan, Script


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


def combined_1f1b(n_ranks: int, n_microbatches: int, virtual_stages: int) -> Plan:
    """Return the plan of 1F1B whose pairs run as one, each half computing while the other communicates.

    One more warm-up forward than 1F1B or its interleaved form, so that no backward waits for the forward
    that it is paired with. Reference: Megatron-LM ``combined_1f1b.py``,
    ``--overlap-moe-expert-parallel-comm``.

    >>> [str(action) for action in combined_1f1b(1, 3, 1)[0]]
    ['0F0', '0F1', '0B0', '0F2', '0B1', '0B2']
    """
    hops = _hops(virtual_stages)
    return _plan(n_ranks, n_microbatches, virtual_stages, warmup_per_hop=hops, ahead=1)


def combined_pairs(n_ranks: int, n_microbatches: int, virtual_stages: int) -> frozenset[Action]:
    """Return the forwards of ``combined_1f1b`` that run together with the backward after them."""
    found: list[Action] = []
    for rank, own in enumerate(combined_1f1b(n_ranks, n_microbatches, virtual_stages)):
        forwards = [action for action in own if action.kind == "F"]
        # ``+ 1``: the forward that runs ahead has no backward to go with.
        found += forwards[_warmup(rank, n_ranks, n_microbatches, virtual_stages, _hops(virtual_stages)) + 1 :]
    return frozenset(found)


def _hops(virtual_stages: int) -> int:
    """Return the warm-up forwards per hop of 1F1B: one more for the way back to the next stage of a rank."""
    return 2 if virtual_stages > 1 else 1


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
    n_ranks: int,
    n_microbatches: int,
    virtual_stages: int,
    *,
    warmup_per_hop: int,
    lag_per_rank: int = 0,
    ahead: int = 0,
) -> Plan:
    """Return the plan of every rank.

    Args:
        n_ranks: pipeline ranks.
        n_microbatches: micro-batches.
        virtual_stages: stages per rank.
        warmup_per_hop: forwards before the first backward, per hop from the last rank.
        lag_per_rank: micro-batches by which weight gradients stay behind, times the rank; 0: not split.
        ahead: further forwards before the first backward.
    """
    per_round = _per_round(n_ranks, n_microbatches, virtual_stages)
    return tuple(
        _rank(
            [chunk * n_ranks + rank for chunk in range(virtual_stages)],
            n_microbatches,
            per_round,
            warmup=_warmup(rank, n_ranks, n_microbatches, virtual_stages, warmup_per_hop) + ahead,
            # ``None``, not 0: on rank 0 a split backward has a lag of 0, and is split all the same.
            lag=lag_per_rank * rank if lag_per_rank else None,
        )
        for rank in range(n_ranks)
    )


def _warmup(rank: int, n_ranks: int, n_microbatches: int, virtual_stages: int, per_hop: int) -> int:
    """Return the forwards of *rank* before its first pair, *per_hop* for each hop from the last rank."""
    per_round = _per_round(n_ranks, n_microbatches, virtual_stages)
    return (virtual_stages - 1) * per_round + per_hop * (n_ranks - 1 - rank)


def _per_round(n_ranks: int, n_microbatches: int, virtual_stages: int) -> int:
    return n_microbatches // (rounds(n_ranks, n_microbatches) if virtual_stages > 1 else 1)


def rounds(n_ranks: int, n_microbatches: int) -> int:
    """Return the rounds in which micro-batches go through the stages of a rank; all must be alike."""
    return max(1, n_microbatches // n_ranks)


def _rank(
    stages: list[int], n_microbatches: int, per_round: int, *, warmup: int, lag: int | None
) -> tuple[Action, ...]:
    """Return the actions of a rank.

    *warmup*: forwards before the first pair. *lag*: backwards by which weight gradients stay behind; None:
    backward is not split.
    """
    total = len(stages) * n_microbatches
    # In rounds: some micro-batches through the first stage of the rank, then the same through the next.
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
        # Those that stayed behind; with few micro-batches all of them.
        _add_all(script, "W", back[max(total - lag, 0) :])
    return tuple(script.actions)


def _add_all(script: Script, kind: str, stages: Iterable[int]) -> None:
    for stage in stages:
        script.add(kind, stage)
