"""A simulated run as a whole: figures that follow from the timeline, memory on its clock, the store."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.simulator.made_jobs import fixed_bytes
from tests.simulator.predicted import simulate

from foretrace.simulator.config import job_from, job_settings
from foretrace.simulator.errors import JobError, SimulationError
from foretrace.simulator.job import RECOMPUTES, Job
from foretrace.simulator.memory.cli import describe
from foretrace.simulator.memory.ranks import rank_memories
from foretrace.simulator.memory.remedies import as_flags
from foretrace.simulator.sharding import SHARDINGS
from foretrace.simulator.simulate import simulate as in_every_reading
from foretrace.simulator.simulate import simulate_many
from foretrace.simulator.summary import MOST_REMEDIES
from foretrace.traces.analysis.metrics import breakdown
from foretrace.traces.report.words import subtitle
from foretrace.traces.store import open_run
from foretrace.traces.timeline import TIMELINE


def make_job(**given: Any) -> Job:
    """Return a small job; anything may be given."""
    base = {"model": "llama2-7b", "cluster": "dgx-h100", "global_batch": 8, "seq_len": 1024}
    job = job_from({**base, **{key: value for key, value in given.items() if key != "n_layers"}})
    return replace(job, model=replace(job.model, n_layers=given.get("n_layers", 8)))


def test_summary_follows_from_the_timeline() -> None:
    job = make_job(pp=2, dp=2, tp=2)
    simulation = simulate(job)
    summary = simulation.summary
    end_ns = pc.max(pc.add(simulation.spans["start_ns"], simulation.spans["duration_ns"])).as_py()
    assert summary["step_time_s"] == end_ns / 1e9
    assert summary["tokens_per_s_per_gpu"] == pytest.approx(8 * 1024 / 8 / summary["step_time_s"])
    peak = job.cluster.device.peak("bf16")
    flops = job.model.flops_per_token(1024) * 8 * 1024
    assert summary["mfu"] == pytest.approx(flops / (8 * peak * summary["step_time_s"]))
    assert repr(simulation) == repr(simulation.run)
    assert repr(simulation).startswith(
        "<Run 'llama2-7b on 8 dgx-h100, tp2 pp2 dp2': simulated, 8 ranks, step "
    )
    assert summary["engine"] == "event"
    assert summary["fits"] is True
    assert summary["peak_memory_bytes"] == max(stage.peak_bytes for stage in rank_memories(job))


@settings(max_examples=12, deadline=None)
@given(
    pp=st.sampled_from([1, 2]),
    dp=st.sampled_from([1, 2]),
    tp=st.sampled_from([1, 2]),
    sharding=st.sampled_from(sorted(SHARDINGS)),
)
def test_shares_of_every_rank_add_up_to_one(pp: int, dp: int, tp: int, sharding: str) -> None:
    job = make_job(pp=pp, dp=dp, tp=tp, sharding=sharding, n_layers=2)
    simulation = simulate(job, covers_unsaid=False)
    assert sum(simulation.summary["shares"].values()) == pytest.approx(1, abs=1e-9)
    for row in breakdown(simulation.run):
        assert sum(row.ns.values()) == row.window_ns


@settings(max_examples=20, deadline=None)
@given(
    pp=st.sampled_from([1, 2, 4]),
    schedule=st.sampled_from(["1f1b", "gpipe", "naive", "interleaved-1f1b", "zb-h2", "zb-v", "dualpipe-v"]),
    sharding=st.sampled_from(sorted(SHARDINGS)),
    recompute=st.sampled_from(RECOMPUTES),
    steps=st.integers(1, 2),
)
@example(pp=2, schedule="dualpipe-v", sharding="ddp", recompute="none", steps=1)
def test_memory_over_time_peaks_where_the_stage_does(
    pp: int, schedule: str, sharding: str, recompute: str, steps: int
) -> None:
    training = {"schedule": schedule, "sharding": sharding, "recompute": recompute, "steps": steps}
    job = make_job(pp=pp, dp=2, global_batch=16, **training)
    simulation = simulate(job, covers_unsaid=False)
    held: dict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
    for row in simulation.memory.to_pylist():
        held[row["rank"], row["category"]].append((row["t_ns"], row["bytes"]))
    for stage in rank_memories(job):
        rank = job.layout.rank(job.layout.coord(0)._replace(pp=stage.pp))
        for category, size in {**stage.items, "total": stage.peak_bytes}.items():
            function = held[rank, category]
            assert function[0][0] == 0
            assert [t for t, _ in function] == sorted({t for t, _ in function})
            assert max(b for _, b in function) == size
            assert min(b for _, b in function) >= 0
        assert held[rank, "total"][-1][1] == fixed_bytes(stage)


def test_every_rank_simulated_gives_the_same_figures() -> None:
    job = make_job(pp=2, dp=2, tp=2)
    folded, unfolded = simulate(job), simulate(job, folded=False)
    assert unfolded.info.representatives is None
    assert unfolded.summary["n_ranks_stored"] == 8
    assert folded.summary["n_ranks_stored"] == 2
    for key in set(folded.summary) - {"n_ranks_stored", "intervals"}:  # shares of other figures
        one, other = folded.summary[key], unfolded.summary[key]
        assert one == (other if isinstance(other, list | str) else pytest.approx(other)), key
    for rank in range(8):
        assert folded.run.spans([rank]).to_pylist() == unfolded.run.spans([rank]).to_pylist()


def test_a_written_run_is_the_run(tmp_path: Path) -> None:
    simulation = simulate(make_job(pp=2, tp=2))
    run = open_run(simulation.write(tmp_path / "run"))
    assert run.info == simulation.info
    assert run.spans().schema.equals(TIMELINE)
    assert run.spans().to_pylist() == simulation.run.spans().to_pylist()
    assert run.memory().to_pylist() == simulation.memory.to_pylist()
    assert run.warnings == ()


def test_what_does_not_fit_is_named_with_what_is_largest() -> None:
    job = make_job(model="llama3-405b", pp=2, tp=8, n_layers=126)
    simulation = simulate(job)
    assert simulation.summary["fits"] is False
    advice, said = simulation.info.warnings
    fullest = max(rank_memories(job), key=lambda one: one.peak_bytes)
    excess = fullest.peak_bytes - job.cluster.device.memory_bytes
    assert said.startswith("all stages do not fit: ")
    first = 8 * fullest.pp
    assert f"; fullest stage {fullest.pp} (rank {first} to {first + 7}), " in said
    assert f"{excess / 1e9:.3g} GB too much; largest: optimizer " in said
    assert said.partition("largest: ")[2].count(" GB") == 3
    assert advice == "no single setting makes it fit"


def test_what_fills_a_device_to_the_last_byte_fits() -> None:
    job = make_job(n_layers=2)
    peak = simulate(job).summary["peak_memory_bytes"]
    for missing, fits in ((0, True), (1, False)):
        device = replace(job.cluster.device, memory_bytes=peak - missing)
        found = simulate(replace(job, cluster=replace(job.cluster, device=device))).info
        assert (found.summary or {})["fits"] is fits
        assert any("does not fit" in said for said in found.warnings) is not fits


def test_remedies_do_fit() -> None:
    """They are the first of those that the memory verb names, and each is all that it takes."""
    job = make_job(model="llama3-8b", n_layers=32, dp=8, sharding="ddp", seq_len=4096)
    advice, said = simulate(job).info.warnings
    assert said.startswith("stage 0 (rank 0 to 7) does not fit: ")
    named = advice.removeprefix("would fit: ").split("; ")
    assert named == [as_flags(one["change"]) for one in describe(job)["would_fit"]][: len(named)]
    assert len(named) == MOST_REMEDIES
    for remedy in named:
        name, _, value = remedy.removeprefix("--").partition(" ")
        changed = job_from({**job_settings(job), name.replace("-", "_"): value})
        assert simulate(changed).summary["fits"] is True


def test_a_pipeline_of_equal_stages_has_the_bubble_of_its_schedule() -> None:
    """(p - 1)/(m + p - 1) idle, seen as bubble or as waiting for the gradient norm that ends the step."""
    summary = simulate(make_job(pp=4, global_batch=12, seq_len=8192, n_layers=24)).summary
    idle = summary["bubble_fraction"] + summary["waiting_fraction"]
    assert idle == pytest.approx(3 / 15, rel=0.25)


def test_progress_is_told() -> None:
    told: list[str] = []
    in_every_reading(make_job(n_layers=1), told.append)
    assert told[0] == "building the program"
    assert told[-1] == "again by the conventions of every framework"
    named: list[str] = []
    in_every_reading(make_job(n_layers=1, framework="megatron"), named.append)
    assert named == told[:-1]


def test_a_layout_that_does_not_fill_the_machine_is_refused() -> None:
    with pytest.raises(JobError, match="500 GPUs cannot be filled"):
        make_job(gpus=500, tp=8)


@pytest.mark.parametrize(
    "given",
    [
        {"pp": 2, "dp": 2, "tp": 2},
        {"pp": 2, "dp": 2, "tp": 2, "schedule": "interleaved-1f1b", "sharding": "fsdp"},
        {"pp": 4, "dp": 2, "schedule": "dualpipe", "global_batch": 16},
        {"pp": 2, "cp": 2, "dp": 2, "steps": 2},
        {"model": "mixtral-8x7b", "dp": 4, "ep": 2, "tp": 2},
        {"pp": 2, "dp": 3, "tp": 2, "global_batch": 6},  # nodes filled unevenly: each rank is simulated
    ],
)
def test_expanding_is_exact(given: dict[str, Any], tmp_path: Path) -> None:
    """What is written for every rank is what simulating every rank gives, span for span."""
    job = make_job(**{"n_layers": 4, **given})
    written = open_run(simulate(job, expanded=True).write(tmp_path / "run"))
    each = simulate(job, folded=False)
    assert written.info.representatives is None
    assert written.stored_ranks == tuple(range(job.layout.world_size))
    assert written.info.summary["n_ranks_stored"] == job.layout.world_size
    for rank in written.ranks:
        assert written.spans([rank]).to_pylist() == each.run.spans([rank]).to_pylist()
    assert written.memory().to_pylist() == each.memory.to_pylist()
    for key in ("step_time_s", "n_spans", "bubble_fraction", "exposed_by_axis"):
        assert written.info.summary[key] == pytest.approx(each.summary[key])


def test_a_page_says_what_a_job_does_that_most_do_not() -> None:
    """What is in 8 bits, in some shards, frozen or elsewhere changes every figure below the title."""
    common = {"model": "llama3.2-1b", "cluster": "dgx-h100", "gpus": 8, "global_batch": 8, "sharding": "fsdp"}
    plain, unusual = (
        subtitle(simulate(job_from({**common, **more})).run)
        for more in (
            {},
            {
                "fp8": True,
                "recipe": "tensorwise",
                "shard_ranks": 4,
                "lora_rank": 8,
                "quantized_base": True,
                "offload": "activations",
                "offload_to": "nvme",
                "offload_layers": 4,
            },
        )
    )
    assert unusual == plain + (
        " · products in fp8 (tensorwise) · shards over 4 ranks · LoRA of rank 8, base in 4 bits"
        " · activations of 4 layers on nvme"
    )


def test_many_jobs_have_the_figures_of_each() -> None:
    """Networks that jobs share change none of them, and a job that cannot run says why in its place.

    Ranges alone do not cover what nobody said: they are those of the conventions that a job has.
    """
    base = {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 16, "global_batch": 16}
    settings = [
        {**base, "tp": 8},
        {**base, "pp": 2, "sharding": "fsdp"},
        {**base, "cluster": "dgx-a100", "tp": 4},
        {**base, "placement": "spread", "tp": 4},
        {**base, "framework": "nemo"},
    ]
    jobs = [job_from(one) for one in settings]
    bad = job_from({**base, "pp": 2, "schedule": "dualpipe", "global_batch": 8})
    told: list[str] = []
    found = simulate_many([*jobs, bad], told.append)
    for job, summary in zip(jobs, found[:-1], strict=True):
        assert {**summary, "engine": ""} == {**simulate(job).summary, "engine": ""}
    for job, summary in ((jobs[0], found[0]), (jobs[-1], found[-2])):
        in_every = in_every_reading(job, only_figures=True).summary
        assert (in_every["intervals"] == summary["intervals"]) is (not job.unsaid)
    assert set(found[-1]) == {"error"}
    with pytest.raises(SimulationError, match=re.escape(found[-1]["error"])):
        simulate(bad)
    assert len(told) == len(found)
