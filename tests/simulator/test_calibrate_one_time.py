"""Calibration on the time of one step: what it takes over, what it holds for, and what it refuses."""

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.simulator.predicted import simulate

from foretrace.cli import main
from foretrace.simulator.config import job_from
from foretrace.simulator.errors import CalibrationError
from foretrace.simulator.recorded.calibration import read_calibration
from foretrace.simulator.recorded.one_time import OneTime, calibrate_on_times

pytest.importorskip("numba")

SETTINGS = {
    "model": "llama3.2-1b",
    "cluster": "dgx-h100",
    "gpus": 8,
    "global_batch": 8,
    "seq_len": 2048,
    "sharding": "fsdp",
}
JOB = job_from(SETTINGS)
FLAGS = [part for name, value in SETTINGS.items() for part in (f"--{name.replace('_', '-')}", str(value))]
PREDICTED_S = simulate(JOB).summary["step_time_s"]


@pytest.fixture(scope="module")
def slower() -> OneTime:
    """Return what a step says that took 8 % longer than predicted."""
    return calibrate_on_times([JOB], [1.08 * PREDICTED_S])


def test_a_step_is_predicted_nearer_but_not_exactly(slower: OneTime) -> None:
    assert slower.runs[0].before_s == pytest.approx(PREDICTED_S)
    assert 1.01 * PREDICTED_S < slower.runs[0].after_s < 1.08 * PREDICTED_S
    assert not slower.is_unusual


def test_a_step_that_took_as_long_as_predicted_changes_nothing() -> None:
    found = calibrate_on_times([JOB], [PREDICTED_S])
    assert found.runs[0].after_s == pytest.approx(PREDICTED_S, rel=1e-6)
    assert all(factor.value == pytest.approx(1, abs=1e-6) for _, factor in found.calibration.named())
    assert all(factor.error > 0 for _, factor in found.calibration.named())


def test_another_layout_of_the_model_is_as_much_slower_as_the_factors_say(slower: OneTime) -> None:
    other = job_from({**SETTINGS, "sharding": "ddp", "tp": 2})
    before, after = (
        simulate(job).summary["step_time_s"] for job in (other, slower.calibration.calibrated(other))
    )
    factors = [factor.value for _, factor in slower.calibration.named()]
    assert 1 < min(factors) <= after / before <= max(factors)


@pytest.mark.parametrize("change", [{"model": "llama3-8b"}, {"precision": "fp16"}, {"fp8": True}])
def test_another_model_or_precision_is_refused(slower: OneTime, change: dict[str, object]) -> None:
    with pytest.raises(CalibrationError, match=r"of llama3.2-1b in bf16, .* tells nothing of"):
        slower.calibration.calibrated(job_from({**SETTINGS, **change}))


def test_a_time_far_off_is_said_to_be_and_taken_over_no_further(slower: OneTime) -> None:
    far, further = (calibrate_on_times([JOB], [times * PREDICTED_S]) for times in (3, 30))
    assert far.is_unusual
    assert far.runs[0].after_s == further.runs[0].after_s
    assert far.runs[0].after_s > slower.runs[0].after_s


@pytest.mark.parametrize("measured_s", [0.0, -1.0, math.inf, math.nan])
def test_no_time_is_refused(measured_s: float) -> None:
    with pytest.raises(CalibrationError, match="above zero"):
        calibrate_on_times([JOB], [measured_s])


def test_the_verb_writes_a_file_that_simulate_takes(tmp_path: Path, slower: OneTime) -> None:
    file, runner = tmp_path / "cal.toml", CliRunner()
    given = ["--step-time", f"{1080 * PREDICTED_S:.9g}ms", "-o", str(file)]
    found = runner.invoke(main, ["calibrate", *FLAGS, *given, "--json"])
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["after_s"] == pytest.approx(slower.runs[0].after_s)
    again = read_calibration(file)
    assert again.only == "llama3.2-1b in bf16"
    assert dict(again.named()).keys() == dict(slower.calibration.named()).keys()
    after = runner.invoke(main, ["simulate", *FLAGS, "--calibration", str(file), "--json"])
    assert json.loads(after.stdout)["step_time_s"] == pytest.approx(slower.runs[0].after_s, rel=1e-4)
    shown = runner.invoke(main, ["calibrate", *FLAGS, "--step-time", str(PREDICTED_S)])
    assert shown.exit_code == 0, shown.output
    assert "llama3.2-1b in bf16 on h100-sxm" in shown.stdout
    assert "+0.0 %" in shown.stdout


def test_two_runs_tell_computing_from_communicating() -> None:
    """Every run is predicted nearer, and each factor is known better than by one run."""
    jobs = [JOB, job_from({**SETTINGS, "sharding": "ddp", "tp": 8, "global_batch": 8})]
    made = calibrate_on_times([JOB], [1.3 * PREDICTED_S]).calibration
    times = [simulate(made.calibrated(job)).summary["step_time_s"] for job in jobs]
    one, both = (calibrate_on_times(jobs[:n], times[:n]) for n in (1, 2))
    assert one.calibration.not_identified
    assert len(both.calibration.not_identified) <= len(one.calibration.not_identified)
    for run in both.runs:
        assert abs(math.log(run.after_s / run.measured_s)) < abs(math.log(run.before_s / run.measured_s))
    for (_, alone), (_, together) in zip(one.calibration.named(), both.calibration.named(), strict=True):
        assert together.error / together.value < alone.error / alone.value


def test_runs_of_two_models_or_without_a_time_each_are_refused() -> None:
    other = job_from({**SETTINGS, "model": "llama3-8b"})
    with pytest.raises(CalibrationError, match="runs of one model on one machine"):
        calibrate_on_times([JOB, other], [1.0, 1.0])
    with pytest.raises(CalibrationError, match="one time for each run"):
        calibrate_on_times([JOB], [1.0, 1.0])


def test_a_settings_file_stands_for_the_flags(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("\n".join(f"{name} = {json.dumps(value)}" for name, value in SETTINGS.items()))
    found = CliRunner().invoke(main, ["calibrate", str(file), "--step-time", str(PREDICTED_S), "--json"])
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["before_s"] == pytest.approx(PREDICTED_S)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--step-time", "soon"], "seconds, or with a unit: 3.21s, 870ms"),
        (["--step-time", "0"], "above zero"),
        (["--step-time", "1", "--undisturbed"], "steps of a recording"),
        ([], "RUN or --step-time"),
    ],
)
def test_mistakes_are_one_line(given: list[str], says: str) -> None:
    found = CliRunner().invoke(main, ["calibrate", *FLAGS, *given])
    assert found.exit_code == 2
    assert says in found.output
