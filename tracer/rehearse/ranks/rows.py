"""Whether ranks load rows of their own, as the batches tell that rehearsed ranks have loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from foretrace.traces.layout import Group, Layout

SHARED: Final = (
    "ranks {one} and {other} load the same rows, as without a sampler that gives each rank its own: "
    "throughput counts them once"
)
PARTS: Final = (
    "ranks {one} and {other} load the same rows, and the model is not given them as they are: if it is not "
    "given a part of its own on each rank, throughput counts them several times"
)
DRAWN: Final = (
    "ranks {one} and {other} draw the same places of their data sets, whose rows are not known here: if "
    "these are the same on every rank, throughput counts them several times"
)
OTHERS: Final = (
    "ranks {one} and {other} hold parts of the same matrices (tp), but load different rows: what they "
    "compute is the result of neither"
)
"""Notes about what two ranks load."""


class _Loads(NamedTuple):
    """How the batches of two ranks compare.

    Attributes:
        same: whether all are of the same places in a data set and the same numbers, as far as known.
        known: whether the numbers of some are known.
    """

    same: bool
    known: bool


def said_of_rows(
    outcomes: Mapping[int, Mapping[str, Any]], groups: Sequence[Group]
) -> tuple[list[str], bool]:
    """Return notes about rows that ranks share, or should, and whether all ranks along ``dp`` have the same.

    Args:
        outcomes: what each rehearsed rank has told, its batches included.
        groups: all groups that they have shown.
    """
    one = min(outcomes)
    layout = outcomes[one]["layout"]
    for other in sorted(outcomes, reverse=True):
        loads = _compared(outcomes[one]["batches"], outcomes[other]["batches"]) if other != one else None
        if loads is None:
            continue
        ranks = {"one": one, "other": other}
        if _work_on_same(one, other, Layout(**layout) if layout else None, groups):
            if not loads.same and _share_matrices(one, other, groups):
                return [OTHERS.format(**ranks)], False
        elif loads.same and not loads.known:
            return [DRAWN.format(**ranks)], False
        elif loads.same:
            is_whole = all(outcomes[rank]["is_batch"] for rank in (one, other))
            return [(SHARED if is_whole else PARTS).format(**ranks)], is_whole
    return [], False


def _compared(one: Sequence[Sequence[str]], other: Sequence[Sequence[str]]) -> _Loads | None:
    """Return how batches compare, each the digests of its places and numbers; None if nothing is known."""
    pairs = [(mine, yours) for mine, yours in zip(one, other, strict=False) if any(mine) or any(yours)]
    if not pairs:
        return None
    return _Loads(all(list(mine) == list(yours) for mine, yours in pairs), any(mine[1] for mine, _ in pairs))


def _work_on_same(one: int, other: int, layout: Layout | None, groups: Sequence[Group]) -> bool:
    """Whether two ranks work on the same rows by the layout, or by the groups where none is known."""
    if layout is not None:
        return layout.coord(one).dp == layout.coord(other).dp
    return any(group.axis in {"tp", "pp", "cp"} and {one, other} <= {*group.ranks} for group in groups)


def _share_matrices(one: int, other: int, groups: Sequence[Group]) -> bool:
    return any(group.axis == "tp" and {one, other} <= {*group.ranks} for group in groups)
