"""Whom ranks wait for, in words: the ranks at the root of waiting, and why."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Final, NamedTuple

from foretrace.traces.analysis.activity import is_pipelined, stage_of
from foretrace.traces.analysis.metrics import averaged_steps, breakdown, represented, step_times_ns
from foretrace.traces.analysis.roots import Root, roots
from foretrace.traces.info import rank_list
from foretrace.traces.report.format import along, format_share
from foretrace.traces.run import Run

MOST: Final = 3  # ranks, or stages, that are named; the others together are one sentence

SLOWER: Final = 1.02
"""How many times as long as its peers a rank computes from which on that is said. A convention: less is
within the spread of equal GPUs."""

INDIRECT: Final = 0.1  # share of the waiting that is passed on by others from which on that is said


class HeldUp(NamedTuple):
    """One cause of waiting: a short name, a sentence, and the ns that all ranks wait for it."""

    what: str
    text: str
    cost_ns: float


class _Compute(NamedTuple):
    """How long ranks compute in a step, in ns, and in which pipeline stage they are."""

    ns: dict[int, float]
    stage: dict[int, int]

    def times(self, ranks: Sequence[int], peers: Sequence[int]) -> float:
        """Return how many times as long as *peers* the *ranks* compute; 1 without peers."""
        usual = median([self.ns[rank] for rank in peers]) if peers else 0.0
        return median([self.ns[rank] for rank in ranks]) / usual if usual else 1.0


def held_up(run: Run) -> list[HeldUp]:
    """Return what ranks wait for, the worst first: ranks or stages by name, then all others together.

    In a pipeline every stage waits for others. What the rank in the middle causes is the bubble of the
    pipeline itself; only what a rank causes beyond that is held against it.
    """
    found = roots(run)
    weight = represented(run)
    caused = {one.rank: one.caused_ns / weight[one.rank] for one in found}
    everyone = [caused.get(rank, 0.0) for rank in run.stored_ranks for _ in range(weight[rank])]
    usual = median(everyone) if is_pipelined(run) and everyone else 0.0
    compute = _compute(run)
    said: list[HeldUp] = []
    named: set[int] = set()
    for one in found:
        if len(said) == MOST:
            break
        ranks = _together(one.rank, compute, found)
        cost = sum((caused[rank] - usual) * weight[rank] for rank in ranks)
        if one.rank not in named and cost > 0:
            said.append(_sentence(run, [r for r in found if r.rank in ranks], compute, cost))
        named |= set(ranks)
    rest = sum(max(caused[rank] - usual, 0) * weight[rank] for rank in caused if rank not in named)
    if rest:
        said.append(HeldUp("waiting", "ranks come late in turns, none of them much more than others", rest))
    return said


def _compute(run: Run) -> _Compute:
    averaged = set(averaged_steps(run, step_times_ns(breakdown(run))))
    ns: dict[int, list[int]] = {}
    for row in breakdown(run):
        if row.step in averaged:
            ns.setdefault(row.rank, []).append(row.ns["compute"])
    stage = {rank: stage_of(run, rank) for rank in ns}
    return _Compute({rank: float(median(values)) for rank, values in ns.items()}, stage)


def _together(rank: int, compute: _Compute, found: Sequence[Root]) -> list[int]:
    """Return the ranks to name with *rank*: its whole stage, if that computes longer than other stages do."""
    mates = [other for other in compute.ns if compute.stage[other] == compute.stage[rank]]
    others = [other for other in compute.ns if other not in mates]
    alone = compute.times([rank], [other for other in mates if other != rank])
    if others and alone < SLOWER <= compute.times(mates, others):
        return [one.rank for one in found if one.rank in mates]
    return [rank]


def _sentence(run: Run, chosen: Sequence[Root], compute: _Compute, cost_ns: float) -> HeldUp:
    ranks = [one.rank for one in chosen]
    worst = chosen[0]
    cause = max(worst.by_cause, key=worst.by_cause.__getitem__)
    mates = [r for r in compute.ns if compute.stage[r] == compute.stage[worst.rank] and r not in ranks]
    pipelined = len(set(compute.stage.values())) > 1
    who = f"rank {worst.rank}"
    if pipelined and len(ranks) > 1:
        who = f"stage {compute.stage[worst.rank]} (rank {rank_list(ranks)})"
    others = [r for r in compute.ns if r not in ranks]
    apart = "the other ranks" if len(others) > 1 else "the other rank"
    peers = apart if not pipelined else "others of its stage" if mates else "the other stages"
    text = f"{who} {_why(cause, compute.times(ranks, mates or others), peers)}"
    weight = represented(run)
    n = sum(weight[r] for r in set().union(*(one.waiting_ranks for one in chosen)) - set(ranks))
    axis = max(worst.by_axis, key=worst.by_axis.__getitem__)
    text += f": {n} other{'s wait' if n != 1 else ' waits'} for it, most {along(axis)}"
    indirect = 1 - sum(one.direct_ns for one in chosen) / sum(one.caused_ns for one in chosen)
    if indirect >= INDIRECT:
        text += f", {format_share(indirect, '.0f')} of that behind ranks that it makes late"
    return HeldUp(f"held up:{worst.rank}", text, cost_ns)


def _why(cause: str, times: float, peers: str) -> str:
    if cause == "transfer":
        return "takes longer to move data than those that wait for it"
    if cause == "other":
        return "comes late for reasons outside of its kernels (host, launches, data)"
    if times >= SLOWER:
        return f"computes {times:.2f} times as long as {peers}"
    return "computes longer than those that wait for it"
