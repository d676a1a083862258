"""Intervals of headline figures come from the committed errors of a class, and only from those."""

from __future__ import annotations

import math

import pytest
from intervals import made, shares
from measured.judge import quantile

from foretrace.simulator.config import job_from
from foretrace.simulator.framework import framework_names
from foretrace.simulator.intervals import RATES, Reading, covers, interval, intervals, layout_class, measured
from foretrace.simulator.job import Job
from foretrace.simulator.models.sources import load_model
from foretrace.simulator.simulate import by_framework, simulate
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
def test_a_prediction_lies_in_the_middle_of_its_interval(kind: str) -> None:
    for some in (job(), job(sharding="fsdp"), job("mixtral-8x7b"), job(cluster="mi300x")):
        found = interval(some, kind)
        assert found is not None
        assert found.low * found.high == pytest.approx(1.0)
        assert 0 < found.low < 1


def test_everything_that_is_inherited_widens_a_range_and_is_named() -> None:
    """By the product of its factors, whatever comes together."""
    table = measured()["step_time"]
    for model, cluster, why in (
        ("llama3-8b", "dgx-h100", []),
        ("mixtral-8x7b", "dgx-h100", ["experts"]),
        ("llama3-8b", "mi300x", ["device"]),
        ("mixtral-8x7b", "mi300x", ["experts", "device"]),
    ):
        found = interval(job(model, cluster), "step_time")
        assert found is not None
        factor = math.prod(table["wider"][name] for name in why)
        assert math.log(found.high) == pytest.approx(table["spread"] * factor)
        assert len(found.wider) == len(why)
        assert ("mi300x" in found.words) == ("device" in why)


def test_a_reason_that_was_measured_to_be_none_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"spread": 0.1, "rows": 9, "sources": 3, "devices": ["h100-sxm"], "wider": {"experts": 1.0}}
    monkeypatch.setattr("foretrace.simulator.intervals.measured", lambda: {"level": 0.8, "memory": table})
    found = interval(job("mixtral-8x7b"), "memory")
    assert found is not None
    assert found.wider == ()
    assert interval(job(), "step_time") is None


def test_a_range_covers_what_every_framework_makes_of_a_job_that_names_none() -> None:
    """From the lowest of their own ranges to the highest, whatever they decide beside."""
    asked = {"model": "llama3.2-1b", "cluster": "dgx-h100", "gpus": 8, "global_batch": 16, "tp": 2}
    named = {name: simulate(job_from({**asked, "framework": name})).summary for name in framework_names()}
    unnamed = simulate(job_from(asked)).summary
    assert unnamed["step_time_s"] == named["megatron"]["step_time_s"]
    for name in ("step_time_s", "mfu", "peak_memory_bytes"):
        own = [one["intervals"][name] for one in named.values()]
        ends = [min(low for low, _ in own), max(high for _, high in own)]
        assert unnamed["intervals"][name] == pytest.approx(ends), name
    for words in (unnamed["intervals"]["step_time_from"], unnamed["intervals"]["peak_memory_from"]):
        assert "--framework" in words
    assert "--framework" not in named["megatron"]["intervals"]["step_time_from"]


@pytest.mark.parametrize(
    "more", [{}, {"compute_jitter": 0.02, "stragglers": "3:1.5"}, {"overlap_slowdown": 1.0, "steps": 2}]
)
def test_a_reading_is_what_simulate_says_of_it(more: dict[str, object]) -> None:
    asked = {"model": "llama3.2-1b", "cluster": "dgx-h100", "gpus": 8, "global_batch": 8, "tp": 2, **more}
    for one in by_framework(job_from(asked)):
        alone = simulate(job_from({**asked, "framework": one.name}), only_figures=True).summary
        assert one.step_time_s == pytest.approx(alone["step_times_s"][0])
        assert one.peak_memory_bytes == alone["peak_memory_bytes"]


def test_what_does_not_fit_has_no_time_where_the_job_itself_fits() -> None:
    """It cannot run: memory says so, and the time of a step does not cover it."""
    asked = {
        "model": "llama3.2-1b",
        "cluster": "dgx-h100",
        "gpus": 8,
        "global_batch": 192,
        "recompute": "none",
    }
    for micro_batch, fits in ((12, True), (24, False)):
        some = job_from({**asked, "micro_batch": micro_batch, "recompute": "none"})
        limit, found = some.cluster.device.memory_bytes, by_framework(some)
        summary = simulate(some, only_figures=True).summary
        assert summary["fits"] is fits
        assert any(one.peak_memory_bytes > limit for one in found)
        assert all((one.step_time_s is None) == (fits and one.peak_memory_bytes > limit) for one in found)
        n = sum(one.step_time_s is not None for one in found)
        said = f"for the {n} of {len(found)} that fit"
        assert (said in summary["intervals"]["step_time_from"]) is fits
        assert "that fit" not in summary["intervals"]["peak_memory_from"]


def test_what_is_covered_is_the_range_of_each_reading() -> None:
    rates = {name: [0.3, 0.4] for name in RATES}
    known = {"step_time_s": [0.9, 1.1], **rates, "step_time_from": "runs"}
    own, other = Reading("a", 1.0, 10.0), Reading("b", 2.0, 10.0)
    found = covers(known, own, {("nobody said", "--it"): [other]})
    assert found["step_time_s"] == [0.9, 2.2]
    assert found["mfu"] == [0.15, 0.4]
    assert found["step_time_from"] == "runs; wider for: nobody said, 1 s (a) to 2 s (b), --it says which"
    assert covers(known, own, {}) == known
    none = Reading("c", None, 30.0)
    assert covers(known, own, {("nobody said", "--it"): [none]}) == known
    fitting = covers(known, own, {("nobody said", "--it"): [other, none]})
    assert fitting["step_time_s"] == [0.9, 2.2]
    assert "1 s (a) to 2 s (b) for the 1 of 2 that fit, --it" in fitting["step_time_from"]
    again = covers(known, own, {("nobody said", "--it"): [other], ("nor this", "--that"): [other]})
    assert again["step_time_s"] == found["step_time_s"]


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


def rows(offs: dict[str, float], n: int = 50, **more: object) -> list[dict[str, object]]:
    """Return *n* runs of each source, all as far off on one GPU as *offs* says, and 0.5 on another clock."""
    return [
        {"source": name, "device": f"of {name}", "family": name, "wider": [], "off": off, "elsewhere": [0.5]}
        | more
        for name, off in offs.items()
        for _ in range(n)
    ]


def test_a_spread_holds_for_8_in_10_sources_however_many_runs_each_has() -> None:
    some = {f"source {at}": 0.01 * at for at in range(1, 11)}
    many = rows(some) + rows({"source 1": 0.01}, n=5000)
    assert made(rows(some))["spread"] == made(many)["spread"] == pytest.approx(0.09)
    assert sum(share for share in shares(rows(some), made(rows(some)))) == pytest.approx(9)


def test_a_gpu_that_nobody_measured_has_the_errors_of_inherited_clocks() -> None:
    some = rows({f"source {at}": 0.01 * at for at in range(1, 11)})
    table = made(some)
    assert (
        table["spread"] * table["wider"]["device"] >= 0.5 - 1e-9
    )  # sums are rounded otherwise since Python 3.12
    others = [row for row in some if row["source"] != "source 10"]
    held = [row for row in some if row["source"] == "source 10"]
    assert shares(held, made(others), elsewhere=True) == [1.0]
    assert shares(held, {**made(others), "wider": {}}) == [0.0]
