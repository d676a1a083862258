"""Training among failures: the closed form, samples of the same process, and what the verb says of it."""

from __future__ import annotations

import json
import math
from datetime import date
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis.strategies import floats
from tests.simulator.predicted import simulate

from foretrace.cli import main
from foretrace.simulator.config import job_from
from foretrace.simulator.errors import GoodputError
from foretrace.simulator.goodput.cli import goodput
from foretrace.simulator.goodput.failures import (
    DAY_S,
    HOUR_S,
    MTBF_GPU_H,
    Reliability,
    expected,
    failure_rate_per_s,
    optimal_interval_s,
    sampled_times_s,
)
from foretrace.simulator.goodput.plan import Risks, plan
from foretrace.simulator.goodput.training import Training, training_of, with_overrides
from foretrace.traces.store import open_run

rates = floats(1e-7, 1e-3)
costs = floats(0.1, 300)
restarts = floats(0, 1800)


def reliability(rate: float, checkpoint_s: float = 20.0, restart_s: float = 600.0) -> Reliability:
    return Reliability(failures_per_s=rate, checkpoint_s=checkpoint_s, restart_s=restart_s)


@given(rates, costs, restarts)
def test_the_best_interval_solves_its_equation_and_beats_its_neighbours(
    rate: float, checkpoint_s: float, restart_s: float
) -> None:
    some = reliability(rate, checkpoint_s, restart_s)
    best = optimal_interval_s(some)
    x, c = best * rate, checkpoint_s * rate
    assert 1 - x == pytest.approx(math.exp(-(x + c)), abs=1e-12)
    work_s = 10_000 * best  # whole segments at the best interval, and nearly so beside it
    least = expected(work_s, best, some).wall_s
    assert all(expected(work_s, best * f, some).wall_s >= least * (1 - 1e-9) for f in (0.5, 0.9, 1.1, 2.0))


def test_for_rare_failures_the_best_interval_is_youngs() -> None:
    assert optimal_interval_s(reliability(1e-9, 10.0)) == pytest.approx(math.sqrt(2 * 10.0 / 1e-9), rel=1e-3)


@given(rates, costs, restarts)
def test_the_parts_of_the_time_add_up(rate: float, checkpoint_s: float, restart_s: float) -> None:
    found = expected(30 * DAY_S, 3600, reliability(rate, checkpoint_s, restart_s))
    parts = found.work_s + found.checkpoints_s + found.lost_s + found.restarts_s
    assert parts == pytest.approx(found.wall_s)
    assert found.n_failures == pytest.approx(found.wall_s * rate)  # failures come at their rate all the time
    assert min(found.lost_s, found.restarts_s) >= 0
    assert 0 < found.goodput < 1


@given(rates, floats(1.01, 3))
def test_more_of_anything_bad_never_helps(rate: float, more: float) -> None:
    base = expected(DAY_S, 1200, reliability(rate)).wall_s
    assert expected(DAY_S, 1200, reliability(rate * more)).wall_s > base
    assert expected(DAY_S, 1200, reliability(rate, 20 * more)).wall_s > base
    assert expected(DAY_S, 1200, reliability(rate, restart_s=600 * more)).wall_s > base


@pytest.mark.parametrize(("rate", "restart_s"), [(9e-5, 600.0), (5e-4, 1800.0), (1e-5, 0.0)])
def test_samples_have_the_mean_of_the_closed_form(rate: float, restart_s: float) -> None:
    some = reliability(rate, 20.0, restart_s)
    interval_s = optimal_interval_s(some)
    times_s = sampled_times_s(5 * DAY_S, interval_s, some, n_samples=3000, seed=3)
    error_s = times_s.std() / math.sqrt(len(times_s))
    assert abs(times_s.mean() - expected(5 * DAY_S, interval_s, some).wall_s) < 4 * error_s


def test_without_failures_nothing_is_uncertain() -> None:
    times_s = sampled_times_s(1000.0, 100.0, reliability(0.0, 1.0), n_samples=5, seed=0)
    assert np.all(times_s == 1010.0)
    assert expected(1000.0, 100.0, reliability(0.0, 1.0)).wall_s == 1010.0
    assert optimal_interval_s(reliability(0.0)) == math.inf


def test_a_seed_gives_the_same_worlds_again() -> None:
    draw = [
        sampled_times_s(DAY_S, 600.0, reliability(1e-4), n_samples=50, seed=seed, step_error=0.1)
        for seed in (1, 1, 2)
    ]
    assert np.array_equal(draw[0], draw[1])
    assert not np.array_equal(draw[0], draw[2])


def test_the_goodput_of_a_large_published_training_is_met() -> None:
    """Llama 3 405B on 16,384 GPUs: "higher than 90 % effective training time" (arXiv:2407.21783, 3.3.4)."""
    rate = failure_rate_per_s(16_384, 2_048, mtbf_gpu_s=MTBF_GPU_H * HOUR_S)
    some = reliability(rate, checkpoint_s=10.0, restart_s=480.0)
    found = expected(54 * DAY_S, optimal_interval_s(some), some)
    assert found.n_failures == pytest.approx(419, rel=0.15)
    assert 0.90 < found.goodput < 0.95


