"""Which row of a report stands for which rank, what it is called, and which rows are read together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from foretrace.traces.analysis.activity import is_pipelined, stage_of
from foretrace.traces.analysis.metrics import represented
from foretrace.traces.columns import int64
from foretrace.traces.run import Run

MOST_ROWS: Final = 16  # rows on one screen; more ranks than that get an overview and one pipeline at a time
_SAID_STAGES: Final = 3  # stages that the name of a row spells out
_BLOCK: Final = 8  # ranks shown together where there is no pipeline: a node of most machines


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of one run."""

    # one JSON object per stored rank: rank, stage, pipeline, represents, label, sub
    entries: tuple[dict[str, Any], ...]
    row_of: tuple[int, ...]  # index rank, value its row, -1 if no span of it is stored


def rows_of(run: Run, stored: Sequence[int]) -> Rows:
    """Return the rows of the *stored* ranks of *run*, and which row each rank of the world is drawn with."""
    place = {rank: row for row, rank in enumerate(stored)}
    weight = represented(run)
    available = set(run.ranks)
    return Rows(
        entries=tuple(_entry(run, rank, weight[rank]) for rank in stored),
        row_of=tuple(
            place.get(run.info.representative(rank), place.get(rank, -1)) if rank in available else -1
            for rank in range(run.info.world_size)
        ),
    )


def reading_order(run: Run) -> list[int]:
    """Return the ranks of *run* with the stages of one pipeline next to each other."""
    layout = run.info.layout
    if layout is None:
        return sorted(run.ranks)
    return sorted(run.ranks, key=lambda rank: (layout.coord(rank)[1:3], layout.coord(rank).pp, rank))


def picks(run: Run) -> list[list[int]]:
    """Return the groups of ranks that are shown together, the group to begin with first.

    All stored ranks make the first group if they fit on a screen. Where there are more ranks than that, a
    group for each pipeline follows, or for each block of neighbours.
    """
    groups = _groups(run) if len(run.ranks) > MOST_ROWS else []
    if len(run.stored_ranks) > MOST_ROWS:
        return groups
    stored = set(run.stored_ranks)
    return [[rank for rank in reading_order(run) if rank in stored], *groups]


def pick_of(run: Run, groups: Sequence[Sequence[int]], ranks: Sequence[int]) -> list[int]:
    """Return for each of *ranks* the position in *groups* of the group that shows it."""
    own: dict[int, int] = {}
    like: dict[int, int] = {}
    # Backwards: a rank is shown by the last group that has it, its own pipeline. One that has no row is shown
    # by the first group with a rank like it.
    for number, group in reversed(list(enumerate(groups))):
        for rank in group:
            own.setdefault(rank, number)
            like[run.info.representative(rank)] = number
    return [own.get(rank, like.get(run.info.representative(rank), 0)) for rank in ranks]


def _groups(run: Run) -> list[list[int]]:
    """Return the ranks of each pipeline, or of each block of neighbours."""
    if not is_pipelined(run) or run.info.layout is None:
        order = sorted(run.ranks)
        return [order[first : first + _BLOCK] for first in range(0, len(order), _BLOCK)]
    found: dict[int, list[int]] = {}
    for rank in sorted(run.ranks, key=lambda rank: stage_of(run, rank)):
        found.setdefault(_pipeline(run, rank), []).append(rank)
    return [found[number] for number in sorted(found)]


def _entry(run: Run, rank: int, represents: int) -> dict[str, Any]:
    stage = stage_of(run, rank)
    layout = run.info.layout
    by_stage = is_pipelined(run) and stage >= 0 and layout is not None and len(run.stored_ranks) == layout.pp
    stands_for = f"× {represents}" if represents > 1 else ""
    if by_stage:
        label = _stages_words(_stages_held(run, rank) or [stage])
        sub = [f"rank {rank}", stands_for]
    else:
        label, sub = (
            f"Rank {rank}",
            [f"stage {stage}" if is_pipelined(run) and stage >= 0 else "", stands_for],
        )
    return {
        "rank": rank,
        "stage": stage,
        "pipeline": _pipeline(run, rank),
        "represents": represents,
        "label": label,
        "sub": ", ".join(part for part in sub if part),
    }


def _stages_held(run: Run, rank: int) -> list[int]:
    """Return the stages of the model that *rank* works on: several where stages are virtual."""
    said = int64(run.spans([rank], ["stage"]), "stage")
    return sorted({int(stage) for stage in said[said >= 0]})


def _stages_words(stages: Sequence[int]) -> str:
    """Return what a row is called that holds *stages*.

    >>> _stages_words([3]), _stages_words([0, 7]), _stages_words([1, 5, 9, 13])
    ('Stage 3', 'Stages 0, 7', 'Stages 1, 5 … 13')
    """
    if len(stages) == 1:
        return f"Stage {stages[0]}"
    few = len(stages) <= _SAID_STAGES
    named = ", ".join(map(str, stages if few else stages[:2]))
    return f"Stages {named}" + ("" if few else f" … {stages[-1]}")


def _pipeline(run: Run, rank: int) -> int:
    """Return a number that the stages of one pipeline share."""
    if run.info.layout is None:
        return 0
    return run.info.layout.rank(run.info.layout.coord(rank)._replace(pp=0))
