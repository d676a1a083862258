"""How many rows and tokens a step of all ranks has: those of a rank, times the ranks with rows of their own.

Who has rows of their own follows from the groups, from samplers, and from what rehearsed ranks were seen to
load. Where these disagree, or say nothing, the batch is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Final, NamedTuple

from foretrace.tracer.groups import degree_of
from foretrace.traces.batch import Batch
from foretrace.traces.layout import Group, Layout

SHARED: Final = (
    "ranks {one} and {other} load the same rows, as without a sampler that gives each rank its own: "
    "throughput counts them once"
)
"""Note about ranks along ``dp`` that load the same."""

PARTS: Final = (
    "ranks {one} and {other} load the same rows, but the script does not pass them to the model unchanged: "
    "each rank may take a part of them, or all"
)
DRAWN: Final = (
    "ranks {one} and {other} draw the same places of their data sets, whose rows are not known here: these "
    "may be the same on every rank, or not"
)
OTHERS: Final = (
    "ranks {one} and {other} hold parts of the same matrices (tp), but load different rows: what they "
    "compute is the result of neither"
)
UNEVEN: Final = "rank {one} trains on {words} in a step, rank {other} on {others}"
DISAGREE: Final = "{words} deals rows out to {n} ranks, but by the groups {by} ranks have rows of their own"
DEALT_ALIKE: Final = "{words} deals rows out to {n} ranks, but ranks {one} and {other} load the same"
UNNAMED: Final = (
    "nothing tells which ranks share rows: the groups of their collectives do not account for all {n} ranks "
    "(--tokens-per-step says it)"
)
"""Why the batch of a step is unknown."""


class _Loads(NamedTuple):
    """How the batches of two ranks compare."""

    same: bool  # whether all are of the same places in a data set and the same numbers, as far as known
    known: bool  # whether the numbers of some are known


class _Shares(NamedTuple):
    """How many ranks have rows, or tokens of the same rows, of their own."""

    dp: int | None  # ranks with rows of their own, None if unknown
    words: str = ""  # what tells ``dp``
    # further factors, in words, and what they are together: parts of a sequence, and of an input
    others: str = ""
    n_others: int = 1  # the product of the others


def batch_of(
    outcomes: Mapping[int, Mapping[str, Any]],
    groups: Sequence[Group],
    layout: Layout | None,
    world_size: int,
) -> tuple[Batch, list[str]]:
    """Return the batch of a step of all ranks, and notes about rows that ranks share."""
    first = outcomes[min(outcomes)]
    part = first["part"]
    if "unknown" in part:
        return Batch(unknown=part["unknown"]), []
    shares = _by_groups(min(outcomes), groups, layout, world_size, first["job"])
    dealt = first["dealt"]
    if shares.dp is None:
        shares = _by_sampler(min(outcomes), groups, dealt, world_size)
    if shares.dp is None:
        return Batch(unknown=UNNAMED.format(n=world_size)), []
    why, is_shared, seen = _seen(outcomes, groups, layout)
    for words, n in dealt.items():
        if not why and is_shared and n > 1:
            why = DEALT_ALIKE.format(words=words, n=n, one=seen[0], other=seen[1])
        elif not why and n not in {shares.dp, shares.dp * shares.n_others}:
            why = DISAGREE.format(words=words, n=n, by=shares.dp)
    if why:
        return Batch(unknown=why), []
    said = [SHARED.format(one=seen[0], other=seen[1])] if is_shared else []
    evidence = [next(iter(dealt), shares.words)] if shares.dp > 1 else []
    if seen and evidence and not is_shared:
        evidence.append(f"ranks {seen[0]} and {seen[1]} load different rows")
    n = (1 if is_shared else shares.dp) * shares.n_others
    dp = f" × dp {shares.dp} ({'; '.join(evidence)})" if evidence and not is_shared else ""
    equation = part["words"] + dp + shares.others
    return Batch(rows=part["rows"] * n, tokens=part["tokens"] * n, equation=equation), said


def _by_groups(
    first: int, groups: Sequence[Group], layout: Layout | None, world_size: int, job: Mapping[str, Any]
) -> _Shares:
    """Return who has rows of their own by the layout, or by the groups of the rank *first*."""
    how = f"ranks of {job['sharding']}" if "sharding" in job else "gradients are summed"
    if layout is not None:
        dp, cp = layout.dp, layout.cp
    else:
        own = {(group.axis, group.ranks) for group in groups if first in group.ranks}
        cp = prod(len(ranks) for axis, ranks in own if axis == "cp")
        # Ranks that work on the same rows.
        same = prod(len(ranks) for axis, ranks in own if axis in {"tp", "pp"}) * cp
        n_summed = degree_of(ranks for axis, ranks in own if axis in {"dp", "ep"})
        dp = world_size // same
        if same * dp != world_size or (dp > 1 and n_summed not in {dp, dp * cp}):
            return _Shares(None)
    factors = {"cp": cp, "parts of the input along tp": int(job.get("input_shards", 1))}
    words = "".join(f" × {name} {n}" for name, n in factors.items() if n > 1)
    return _Shares(dp, how, words, prod(factors.values()))


def _by_sampler(first: int, groups: Sequence[Group], dealt: Mapping[str, int], world_size: int) -> _Shares:
    """Return the same where a sampler alone tells it, and all other ranks work on the same rows."""
    own = {(group.axis, group.ranks) for group in groups if first in group.ranks}
    same = prod(len(ranks) for axis, ranks in own if axis in {"tp", "pp"})
    fitting = {words: n for words, n in dealt.items() if n * same == world_size}
    return _Shares(next(iter(fitting.values())), next(iter(fitting))) if fitting else _Shares(None)


def _seen(
    outcomes: Mapping[int, Mapping[str, Any]], groups: Sequence[Group], layout: Layout | None
) -> tuple[str, bool, tuple[int, ...]]:
    """Return what rehearsed ranks were seen to load.

    Returns:
        Why the batch is unknown, empty if it is not; whether ranks along ``dp`` load the same rows; and which
        two ranks show what they load, none if nobody does.
    """
    one, seen = min(outcomes), tuple[int, ...]()
    for other in sorted(outcomes, reverse=True):
        if other == one:
            continue
        ranks = {"one": one, "other": other}
        is_same = _work_on_same(one, other, layout, groups)
        mine, yours = outcomes[one]["part"], outcomes[other]["part"]
        if not is_same and not _share(("pp",), one, other, layout, groups) and mine != yours:
            others = yours.get("words", yours.get("unknown"))
            return UNEVEN.format(words=mine["words"], others=others, **ranks), False, ()
        loads = _compared(outcomes[one]["batches"], outcomes[other]["batches"])
        if loads is None:
            continue
        if is_same:
            if not loads.same and _share(("tp",), one, other, layout, groups):
                return OTHERS.format(**ranks), False, ()
        elif loads.same and not loads.known:
            return DRAWN.format(**ranks), False, ()
        elif loads.same:
            is_whole = all(outcomes[rank]["is_batch"] for rank in (one, other))
            return ("" if is_whole else PARTS.format(**ranks)), is_whole, (one, other)
        else:
            seen = (one, other)
    return "", False, seen


def _compared(one: Sequence[Sequence[str]], other: Sequence[Sequence[str]]) -> _Loads | None:
    """Return how batches compare, each the digests of its places and numbers; None if nothing is known."""
    # Ranks may have loaded unequal numbers of batches.
    pairs = [(mine, yours) for mine, yours in zip(one, other, strict=False) if any(mine) or any(yours)]
    if not pairs:
        return None
    return _Loads(all(list(mine) == list(yours) for mine, yours in pairs), any(mine[1] for mine, _ in pairs))


def _work_on_same(one: int, other: int, layout: Layout | None, groups: Sequence[Group]) -> bool:
    """Whether two ranks work on the same rows by the layout, or by the groups where none is known."""
    if layout is not None:
        return layout.coord(one).dp == layout.coord(other).dp
    return _share(("tp", "pp", "cp"), one, other, layout, groups)


def _share(axes: Sequence[str], one: int, other: int, layout: Layout | None, groups: Sequence[Group]) -> bool:
    """Whether two ranks differ along one of *axes*, by a group or by the layout."""
    if layout is not None:
        here, there = layout.coord(one), layout.coord(other)
        return any(getattr(here, axis) != getattr(there, axis) for axis in axes)
    return any(group.axis in axes and {one, other} <= {*group.ranks} for group in groups)