def test_failures_of_gpus_nodes_and_spot_add_up() -> None:
    rate = failure_rate_per_s(16, 2, mtbf_gpu_s=1600.0, mtbf_node_s=400.0, preempted_s=200.0)
    assert rate == pytest.approx(0.01 + 0.005 + 0.01)


def test_the_chance_of_a_date_grows_with_the_date() -> None:
    training = Training(
        name="x", step_time_s=10.0, tokens_per_step=4e6, n_gpus=512, n_nodes=64, n_params=7 * 10**10,
        usd_per_gpu_hour=2.0,
    )  # fmt: skip
    start = date(2026, 1, 1)

    def chance(by: date) -> float:
        found = plan(training, 1e12, Risks(step_error=0.1), start=start, by=by, n_samples=500)
        return float(found["chance_by"])

    chances = [chance(date(2026, 1, day)) for day in (10, 27, 30, 31)]
    assert chances == sorted(chances)
    assert chances[0] == 0.0
    found = plan(training, 1e12, Risks(), start=start)
    assert found["usd_per_1b_tokens"] == pytest.approx(found["expected_days"] * 24 * 512 * 2.0 / 1000)
    assert sum(found["shares"].values()) == pytest.approx(1.0)


@pytest.mark.parametrize(("flag", "value"), [("--step-error", "nan"), ("--seed", "-1")])
def test_what_is_no_number_to_draw_with_is_refused(run: Path, flag: str, value: str) -> None:
    result = CliRunner().invoke(main, ["goodput", str(run), "--tokens", "1T", flag, value])
    assert result.exit_code == 2
    assert f"Invalid value for '{flag}'" in result.stderr


def test_checkpoints_that_take_next_to_nothing_are_made_all_the_time(run: Path) -> None:
    words = ["goodput", str(run), "--tokens", "1B", "--storage", "9e99 GB/s", "--json"]
    found = json.loads(CliRunner().invoke(main, words).output)
    assert 0 < found["checkpoint_s"] < 1e-80
    assert found["shares"]["checkpoints"] == pytest.approx(0, abs=1e-9)


def test_a_price_of_a_file_is_named_until_another_is_given() -> None:
    training = Training(
        name="x", step_time_s=10.0, tokens_per_step=4e6, n_gpus=8, n_nodes=1, usd_per_gpu_hour=6.0,
        price_from="dgx-h100",
    )  # fmt: skip
    assert with_overrides(training, usd_per_gpu_hour=None, n_gpus=16).price_from == "dgx-h100"
    given = with_overrides(training, usd_per_gpu_hour=2.0)
    assert (given.price_from, given.usd_per_gpu_hour) == ("", 2.0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("goodput") / "run"
    settings = {"model": "llama3-8b", "cluster": "h100-96gb-8", "gpus": 16, "tp": 8, "global_batch": 16}
    simulate(job_from(settings)).write(path)
    return path


def test_the_verb_answers(run: Path) -> None:
    words = ["goodput", str(run), "--tokens", "1T", "--price", "2 USD/h", "--start", "2026-01-01", "--json"]
    result = CliRunner().invoke(main, words, catch_exceptions=False)
    found = json.loads(result.output)
    assert found["tokens"] == 1e12
    assert found["work_days"] == pytest.approx(1e12 / found["tokens_per_step"] * found["step_time_s"] / DAY_S)
    assert found["expected_days"] > found["work_days"]
    shown = CliRunner().invoke(main, words[:-1], catch_exceptions=False).output
    assert "expected" in shown
    assert "assumed" in shown
    assert ", at 2 USD per GPU-hour" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--tokens", "many"], "not a number of tokens"),
        (["--tokens", "1T", "--interval", "2 d", "--mtbf-gpu", "10 min"], "leaves no time"),
        (["--tokens", "1T", "--mtbf-gpu", "1s"], "a failure every 0.0"),
        (["--tokens", "1T", "--budget", "1.5M"], "needs a price"),
        (["--tokens", "1T", "--restart-time", "10"], "is not a time"),
        (["--tokens", f"{10**26}"], "longer than there are dates"),
        (["--tokens", "1T", "--start", "9999-12-31"], "an earlier --start"),
        (["--tokens", "15T", "--mtbf-gpu", "500 h", "--samples", "1000000"], "more than can be drawn"),
    ],
)
def test_what_cannot_be_planned_is_said_in_one_line(run: Path, words: list[str], what: str) -> None:
    with pytest.raises((GoodputError, ValueError), match=what):
        CliRunner().invoke(goodput, [str(run), *words], catch_exceptions=False)


def test_a_prediction_brings_the_error_that_was_measured_of_its_class(run: Path) -> None:
    training = training_of(open_run(run))
    assert "measured runs" in training.step_error_from
    low, high = open_run(run).info.summary["intervals"]["step_time_s"]
    assert training.step_error == pytest.approx(math.log(high / low) / (2 * 1.2815515655446004))
    start = date(2026, 1, 1)
    wide = plan(training, 1e12, Risks(), start=start, n_samples=400)
    narrow = plan(training, 1e12, Risks(step_error=0.0), start=start, n_samples=400)
    spread = [one["days"]["95%"] / one["days"]["5%"] for one in (wide, narrow)]
    assert spread[0] > spread[1]
    assert any("log-normal" in note for note in wide["rests_on"])
    assert not any("log-normal" in note for note in narrow["rests_on"])
