"""Calibration finds the factors that a run was made with, and says which ones it cannot find."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis.strategies import floats, lists
from tests.simulator.predicted import simulate

from foretrace.cli import main
from foretrace.simulator.config import job_from
from foretrace.simulator.errors import CalibrationError
from foretrace.simulator.job import Job
from foretrace.simulator.recorded.calibrate import calibrate, check_device
from foretrace.simulator.recorded.calibration import Calibration, Factor, constants_of, read_calibration
from foretrace.simulator.recorded.least_squares import fit_factors, median_error
from foretrace.simulator.variation import Variation
from foretrace.topologies.catalog import load_cluster
from foretrace.traces.analysis.metrics import breakdown, step_times_ns

LOCAL = {"model": "llama3.2-1b", "cluster": "localhost", "precision": "fp32", "seq_len": 256, "steps": 4}


def truth(compute: Mapping[str, float], network: Mapping[str, float]) -> Calibration:
    """Return a calibration with these factors, known exactly."""
    return Calibration(
        run="truth",
        cluster="localhost",
        device="cpu-core",
        precision="fp32",
        compute={name: Factor(value, 0.0) for name, value in compute.items()},
        network={name: Factor(value, 0.0) for name, value in network.items()},
    )


def job_of(**changes: Any) -> Job:
    """Return a small job on this kind of machine."""
    return job_from({**LOCAL, "global_batch": 2, **changes})


@pytest.mark.parametrize(
    ("layout", "kind"), [({"dp": 2, "sharding": "fsdp"}, "all_gather"), ({"tp": 2}, "reduce_scatter")]
)
def test_the_factors_of_a_run_are_found_again(layout: dict[str, Any], kind: str) -> None:
    """A run made with other constants gives them back: compute to 3 %, communication to 5 %."""
    job = job_of(**layout)
    known = truth(
        {"products": 1.4, "memory": 0.6, "optimizer": 0.5, "fixed": 2.0},
        {f"near.{kind}.wire": 1.7, "near.others.wire": 1.2},
    )
    run = simulate(replace(job, cluster=known.applied(job.cluster))).run
    found = calibrate(run, job)
    for name in ("products", "memory", "optimizer"):
        assert found.calibration.compute[name].value == pytest.approx(known.compute[name].value, rel=0.03)
    assert found.calibration.network[f"near.{kind}.wire"].value == pytest.approx(1.7, rel=0.05)
    step = found.errors[0]
    assert abs(step.after_s / step.measured_s - 1) < 0.01 < abs(step.before_s / step.measured_s - 1)


def test_copies_that_a_run_does_not_make_are_as_its_memory_traffic() -> None:
    """Gathered parameters are copied: where memory was seen slow, nobody takes that to be fast."""
    job = job_of(dp=2, sharding="ddp")
    known = truth({"memory": 1.8}, {})
    found = calibrate(simulate(replace(job, cluster=known.applied(job.cluster))).run, job).calibration
    copies, memory = (found.compute[name] for name in ("copies", "memory"))
    assert copies.value == memory.value == pytest.approx(1.8, rel=0.03)
    assert copies.error > memory.error


def test_layers_of_a_single_block_are_calibrated_on() -> None:
    """As in hybrids, of which a layer is a mixer or an MLP."""
    plain = job_of()
    job = replace(plain, model=replace(plain.model, n_layers=4, pattern="attention mlp"))
    known = truth({"products": 1.4}, {})
    run = simulate(replace(job, cluster=known.applied(job.cluster))).run
    assert calibrate(run, job).calibration.compute["products"].value == pytest.approx(1.4, rel=0.03)


def test_what_a_run_cannot_say_is_said(tmp_path: Path) -> None:
    """One size does not tell latency from bandwidth; without communication there is no factor at all."""
    one_size = calibrate(simulate(job_of(dp=2, sharding="ddp")).run, job_of(dp=2, sharding="ddp"))
    assert any(
        said.startswith("links between nodes: no communic") for said in one_size.calibration.not_identified
    )
    alone = job_of(dp=1)
    found = calibrate(simulate(alone).run, alone).calibration
    assert not found.network
    assert any(said.startswith("links inside of a node: no comm") for said in found.not_identified)
    path = tmp_path / "cal.toml"
    path.write_text(found.to_toml())
    assert read_calibration(path).not_identified == found.not_identified


def test_a_short_run_is_refused() -> None:
    """Nothing could be held back."""
    job = job_of(dp=2)
    with pytest.raises(CalibrationError, match="has 2 steps after warm-up; 4 are needed"):
        calibrate(simulate(replace(job, n_steps=2)).run, job)


def test_factors_of_one_make_the_same_prediction() -> None:
    """A calibration that says nothing changes nothing."""
    job = job_of(dp=2, sharding="fsdp", steps=1)
    same = truth(dict.fromkeys(("products", "memory", "optimizer", "fixed"), 1.0), {"near.others.wire": 1.0})
    assert simulate(job).spans.equals(simulate(replace(job, cluster=same.applied(job.cluster))).spans)


def test_a_machine_of_another_kind_than_a_run_was_on_is_refused() -> None:
    """A processor is no slow GPU: factors of hundreds would be put on its figures."""
    settings = {"model": "llama3-8b", "gpus": 2, "global_batch": 2, "seq_len": 128, "precision": "fp32"}
    job = job_from({**settings, "cluster": "localhost"})
    run = simulate(replace(job, n_steps=5)).run
    on_gpus = job_from({**settings, "cluster": "dgx-h100"})
    with pytest.raises(CalibrationError, match="ran on a processor, dgx-h100 has h100-sxm"):
        calibrate(run, on_gpus)


def test_a_calibration_of_another_device_is_refused() -> None:
    """What was measured on a processor says nothing of a GPU."""
    with pytest.raises(CalibrationError, match=r"of cpu-core, .* dgx-h100 has h100-sxm"):
        truth({"products": 1.1}, {}).applied(load_cluster("dgx-h100"))


def test_factors_hold_for_the_figures_that_they_are_on(tmp_path: Path) -> None:
    cluster = load_cluster("localhost")
    known = replace(truth({"products": 1.1}, {}), constants=constants_of(cluster))
    (tmp_path / "cal.toml").write_text(known.to_toml())
    again = read_calibration(tmp_path / "cal.toml")
    sourced = replace(cluster.device, sources={"memory": "another sheet"})
    assert again.applied(replace(cluster, device=sourced)).device.factors == {"products": 1.1}
    for n_processes in (1, 3, 4, 7):  # share two cores, each the slower and the smaller the more there are
        assert again.applied(cluster.sized(n_processes)).device.factors == {"products": 1.1}
        assert again.applied(cluster.sized(n_processes).sized(5)).device.factors == {"products": 1.1}
    faster = replace(cluster.device, memory_bytes_per_s=2 * cluster.device.memory_bytes_per_s)
    with pytest.raises(CalibrationError, match="others; calibrate with --cluster here"):
        again.applied(replace(cluster, name="here", device=faster))


@given(factors=lists(floats(0.2, 5.0), min_size=6, max_size=6))
@settings(max_examples=25)
def test_a_file_holds_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, factors: list[float]
) -> None:
    """To six digits."""
    names = ("products", "memory", "optimizer", "fixed")
    one = truth(
        dict(zip(names, factors, strict=False)),
        {"near.all_reduce.wire": factors[4], "far.p2p.latency": factors[5]},
    )
    path = tmp_path_factory.mktemp("cal") / "cal.toml"
    path.write_text(one.to_toml())
    again = read_calibration(path)
    assert [name for name, _ in again.named()] == [name for name, _ in one.named()]
    for (_, a), (_, b) in zip(again.named(), one.named(), strict=True):
        assert a.value == pytest.approx(b.value, rel=1e-5)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("run = ", "is not TOML"),
        ("run = 'a'", "no cluster in it"),
        ("run='a'\ncluster='b'\ndevice='c'\nprecision='d'\n[compute]\nproducts = 1.2", "must be"),
        (
            "run='a'\ncluster='b'\ndevice='c'\nprecision='d'\n[compute]\nspeed = {value=1.0, error=0.1}",
            "one of",
        ),
        (
            "run='a'\ncluster='b'\ndevice='c'\nprecision='d'\n[compute]\nfixed = {value=-1.0, error=0.1}",
            "above",
        ),
        (
            "run='a'\ncluster='b'\ndevice='c'\nprecision='d'\n[compute]\nfixed = {value=nan, error=0.1}",
            "number",
        ),
        ("run='a'\ncluster='b'\ndevice='c'\nprecision='d'\n[network]\nnear = 2", "one of near, far"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    """It names the file, the key and what would work."""
    path = tmp_path / "cal.toml"
    path.write_text(text)
    with pytest.raises(CalibrationError, match=says) as error:
        read_calibration(path)
    assert str(path) in str(error.value)


def test_columns_that_do_not_differ_stay_where_they_were_expected() -> None:
    """Two causes in the same proportion everywhere cannot be told apart; their sum can."""
    rng = np.random.default_rng(0)
    design = np.outer([1.0, 2.0, 3.0, 4.0], [1.0, 0.5])
    times = design.sum(axis=1) * 1.3 * rng.normal(1, 0.01, (8, 4))
    found = fit_factors(design, times, (2.0, 2.0), misfit=0.01, power=1.0)
    assert not found.told.all()
    assert found.errors.min() > 0.3
    assert design @ found.values == pytest.approx(design.sum(axis=1) * 1.3, rel=0.02)
    apart = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, 1.0]])
    told = fit_factors(apart, apart @ [1.3, 0.7] * np.ones((3, 1)), (2.0, 2.0), misfit=0.01, power=1.0)
    assert told.told.all()
    assert told.values == pytest.approx([1.3, 0.7], rel=0.01)


def test_a_factor_that_hardly_matters_is_held_at_one() -> None:
    """A hundredth of each row cannot be told from noise of 3 %: it does not run away."""
    rng = np.random.default_rng(3)
    design = np.array([[1.0, 0.01], [2.0, 0.005], [0.5, 0.01], [1.5, 0.0]])
    times = (design @ [1.2, 1.0]) * rng.normal(1, 0.03, (5, 4)) - 0.02
    found = fit_factors(design, times, (1.5, 3.0), misfit=0.03, power=1.0)
    assert found.held.tolist() == [False, True]
    assert found.values[1] == 1.0
    assert found.errors[1] == pytest.approx(np.log(3.0))
    assert found.values[0] == pytest.approx(1.2, rel=0.05)


def test_what_takes_most_of_the_time_is_told_on_a_machine_that_is_far_slower() -> None:
    """Four times as long, give or take a third: the large part is told, the small one held."""
    design = np.array([[1.0, 0.001], [2.0, 0.002], [0.5, 0.0]])
    times = design.sum(axis=1) * np.array([[3.0], [4.0], [5.0]])
    found = fit_factors(design, times, (1.5, 3.0), misfit=0.05, power=1.0)
    assert found.held.tolist() == [False, True]
    assert 2.5 < found.values[0] < 4.5


def test_factors_lie_within_their_errors_as_often_as_errors_promise() -> None:
    """Factors as spread as expected, times with noise: 19 of 20 within two standard errors, or nearly."""
    rng = np.random.default_rng(7)
    expected = np.array([1.5, 2.0, 3.0])
    off = []
    for _ in range(300):
        design = rng.uniform(0.01, 1.0, (7, 3)) * rng.choice([1.0, 0.1], (1, 3))
        known = np.exp(rng.normal(0, np.log(expected)))
        times = (design @ known) * rng.normal(1, 0.03, (7,)) * rng.normal(1, 0.02, (6, 7))
        found = fit_factors(design, times, tuple(expected), misfit=0.05, power=1.5)
        off.append(np.log(found.values / known) / (found.errors / found.values))
    assert np.mean(np.abs(off) < 2) > 0.9
    assert 0.6 < np.std(off) < 1.4


def unsteady(seed: int, spread: float, *, end_ms: int = 300_000, every_ms: int = 3_000) -> Variation:
    """Return a variation in which both ranks change their speed at random, log-normally by *spread*."""
    rng = np.random.default_rng(seed)
    changes = [
        f"{rank}:{np.exp(rng.normal(0, spread)):.4f}@{at}ms"
        for rank in range(2)
        for at in range(0, end_ms, every_ms)
    ]
    return Variation(stragglers=",".join(changes))


@pytest.mark.parametrize("seed", range(4))
def test_the_factors_of_an_unsteady_run_lie_within_their_errors(seed: int) -> None:
    """Speeds vary by 5 %, eight steps: nothing is off by three times what is stated."""
    job = job_of(dp=2, sharding="fsdp")
    known = truth(
        {"products": 1.3, "memory": 1.5, "optimizer": 0.7, "fixed": 1.5},
        {"near.all_gather.wire": 1.6, "near.reduce_scatter.wire": 1.6},
    )
    noisy = replace(job, n_steps=8, cluster=known.applied(job.cluster), variation=unsteady(seed, 0.05))
    run = simulate(noisy, folded=False).run
    times = list(step_times_ns(breakdown(run)).values())
    assert max(times) > 1.002 * min(times)
    found = calibrate(run, job)
    factors = dict(found.calibration.named())
    for name, factor in (*known.compute.items(), *known.network.items()):
        place = f"network.{name}" if "." in name else f"compute.{name}"
        if place in factors:
            said = factors[place]
            assert abs(said.value - factor.value) < 3 * said.error + 0.03 * factor.value, place
    step = found.errors[0]
    assert found.is_better
    assert abs(step.off_after) < 0.05 < abs(step.off_before)


@pytest.mark.parametrize("seed", range(4))
def test_a_calibration_on_noise_alone_never_makes_parts_worse(seed: int) -> None:
    """The machine is as the catalogue says, speeds vary by 20 %: what does not help is left out, and said."""
    job = job_of(dp=2, sharding="ddp")
    found = calibrate(simulate(replace(job, variation=unsteady(seed, 0.2)), folded=False).run, job)
    for part in found.errors[1:]:
        if part.name in {"forward and backward", "optimizer", "exposed communication"}:
            assert abs(part.off_after) <= abs(part.off_before) + 1e-9
    assert all("not better than the catalogue" in said for said in found.left_out)


def test_the_error_of_a_median_shrinks_with_the_root() -> None:
    """Four times as many values, half the error."""
    values = np.random.default_rng(1).normal(10, 1, 4000)
    assert median_error(values) == pytest.approx(1.2533 / 4000**0.5, rel=0.1)
    assert median_error(values[:1]) == 0


def test_the_verb_writes_a_file_that_simulate_takes(tmp_path: Path) -> None:
    """From a run to factors to a prediction that is nearer to it."""
    job = job_of(dp=2, sharding="fsdp")
    slow = truth({"products": 1.5}, {}).applied(job.cluster)
    path, file = tmp_path / "run", tmp_path / "cal.toml"
    simulate(replace(job, cluster=slow)).write(path)
    runner = CliRunner()
    result = runner.invoke(main, ["calibrate", str(path), "-o", str(file), "--json"])
    assert result.exit_code == 0, result.output
    assert '"compute.products"' in result.stdout
    shown = runner.invoke(main, ["calibrate", str(path)])
    assert shown.exit_code == 0
    assert "by the conventions of megatron, which nobody said" in " ".join(shown.output.split())
    named = runner.invoke(main, ["calibrate", str(path), "--framework", "torchtitan"])
    assert "which nobody said" not in named.output
    result = runner.invoke(main, ["simulate", "--like", str(path), "--calibration", str(file)])
    assert result.exit_code == 0, result.output
    assert "calibrated: products x 1.5" in result.stdout


@pytest.mark.parametrize("name", ["dgx-h100", "dgx-a100"])
def test_a_run_is_fitted_to_the_device_that_it_ran_on_alone(name: str) -> None:
    cluster = {"device": {"name": "NVIDIA H100 80GB HBM3"}}
    run: Any = SimpleNamespace(path="run", info=SimpleNamespace(cluster=cluster))
    if name == "dgx-h100":
        check_device(run, load_cluster(name, 8))
    else:
        with pytest.raises(CalibrationError, match="ran on NVIDIA H100 80GB HBM3, dgx-a100 has a100"):
            check_device(run, load_cluster(name, 8))
