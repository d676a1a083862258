"""Which layouts nobody can tell apart: what measured groups of layouts say about differences.

What a prediction is off by in every layout of a model and machine cancels when two of them are compared. What
is left was measured: ``ties.toml`` is written by ``benchmarks/ties.py``, nothing in it is typed by hand.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from foretrace.traces.report.format import format_share


class Difference(NamedTuple):
    """From which predicted difference of two layouts on measurements agree which is faster.

    Attributes:
        ratio: of the two predicted step times.
        level: share of the pairs that are predicted to differ so much whose measured order is the predicted.
        between: where ``ratio`` would be in 8 of 10 cases if other groups had been measured.
        pairs, groups, sources: pairs of layouts that it is from, in so many groups of so many sources.
    """

    ratio: float
    level: float
    between: tuple[float, float]
    pairs: int
    groups: int
    sources: int

    @property
    def words(self) -> str:
        """What it says, as a person reads it.

        >>> Difference(1.06, 0.8, (1.05, 1.08), 900, 100, 6).words
        'measured layouts less than 6.0 % apart came in the predicted order less than 8 times in 10'
        """
        return (
            f"measured layouts less than {format_share(self.ratio - 1)} apart came in the predicted order "
            f"less than {10 * self.level:.0f} times in 10"
        )


@cache
def difference() -> Difference:
    """Return what was measured."""
    text = (resources.files("foretrace.simulator.search") / "ties.toml").read_text(encoding="utf-8")
    found = tomllib.loads(text)
    return Difference(**found | {"between": tuple(found["between"])})


def mark_tied(layouts: Sequence[dict[str, Any]], by: str) -> None:
    """Note in each layout whether it is tied with the best, so that measurements may well turn them round.

    On the machine of the best that is a difference below ``difference().ratio``. On another machine errors do
    not cancel: there they are tied if the likely intervals of both meet.

    Args:
        layouts: best first.
        by: ``"time"`` or ``"cost"``: what they compete by.
    """
    name = {"time": "step_time_s", "cost": "usd_per_1b_tokens"}[by]
    best = layouts[0]
    for one in layouts:
        if (one["cluster"], one["gpus"]) == (best["cluster"], best["gpus"]):
            one["tied"] = one[name] < best[name] * difference().ratio
        else:
            one["tied"] = one[name] * _share(one, 0) <= best[name] * _share(best, 1)


def _share(one: Mapping[str, Any], end: int) -> float:
    """Return an end of the interval of a step time, as a share of it; 1 without one."""
    interval = one["step_time_interval_s"]
    return 1.0 if interval is None else float(interval[end] / one["step_time_s"])
