"""Pipeline schedules: the order of actions on each pipeline rank, as data.

A schedule can be printed, compared and tested without simulating: it says what each rank does and in which
order, never when. The names of actions are those of ``torch.distributed.pipelining``, and so is the order
wherever torch has the schedule. A rank may hold several stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Final, NamedTuple

from foretrace.simulator.errors import ScheduleError
from foretrace.simulator.schedules.actions import (
    ACTION_KINDS,
    Action,
    Build,
    Plan,
    held_stages,
    holders,
    in_flight,
)
from foretrace.simulator.schedules.alternating import (
    combined_1f1b,
    combined_pairs,
    gpipe,
    interleaved_1f1b,
    looped_bfs,
    naive,
    one_f_one_b,
    rounds,
    zb_h1,
    zb_h2,
)
from foretrace.simulator.schedules.controllable import v_half, v_min
from foretrace.simulator.schedules.folded import dualpipe, dualpipe_pairs, dualpipe_v, dualpipe_v_pairs, zb_v
from foretrace.simulator.schedules.table import check, read_csv, read_pairs, spans, write_csv

__all__ = [
    "ACTION_KINDS",
    "SCHEDULES",
    "Action",
    "Build",
    "Plan",
    "Schedule",
    "check",
    "has_pairs",
    "has_two_copies",
    "held_stages",
    "holders",
    "in_flight",
    "pairs",
    "plan",
    "read_csv",
    "read_pairs",
    "spans",
    "write_csv",
]

Fits = Callable[[int, int], bool]
"""Whether a schedule allows ``(n_ranks, n_microbatches)``."""


class Formula(NamedTuple):
    """What the authors of a schedule say that it idles, where forward, input and weight gradient are equal.

    Attributes:
        words: the formula, of *p* ranks, *m* micro-batches and *v* stages per rank.
        overhead: its value for ``(p, m, v)``: idle time over computing time, of the rank that idles most,
            between its own first and last action.
        unless: where the plan idles otherwise, and why.
    """

    words: str
    overhead: Callable[[int, int, int], float]
    unless: str


_TOO_FEW: Final = "the formula is for enough micro-batches to fill the pipeline"
_LEADING: Final = "the formula leaves out what does not grow with p, and is for enough micro-batches"
_PAIRS: Final = "the formula runs a pair as one action; here its passes follow each other, as in torch"

_SEQUENTIAL: Final = Formula("p - 1", lambda p, _m, _v: p - 1, "")
_FLUSHED: Final = Formula("(p - 1) / (v m)", lambda p, m, v: (p - 1) / (v * m), _TOO_FEW)
_THIRD: Final = Formula("(p - 1) / (3 v m)", lambda p, m, v: (p - 1) / (3 * v * m), _TOO_FEW)
_NOTHING: Final = Formula("0", lambda _p, _m, _v: 0.0, _TOO_FEW)


class Schedule(NamedTuple):
    """A named schedule and what it allows.

    Attributes:
        virtual_stages: stages per rank, unless something else is asked for.
        is_flexible: whether something else may be asked for.
        fits: whether it allows these ranks and micro-batches.
        needs: the same in words, completed by examples that work.
        two_copies: every stage is held by two ranks, *r* and *p - 1 - r*.
        pairs: returns the forwards of ``(n_ranks, n_microbatches, virtual_stages)`` that run together with
            the backward after them.
        idles: what its authors say that it idles.
    """

    build: Build
    virtual_stages: int = 1
    is_flexible: bool = False
    fits: Fits = lambda *_: True
    needs: str = ""
    two_copies: bool = False
    pairs: Callable[[int, int, int], frozenset[Action]] = lambda *_: frozenset()
    idles: Formula | None = None


def _rounds_are_alike(n_ranks: int, n_microbatches: int) -> bool:
    return n_microbatches % rounds(n_ranks, n_microbatches) == 0


_IN_ROUNDS: Final = "micro-batches that divide into rounds of the same size, one or more per rank"

MOST_PASSES: Final = 10_000_000
"""Forward passes that a plan holds, over its ranks. Each is some hundred tasks: memory ends before."""

SCHEDULES: Final[Mapping[str, Schedule]] = MappingProxyType(
    {
        "naive": Schedule(naive, idles=_SEQUENTIAL),  # model parallelism as in Huang et al. 2019, figure 2(b)
        "gpipe": Schedule(gpipe, idles=_FLUSHED),  # Huang et al. 2019, arXiv:1811.06965
        "1f1b": Schedule(  # Narayanan et al. 2019; flushed: arXiv:2104.04473, figure 3
            one_f_one_b, idles=_FLUSHED
        ),
        "interleaved-1f1b": Schedule(  # Narayanan et al. 2021, arXiv:2104.04473, figure 4 and section 2.2
            interleaved_1f1b,
            2,
            is_flexible=True,
            fits=_rounds_are_alike,
            needs=_IN_ROUNDS,
            idles=_FLUSHED,
        ),
        "combined-1f1b": Schedule(  # Megatron-LM combined_1f1b.py, plain or interleaved
            combined_1f1b,
            is_flexible=True,
            fits=_rounds_are_alike,
            needs=_IN_ROUNDS,
            pairs=combined_pairs,
        ),
        "looped-bfs": Schedule(  # Lamy-Poirier 2022, arXiv:2211.05953
            looped_bfs, 2, is_flexible=True, idles=_FLUSHED
        ),
        "zb-h1": Schedule(zb_h1, idles=_THIRD),  # Qi et al. 2023, arXiv:2401.10241, figure 3, table 2
        "zb-h2": Schedule(zb_h2, idles=_NOTHING),  # the same, figure 3, table 2
        "interleaved-zb": Schedule(  # the same; torch's ScheduleInterleavedZeroBubble
            zb_h1, 2, is_flexible=True, fits=_rounds_are_alike, needs=_IN_ROUNDS
        ),
        "zb-v": Schedule(zb_v, 2, idles=_NOTHING),  # the same, section 6
        "v-half": Schedule(  # Qi et al. 2024, arXiv:2405.15362
            v_half,
            2,
            idles=Formula("(p - 1) / (2 m)", lambda p, m, _: (p - 1) / (2 * m), _LEADING),
        ),
        "v-min": Schedule(  # the same
            v_min,
            2,
            idles=Formula("2 (p - 1) / (3 m)", lambda p, m, _: 2 * (p - 1) / (3 * m), _LEADING),
        ),
        "dualpipe": Schedule(  # DeepSeek-V3, arXiv:2412.19437, figure 5 and table 2
            dualpipe,
            2,
            fits=lambda p, m: p % 2 == 0 and m % 2 == 0 and m >= 2 * p,
            needs="an even number of ranks, and an even number of micro-batches, at least two per rank",
            two_copies=True,
            pairs=lambda p, m, _: dualpipe_pairs(p, m),
            idles=Formula("(p - 2) / (3 m)", lambda p, m, _: (p - 2) / (3 * m), _PAIRS),
        ),
        "dualpipe-v": Schedule(  # github.com/deepseek-ai/DualPipe, README, of p = PP / 2 ranks
            dualpipe_v,
            2,
            fits=lambda p, m: m >= 2 * p,
            needs="at least two micro-batches per rank",
            pairs=lambda p, m, _: dualpipe_v_pairs(p, m),
            idles=Formula("(p - 1) / (3 m)", lambda p, m, _: (p - 1) / (3 * m), _PAIRS),
        ),
    }
)
"""Schedules by name; the path of a ``.csv`` file of actions works as a name too."""


@lru_cache(maxsize=64)
def plan(name: str, n_ranks: int, n_microbatches: int, virtual_stages: int | None = None) -> Plan:
    """Return the plan of schedule *name*.

    *name*: a key of ``SCHEDULES``, or the path of a CSV file of actions. *virtual_stages*: stages per rank;
    None: what the schedule has by default. Raises ScheduleError if the name is unknown, the schedule does not
    allow these sizes, or the file does not hold a plan of these sizes that can be carried out.
    """
    for what, n in (("ranks", n_ranks), ("micro-batches", n_microbatches)):
        if n < 1:
            raise ScheduleError(f"schedule {name}: {n} {what}; at least 1")
    if n_ranks * n_microbatches > MOST_PASSES:
        raise ScheduleError(
            f"micro-batches times pipeline ranks = {n_microbatches}*{n_ranks}: at most {MOST_PASSES:,}; a "
            "smaller batch or larger micro-batches would work"
        )
    if name.endswith(".csv"):
        return read_csv(name, n_ranks, n_microbatches)
    return _known(name).build(
        n_ranks, n_microbatches, _checked(name, n_ranks, n_microbatches, virtual_stages)
    )


@lru_cache(maxsize=64)
def pairs(
    name: str, n_ranks: int, n_microbatches: int, virtual_stages: int | None = None
) -> frozenset[Action]:
    """Return the forwards of a plan that run together with the backward after them, as in DualPipe.

    Raises ScheduleError if the name is unknown, or the file of that name cannot be read.
    """
    if name.endswith(".csv"):
        return read_pairs(name)
    schedule = _known(name)
    return schedule.pairs(n_ranks, n_microbatches, virtual_stages or schedule.virtual_stages)


def has_two_copies(name: str) -> bool:
    """Return whether schedule *name* has every stage on two ranks."""
    return name in SCHEDULES and SCHEDULES[name].two_copies


def has_pairs(name: str) -> bool:
    """Return whether schedule *name* may run a forward together with a backward; a file may."""
    return name not in SCHEDULES or SCHEDULES[name].pairs is not Schedule._field_defaults["pairs"]


def _known(name: str) -> Schedule:
    if name not in SCHEDULES:
        raise ScheduleError(
            f"unknown schedule {name!r}: one of {', '.join(SCHEDULES)}, or a .csv file of actions"
        )
    return SCHEDULES[name]


def _checked(name: str, n_ranks: int, n_microbatches: int, virtual_stages: int | None) -> int:
    """Return the stages per rank. Raises ScheduleError if the schedule does not allow these sizes."""
    schedule = SCHEDULES[name]
    per_rank = virtual_stages or schedule.virtual_stages
    if per_rank != schedule.virtual_stages and not schedule.is_flexible:
        flexible = ", ".join(other for other, one in SCHEDULES.items() if one.is_flexible)
        raise ScheduleError(
            f"schedule {name} has {schedule.virtual_stages} stages per rank, not {per_rank}; "
            f"{flexible} take any number"
        )
    if not schedule.fits(n_ranks, n_microbatches):
        raise ScheduleError(
            f"schedule {name} does not run {n_microbatches} micro-batches on {n_ranks} ranks: "
            f"it needs {schedule.needs}; {_nearest(schedule.fits, n_ranks, n_microbatches)} would work"
        )
    return per_rank


def _nearest(fits: Fits, n_ranks: int, n_microbatches: int) -> str:
    """Return the sizes nearest to the given ones that *fits* allows, in words."""
    for ranks in (n_ranks, n_ranks - 1, n_ranks + 1):
        below = next((m for m in range(n_microbatches, 0, -1) if fits(ranks, m)), None)
        above = next((m for m in range(n_microbatches, 4 * (n_microbatches + ranks)) if fits(ranks, m)), None)
        found = dict.fromkeys(str(m) for m in (below, above) if m)
        if ranks > 0 and found:
            where = "" if ranks == n_ranks else f" on {ranks} ranks"
            return " or ".join(found) + " micro-batches" + where
    return "another schedule"
