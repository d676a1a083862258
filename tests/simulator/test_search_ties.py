"""Ties: layouts that measurements may well turn round, and where the threshold comes from."""

from __future__ import annotations

from typing import Any

import pytest

from foretrace.simulator.search.describe import difference, mark_tied


def layout(step_s: float, cluster: str = "a", usd: float = 1.0) -> dict[str, Any]:
    return {
        "cluster": cluster,
        "gpus": 8,
        "step_time_s": step_s,
        "usd_per_1b_tokens": usd,
        "step_time_interval_s": [0.9 * step_s, 1.2 * step_s],
    }


def test_a_tie_is_a_difference_below_the_measured_one() -> None:
    low, high = difference().between
    assert 1.0 < low <= difference().ratio <= high < 1.25
    some = [layout(1.0), layout(difference().ratio * 0.999), layout(difference().ratio)]
    mark_tied(some, "time")
    assert [one["tied"] for one in some] == [True, True, False]


@pytest.mark.parametrize(("step_s", "tied"), [(1.32, True), (1.34, False)])
def test_on_another_machine_intervals_have_to_meet(step_s: float, tied: bool) -> None:
    some = [layout(1.0), layout(step_s, "b")]
    mark_tied(some, "time")
    assert some[1]["tied"] is tied


def test_by_cost_the_dollars_count() -> None:
    some = [layout(2.0, usd=1.0), layout(1.0, usd=2.0)]
    mark_tied(some, "cost")
    assert [one["tied"] for one in some] == [True, False]
