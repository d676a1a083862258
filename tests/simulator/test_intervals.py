"""Intervals of headline figures come from the committed errors of a class, and only from those."""

from __future__ import annotations

import pytest
from measured.judge import quantile

from foretrace.simulator.intervals import LEAST_FAMILIES, interval, intervals, layout_class
from foretrace.simulator.job import Job
from foretrace.simulator.models.sources import load_model
from foretrace.topologies.catalog import load_cluster
from foretrace.traces.layout import Layout

HEADLINE = {
    "step_time_s": 2.0,
    "tokens_per_s": 1000.0,
    "tokens_per_s_per_gpu": 125.0,
    "mfu": 0.4,
    "peak_memory_bytes": 10**10,
}


def job(model: str = "llama3-8b", cluster: str = "dgx-h100", **settings: object) -> Job:
    layout = settings.pop("layout", Layout(dp=8))
    assert isinstance(layout, Layout)
    return Job(
        model=load_model(model),
        cluster=load_cluster(cluster, layout.world_size),
        layout=layout,
        global_batch=8 * layout.dp,
        **settings,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("some", "name"),
    [
        (job(), "DP/TP+DP"),
        (job(sharding="fsdp"), "FSDP"),
        (job(layout=Layout(pp=2, dp=4)), "3D"),
        (job("mixtral-8x7b", layout=Layout(pp=2, dp=4)), "MoE"),
    ],
)
def test_a_job_has_the_class_of_its_layout(some: Job, name: str) -> None:
    assert layout_class(some) == name


@pytest.mark.parametrize("kind", ["step_time", "memory"])
def test_every_job_has_an_interval_that_enough_families_stand_behind(kind: str) -> None:
    for some in (job(), job(sharding="fsdp"), job("mixtral-8x7b"), job(cluster="mi300x")):
        found = interval(some, kind)
        assert found is not None
        assert found.families >= LEAST_FAMILIES
        assert 0 < found.low < found.high
        assert found.rows >= found.families


@pytest.mark.parametrize("shares", [(0.8, 0.9), (1.1, 1.3), (0.9, 1.2)])
def test_a_prediction_lies_within_its_own_interval(
    shares: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    biased = {"families": 9, "rows": 90, "low": shares[0], "high": shares[1]}
    monkeypatch.setattr(
        "foretrace.simulator.intervals._summary",
        lambda: {"level": 0.8, "step_time": {"FSDP": biased}, "memory": {}},
    )
    found = interval(job(sharding="fsdp"), "step_time")
    assert found is not None
    assert found[:2] == (min(shares[0], 1.0), max(shares[1], 1.0))
    low_s, high_s = intervals(job(sharding="fsdp"), HEADLINE)["step_time_s"]
    assert low_s <= HEADLINE["step_time_s"] <= high_s


def test_a_gpu_with_runs_of_its_own_is_told_from_others() -> None:
    own, other = (
        interval(job(sharding="fsdp", cluster=name), "step_time") for name in ("dgx-h100", "l40s-8")
    )
    assert own is not None
    assert other is not None
    assert own.what == "FSDP · h100-sxm"
    assert other.what == "FSDP"


def test_throughput_has_the_interval_of_one_over_the_time() -> None:
    found = intervals(job(), HEADLINE)
    low_s, high_s = found["step_time_s"]
    assert found["tokens_per_s"] == pytest.approx([2000 / high_s, 2000 / low_s])
    assert found["mfu"] == pytest.approx([0.8 / high_s, 0.8 / low_s])
    assert "runs" in found["step_time_from"]


def test_a_quantile_counts_weights() -> None:
    assert quantile([(1.0, 1.0), (2.0, 9.0)], 0.5) == 2.0
    assert quantile([(1.0, 1.0), (2.0, 1.0)], 0.5) == 1.0
    assert quantile([(5.0, 1.0)], 0.9) == 5.0


def test_a_processor_has_no_interval_of_gpus() -> None:
    some = job("llama3.2-1b", "localhost", layout=Layout(dp=2))
    assert interval(some, "step_time") is None
    assert interval(some, "memory") is None
