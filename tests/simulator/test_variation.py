"""Stragglers are simulated exactly although most ranks stay folded; jitter follows its seed and its laws."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulator.predicted import simulate

from foretrace.simulator.builder.step import representatives
from foretrace.simulator.config import job_from, job_settings
from foretrace.simulator.errors import JobError
from foretrace.simulator.job import Job
from foretrace.simulator.variation import Variation
from foretrace.traces.layout import Layout
from foretrace.traces.run import Run


def make_job(**given: Any) -> Job:
    """Return a small job; anything may be given."""
    base = {"model": "llama2-7b", "cluster": "dgx-h100", "global_batch": 8, "seq_len": 1024}
    job = job_from({**base, **given})
    return replace(job, model=replace(job.model, n_layers=4))


def rows(run: Run, rank: int) -> dict[str, list[Any]]:
    """Return the spans of *rank*, by column."""
    found: dict[str, list[Any]] = run.spans([rank]).to_pydict()
    return found


@settings(deadline=None)
@given(st.data())
def test_representatives_stand_for_themselves_and_special_ranks_for_nobody_else(data: st.DataObject) -> None:
    degree = st.integers(1, 4)
    layout = Layout(**{axis: data.draw(degree) for axis in ("pp", "dp", "cp", "tp")})
    special = data.draw(st.sets(st.integers(0, layout.world_size - 1), max_size=3))
    found = representatives(layout, special)
    assert len(found) == layout.world_size
    for rank, stands in enumerate(found):
        assert found[stands] == stands
        assert layout.coord(rank).pp == layout.coord(stands).pp
    for rank in special:
        assert [other for other, stands in enumerate(found) if stands == rank] == [rank]


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_straggler_among_folded_ranks_is_exact(data: st.DataObject) -> None:
    """Every rank, simulated or not, does what it does when all of them are simulated."""
    degrees = {axis: data.draw(st.sampled_from([1, 2])) for axis in ("pp", "cp", "tp")}
    degrees["dp"] = 8 // np.prod(list(degrees.values())).item()
    world = 8
    slow = data.draw(st.dictionaries(st.integers(0, world - 1), st.sampled_from([0.5, 1.3, 2.0]), max_size=2))
    when = data.draw(st.sampled_from(["", "@0.1ms", "@30ms"]))
    job = make_job(
        **degrees,
        stragglers=",".join(f"{rank}:{factor}{when}" for rank, factor in slow.items()),
        sharding=data.draw(st.sampled_from(["zero1", "fsdp"])),
    )
    folded, each = simulate(job), simulate(job, folded=False)
    for rank in range(world):
        assert rows(folded.run, rank) == rows(each.run, rank)
    assert folded.summary["step_time_s"] == pytest.approx(each.summary["step_time_s"])


def test_expert_groups_with_a_straggler_are_exact_too() -> None:
    job = make_job(model="mixtral-8x7b", dp=4, ep=2, tp=2, stragglers="5:1.5")
    folded, each = simulate(job), simulate(job, folded=False)
    for rank in range(8):
        assert rows(folded.run, rank) == rows(each.run, rank)


def test_one_straggler_in_512_ranks_leaves_16_to_simulate() -> None:
    assert len(set(representatives(Layout(pp=4, dp=16, tp=8), [201]))) == 16


def test_a_straggler_makes_the_others_wait_not_compute() -> None:
    calm, slow = (simulate(make_job(tp=2, dp=2, seq_len=8192, stragglers=text)) for text in ("", "1:1.5"))
    assert slow.summary["step_time_s"] > 1.3 * calm.summary["step_time_s"]
    assert slow.summary["waiting_fraction"] > calm.summary["waiting_fraction"] + 0.1


def test_a_gpu_that_throttles_for_a_while_costs_a_part_of_what_it_costs_for_good() -> None:
    given = ("", "1:2@20ms,1:1@60ms", "1:2@20ms", "1:2")
    steps = [simulate(make_job(tp=2, seq_len=8192, stragglers=text)).summary["step_time_s"] for text in given]
    assert steps == sorted(steps)
    assert len(set(steps)) == len(steps)
    assert steps[1] - steps[0] == pytest.approx(0.02, rel=0.3)  # 40 ms at half speed


def test_jitter_is_drawn_on_a_machine_that_changes() -> None:
    calm, slow = (drawn(rank_jitter=0.02, samples=20, stragglers=text) for text in ("", "1:2@1ms"))
    assert slow["mean_s"] > 1.1 * calm["mean_s"]


def drawn(**given: Any) -> dict[str, Any]:
    found: dict[str, Any] = simulate(make_job(pp=2, dp=2, **given)).summary["step_time_distribution"]
    return found


def test_the_same_seed_gives_the_same_steps_on_either_engine() -> None:
    jitter = {"compute_jitter": 0.1, "network_jitter": 0.2, "rank_jitter": 0.05, "samples": 5}
    job = make_job(pp=2, **jitter)
    by_engine = [
        simulate(job, engine=engine).summary["step_time_distribution"] for engine in ("event", "compiled")
    ]
    assert by_engine[0] == by_engine[1]
    assert drawn(**jitter, seed=1) != drawn(**jitter, seed=2)


def test_without_jitter_nothing_is_drawn_and_with_it_the_timeline_stays() -> None:
    calm, noisy = (simulate(make_job(pp=2, rank_jitter=spread, samples=3)) for spread in (0.0, 0.1))
    assert "step_time_distribution" not in calm.summary
    assert noisy.spans.equals(calm.spans)


@pytest.mark.parametrize("kind", ["compute_jitter", "network_jitter", "rank_jitter"])
def test_more_jitter_spreads_further_and_waiting_makes_it_slower(kind: str) -> None:
    little, much = (drawn(**{kind: spread}, samples=60) for spread in (0.01, 0.2))
    assert little["std_s"] < much["std_s"]
    assert little["quantiles_s"]["0.05"] <= little["quantiles_s"]["0.5"] <= little["quantiles_s"]["0.95"]
    assert much["mean_s"] >= little["mean_s"] * 0.99
    assert little["mean_s"] == pytest.approx(simulate(make_job(pp=2, dp=2)).summary["step_time_s"], rel=0.05)


def test_folded_jitter_is_close_to_that_of_every_rank() -> None:
    """A folded rank draws the slowest of those it stands for: within 2 % of drawing for every rank."""
    job = make_job(tp=2, dp=4, compute_jitter=0.1, rank_jitter=0.05, samples=60)
    folded, each = (
        simulate(job, folded=folded).summary["step_time_distribution"]["mean_s"] for folded in (True, False)
    )
    assert folded == pytest.approx(each, rel=0.02)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"stragglers": "3"}, r"stragglers: '3' is not rank:factor or rank:factor@time, e.g. 3:1.25@2ms"),
        ({"stragglers": "3:1.25@2"}, r"'3:1.25@2' is not rank:factor or rank:factor@time"),
        ({"stragglers": "0:-1"}, r"stragglers: '0:-1': a rank of at least 0 and a factor above 0"),
        ({"stragglers": "0:1e300"}, "a factor above 0, at most 1,000,000"),
        ({"checkpoint_every": 1, "checkpoint_bytes_per_s": 1e-300}, "checkpoint_bytes_per_s from 1 on"),
        ({"stragglers": "9:2"}, r"stragglers: rank 9 is outside a world of 1"),
        ({"stragglers": "9:2@1ms"}, r"stragglers: rank 9 is outside a world of 1"),
        ({"rank_jitter": 7}, r"rank_jitter=7.0: between 0 \(none\) and 1"),
        ({"samples": 0}, "samples=0: from 1 to 1,000,000"),
        ({"samples": 2**31 - 1}, "from 1 to 1,000,000"),
        ({"seed": -1}, "seed=-1: at least 0"),
    ],
)
def test_what_makes_no_sense_is_one_clear_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        simulate(make_job(**given))


def test_settings_come_back() -> None:
    job = make_job(stragglers="0:1.5", rank_jitter=0.1, samples=7, seed=3)
    assert job.variation == Variation(stragglers="0:1.5", rank_jitter=0.1, samples=7, seed=3)
    again = job_from(job_settings(job))
    assert again.variation == job.variation
