"""Calibration on one step: what it should tell by closed forms, and never more than that."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured.judge import CANDIDATES, Step, calibrated, checked

from foretrace.simulator.recorded.one_time import (
    OUTLIER,
    RATIOS,
    SPREADS,
    Curve,
    Spreads,
    errors,
    fit,
    usual_spread,
)
from foretrace.simulator.validate.scores import Scored


def straight(communication: float) -> Curve:
    """Return the curve of a step of 1 s of which this share is exposed communication."""
    return Curve(tuple(1 + communication * (ratio - 1) for ratio in RATIOS))


def step(
    name: str,
    model: str,
    measured_s: float,
    *,
    source: str = "here",
    communication: float = 0.0,
    software: str = "a framework",
    release: str = "",
) -> Step:
    """Return a run that is predicted to take 1 s."""
    curve = straight(communication)
    scored = Scored(id=name, family=model, group="3D", what=name, predicted=curve.at(), measured=measured_s)
    return Step(
        scored=scored,
        level="A",
        stress=False,
        slow=False,
        device="h100-sxm",
        size="1-8 GPUs",
        machine="a machine",
        cluster=(source, "a machine", software),
        release=release,
        choice=(source,),
        layout=(),
        assumed=(),
        curve=curve,
    )


SHARES = st.floats(0.0, 0.9)
SPREADS_OF = st.builds(Spreads, st.floats(0.01, 0.5), st.floats(0.01, 0.5), st.floats(0.01, 0.5))


@given(SHARES, st.floats(-0.01, 0.01), SPREADS_OF)
def test_factors_are_the_posterior_of_a_linear_model(share: float, slower: float, spreads: Spreads) -> None:
    """The same as by solving for both factors with matrices, where a step is as good as linear in them."""
    x = np.array([1 - share, share])
    precision = np.diag(1 / np.square(spreads[:2])) + np.outer(x, x) / spreads.run**2
    covariance = np.linalg.inv(precision)
    mean = covariance @ x / spreads.run**2 * slower
    found = fit(straight(share), math.exp(slower), spreads)
    if abs(slower) < OUTLIER * spreads.run:
        assert np.log(found) == pytest.approx(mean, rel=0.02, abs=1e-6)
    assert errors([straight(share)], spreads) == pytest.approx(np.sqrt(np.diag(covariance)), rel=1e-6)


@given(
    st.lists(st.tuples(st.floats(0.1, 1.0), st.floats(0.0, 1.0)), min_size=1, max_size=4),
    st.floats(0.2, 5.0),
    SPREADS_OF,
)
def test_a_run_is_predicted_nearer_by_what_runs_share_at_most(
    paths: list[tuple[float, float]], measured_s: float, spreads: Spreads
) -> None:
    """Whichever of its paths is the longest, and never past what was measured."""
    curve = Curve(tuple(max(a + b * ratio for a, b in paths) for ratio in RATIOS))
    after = math.log(curve.at(**fit(curve, measured_s, spreads)._asdict()) / curve.at())
    limit = OUTLIER * usual_spread(curve, spreads)
    slower = max(-limit, min(limit, math.log(measured_s / curve.at())))
    shared = 1 - (spreads.run / usual_spread(curve, spreads)) ** 2
    assert -1e-6 <= after * math.copysign(1, slower) <= shared * abs(slower) + 1e-6
    if len(paths) == 1:
        assert after == pytest.approx(shared * slower, abs=1e-6)


def test_hidden_communication_is_not_blamed() -> None:
    found = fit(straight(0.0), 1.1)
    assert found.communication == 1.0
    assert 1 < found.compute < 1.1
    assert errors([straight(0.0)]).communication == pytest.approx(SPREADS.communication)


def test_what_is_off_by_far_more_than_usual_says_no_more() -> None:
    assert fit(straight(0.2), 10.0) == fit(straight(0.2), 20.0)
    assert fit(straight(0.2), 10.0).compute < 1.2


def test_a_run_says_nothing_of_other_models() -> None:
    """Half of the runs of one model are nearer then; the other model is off by as much as before."""
    runs = [step("a", "one", 1.2), step("b", "one", 1.2), step("c", "one", 1.2), step("d", "two", 1.3)]
    found = calibrated(runs)
    compute = fit(straight(0.0), 1.2).compute
    assert found["calibration"]["here · a machine · a framework"]["compute"] == compute
    assert found["calibration"]["here · a machine · a framework"]["rows"] == 3
    own, other = math.log(1.2 / compute), math.log(1.3)
    assert found["calibrated_score"] == pytest.approx((own + other) / 2)
    assert found["calibrated_before"] == pytest.approx((math.log(1.2) + other) / 2)
    assert found["calibrated_model_score"] == pytest.approx(own)
    assert found["calibrated_model_before"] == pytest.approx(math.log(1.2))


def test_a_cluster_is_a_machine_with_its_software_and_a_model_has_releases() -> None:
    """The longest of equals is the middle: a run in y of release 2 tells of both, or of its own release."""
    runs = [
        step("a", "one", 1.1, software="x"),
        step("b", "one", 1.1, software="x"),
        step("c", "two", 1.2, software="y", release="1"),
        step("d", "two", 1.2, software="y", release="1"),
        step("e", "two", 1.3, software="y", release="2"),
        step("f", "two", 1.3, software="y", release="2"),
    ]

    def left(told_s: float, measured_s: float) -> float:
        return math.log(measured_s / fit(straight(0.0), told_s).compute)

    found = calibrated(runs)
    own = left(1.1, 1.1)
    assert found["calibrated_score"] == pytest.approx((own + left(1.3, 1.2)) / 2)
    assert found["calibrated_machine_score"] > found["calibrated_score"]
    releases = [left(1.2, 1.2), left(1.3, 1.3)]
    assert found["calibrated_release_score"] == pytest.approx((own + np.mean(releases)) / 2)


def test_one_run_alone_leaves_nothing_to_score() -> None:
    found = calibrated([step("a", "one", 1.2)])
    assert found["calibrated_score"] is found["calibrated_model_score"] is None
    assert found["calibration_check"]["before"] is found["calibration_check"]["after"] is None


@pytest.mark.parametrize("spread", sorted({spreads.compute for spreads in CANDIDATES}))
def test_the_spread_that_runs_have_is_chosen_without_the_source_it_is_for(spread: float) -> None:
    """Three sources whose models differ by so much; a fourth has none and no say in its own choice."""
    draw, runs = random.Random(3), []
    for source in ("a", "b", "c"):
        for model in range(25):
            off = draw.gauss(0, spread)
            measured = (math.exp(off + draw.gauss(0, SPREADS.run)) for _ in range(6))
            runs += [step(f"{n}", f"{source} {model}", s, source=source) for n, s in enumerate(measured)]
    runs += [step(f"{n}", "d", math.exp(draw.gauss(0, SPREADS.run)), source="d") for n in range(6)]
    found = checked(runs)
    assert found["spreads_of_all"]["compute"] == spread
    assert found["spreads"]["d"] == {**found["spreads_of_all"], "communication": pytest.approx(0.25)}
    assert found["after"] < found["before"]
