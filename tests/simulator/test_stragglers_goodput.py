"""GPUs that are slow without breaking: the slowest of many, what it does to a step, and to a training."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis.strategies import integers
from tests.simulator.predicted import simulate

from foretrace.cli import main
from foretrace.simulator.config import job_from
from foretrace.simulator.errors import GoodputError
from foretrace.simulator.goodput.failures import SlowGpus, parse_stragglers
from foretrace.simulator.goodput.plan import Risks, plan
from foretrace.simulator.goodput.training import Training, training_of
from foretrace.traces.store import open_run

SOME = parse_stragglers("50%:1, 99%:1.02, 99.9%:1.15")


@given(integers(1, 20_000))
def test_the_mean_of_the_slowest_is_that_of_its_quantiles(n_gpus: int) -> None:
    middles = (np.arange(200_000) + 0.5) / 200_000
    assert SOME.expected_slowest(n_gpus) == pytest.approx(SOME.slowest(middles, n_gpus).mean(), abs=1e-5)
    assert SOME.expected_slowest(n_gpus) <= SOME.expected_slowest(n_gpus + 1) <= 1.15


def test_the_slowest_of_uniform_ones_is_the_textbooks() -> None:
    uniform = parse_stragglers("0%:1, 100%:2")
    assert uniform.expected_slowest(9) == pytest.approx(1 + 9 / 10)  # n/(n+1)
    assert float(uniform.slowest(0.5**9, 9)) == pytest.approx(1.5)


def test_a_single_gpu_has_the_quantiles_that_were_given() -> None:
    assert [float(SOME.slowest(q, 1)) for q in (0.5, 0.99, 0.999, 1.0)] == pytest.approx(
        [1, 1.02, 1.15, 1.15]
    )


def test_draws_have_the_mean_of_the_closed_form() -> None:
    training = Training(
        name="x", step_time_s=10.0, tokens_per_step=4e6, n_gpus=512, n_nodes=64, n_params=10**10,
        compute_share=0.7,
    )  # fmt: skip
    found = plan(training, 1e12, Risks(stragglers=SOME), start=date(2026, 1, 1), n_samples=4000)
    healthy = plan(training, 1e12, Risks(), start=date(2026, 1, 1))
    mean = 1 + 0.7 * (SOME.expected_slowest(512) - 1)
    assert found["expected_days"] == pytest.approx(healthy["expected_days"] * mean, rel=1e-3)
    assert found["days"]["5%"] < found["expected_days"] < found["days"]["95%"]
    assert found["shares"]["slow GPUs"] == pytest.approx((mean - 1) * found["shares"]["training"])
    assert sum(found["shares"].values()) == pytest.approx(1.0)
    assert found["goodput"] == pytest.approx(healthy["goodput"] / mean, rel=1e-3)


@pytest.mark.parametrize("layout", [{"tp": 8, "micro_batch": 4}, {"tp": 4, "pp": 2}, {"sharding": "fsdp"}])
def test_a_slow_gpu_lengthens_a_simulated_step_by_no_more_than_its_compute(
    tmp_path: Path, layout: dict[str, object]
) -> None:
    settings = {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 16, "global_batch": 32, **layout}
    simulate(job_from(settings)).write(tmp_path / "even")
    simulate(job_from(settings | {"stragglers": "3:1.2"})).write(tmp_path / "slow")
    even, slow = (training_of(open_run(tmp_path / name)) for name in ("even", "slow"))
    factor = SlowGpus(parse_stragglers("0%:1.2"), 16, even.compute_share).mean
    assert 1 < slow.step_time_s / even.step_time_s <= factor


def test_the_verb_says_what_slow_gpus_cost(tmp_path: Path) -> None:
    settings = {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 16, "tp": 8, "global_batch": 16}
    simulate(job_from(settings)).write(tmp_path / "run")
    words = ["goodput", str(tmp_path / "run"), "--tokens", "1T", "--slow-gpus", "99%:1.02, 99.9%:1.15"]
    found = json.loads(CliRunner().invoke(main, [*words, "--json"], catch_exceptions=False).output)
    assert 1 < found["slowest_gpu"]["5%"] < found["slowest_gpu"]["50%"] < found["slowest_gpu"]["95%"] < 1.15
    shown = " ".join(CliRunner().invoke(main, words, catch_exceptions=False).output.split())
    assert f"slow GPUs {100 * found['shares']['slow GPUs']:.1f} %" in shown
    assert "the slowest of 16 GPUs computes" in shown


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("p99=1.1", "is not percent:factor"),
        ("99%:1.1, 90%:1.2", "percentages have to rise"),
        ("101%:1.1", "percentages have to rise, up to 100"),
        ("90%:1.2, 99%:1.1", "factors have to rise"),
        ("50%:0.9", "factors have to rise, from 1 on"),
    ],
)
def test_what_is_no_distribution_is_said_in_one_line(text: str, what: str) -> None:
    with pytest.raises(GoodputError, match=what):
        parse_stragglers(text)
