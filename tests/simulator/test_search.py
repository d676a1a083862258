"""A search finds what simulating every layout finds, and says what it has found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.simulator.predicted import simulate
from tests.simulator.searched import cheapest

from foretrace.cli import main
from foretrace.simulator.config import job_from, read_config
from foretrace.simulator.errors import ConfigError, JobError
from foretrace.simulator.job import Job
from foretrace.simulator.memory.ranks import rank_memories
from foretrace.simulator.models.sources import load_model
from foretrace.simulator.schedules import SCHEDULES
from foretrace.simulator.search.best import Search, fastest
from foretrace.simulator.search.cli import search
from foretrace.simulator.search.layouts import PipelineTimes
from foretrace.simulator.search.space import Space
from foretrace.topologies.catalog import load_cluster

pytest.importorskip("numba")


def space(model: str = "llama3.2-1b", gpus: int = 8, **given: Any) -> Space:
    given = {"global_batch": 32, "seq_len": 2048, **given}
    return Space(model=load_model(model), cluster=load_cluster("dgx-a100", gpus), **given)


def step_s(job: Job) -> float:
    """Return the time of a step of *job*, whose timeline nobody looks at here."""
    return float(simulate(job, engine="compiled", only_figures=True).summary["step_time_s"])


def brute_force_s(jobs: list[Job]) -> list[float]:
    """Return the step times of all *jobs* that fit, in order."""
    fitting = [
        job
        for job in jobs
        if max(rank.peak_bytes for rank in rank_memories(job)) <= job.cluster.device.memory_bytes
    ]
    return sorted(map(step_s, fitting))


@pytest.mark.parametrize(
    "given",
    [
        {
            "schedule": ("1f1b", "interleaved-1f1b"),
            "recompute": ("none", "full"),
            "tp": (1, 2),
            "micro_batch": (1,),
        },
        {"schedule": ("zb-h1", "zb-v"), "sharding": ("zero1",), "recompute": ("none",), "micro_batch": (1,)},
        {"sharding": ("ddp", "fsdp"), "tp": (1, 2), "pp": (1, 2), "recompute": ("none",)},
        {
            "sharding": ("zero2", "zero3"),
            "schedule": ("zb-h1", "dualpipe"),
            "tp": (1, 2),
            "pp": (1, 2),
            "micro_batch": (1,),
        },
        {
            "model": "llama2-13b",
            "sharding": ("zero1", "fsdp"),
            "tp": (2, 8),
            "pp": (1, 4),
            "schedule": ("1f1b",),
            "micro_batch": (1, 2),
            "seq_len": 4096,
        },
    ],
)
def test_the_best_are_those_of_simulating_everything(given: dict[str, Any]) -> None:
    some = space(**{"global_batch": 16, "micro_batch": (1, 2), **given})
    jobs = list(some.jobs())
    found = cheapest(some.families(), 5)
    assert [one.summary["step_time_s"] for one in found.best] == brute_force_s(jobs)[:5]
    assert found.counts.n_candidates == len(jobs)
    assert found.counts.n_simulated < len(jobs)


def test_experts_cut_otherwise_than_layers_are_found_as_simulating_everything_finds_them() -> None:
    some = Space(
        model=load_model("deepseek-v2-lite"),
        cluster=load_cluster("dgx-h100", 8),
        global_batch=16,
        seq_len=2048,
        tp=(2, 4),
        pp=(1, 2),
        micro_batch=(1,),
        schedule=("1f1b",),
        recompute=("none",),
    )
    jobs = list(some.jobs())
    found = cheapest(some.families(), 6)
    assert [one.summary["step_time_s"] for one in found.best] == brute_force_s(jobs)[:6]
    assert found.best[0].job.layout.expert_tp == 1
    assert {job.layout.expert_tp for job in jobs} == {0, 1}


def check_bounds(some: Space) -> list[float]:
    """Check that every bound of every job of *some* is below what it bounds, and the last one close.

    Return how close it is, over the time of the step.
    """
    search, close = Search(), []
    for family in some.families():
        times = search._pipeline(family.job)
        whole_ns = times.family_ns(family)
        assert times.family_ns(family, again=False) <= whole_ns
        for job in family.jobs():
            step_ns = step_s(job) * 1e9
            floor_ns, last_ns = times.floor_ns(job), times.step_floor_ns(job)
            assert floor_ns <= times.actions_floor_ns(job) <= last_ns
            assert 0 < floor_ns <= times.pipeline_ns(job) <= last_ns <= step_ns + 1
            assert whole_ns <= max(floor_ns, times.replicas_ns(job))
            close.append(last_ns / step_ns)
    assert max(close) > 0.8
    return close


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_bound_is_above_what_it_bounds(schedule: str) -> None:
    some: dict[str, Any] = {"tp": (2,), "pp": (2, 4), "micro_batch": (1,), "recompute": ("none", "full")}
    model = "mixtral-8x7b" if schedule == "combined-1f1b" else "llama3.2-1b"
    check_bounds(space(model, schedule=(schedule,), sharding=("zero2", "fsdp"), global_batch=16, **some))


def test_a_schedule_that_a_layout_cannot_run_leaves_the_others_in_the_space() -> None:
    """Only experts that exchange tokens run combined; the others do not depend on who is asked first."""
    sizes: dict[str, Any] = {"tp": (2,), "pp": (2,), "micro_batch": (1,), "virtual_stages": (2,)}
    for model in ("llama3.2-1b", "mixtral-8x7b"):
        orders = (("1f1b", "combined-1f1b"), ("combined-1f1b", "1f1b"))
        first, second = (list(space(model, schedule=order, **sizes).jobs()) for order in orders)
        assert {repr(job) for job in first} == {repr(job) for job in second}
        combined = {job.layout.ep > 1 for job in first if job.schedule == "combined-1f1b"}
        assert combined == ({True} if model == "mixtral-8x7b" else set())
        assert {job.layout.ep for job in first if job.schedule == "1f1b"} >= {1}


@pytest.mark.parametrize(
    ("model", "framework", "cluster", "gpus"),
    [
        ("llama3.2-1b", "megatron", "dgx-h100", 12),
        ("deepseek-v2-lite", "torchtitan", "a100-ethernet", 16),
    ],
)
def test_bounds_hold_for_frameworks_and_machines(model: str, framework: str, cluster: str, gpus: int) -> None:
    some = Space(
        model=load_model(model),
        cluster=load_cluster(cluster, gpus),
        global_batch=24 if gpus == 12 else 32,
        seq_len=1024,
        tp=(2,),
        pp=(2,),
        ep=(2,) if "deepseek" in model else (1,),
        micro_batch=(1,),
        schedule=("zb-v",),
        sharding=("zero2", "zero3", "fsdp"),
        recompute=("none", "selective"),
        offload=("none", "all"),
        others={"framework": framework},
    )
    check_bounds(some)


@pytest.mark.parametrize(
    ("model", "sharding", "pp"),
    [("llama3.2-1b", "zero1", 2), ("olmoe-1b-7b", "zero1", 4), ("olmoe-1b-7b", "fsdp", 1)],
)
def test_a_slow_host_is_part_of_every_bound(model: str, sharding: str, pp: int) -> None:
    """Whether it only launches, or waits for the routes of experts in every layer and loses its lead."""
    some = Space(
        model=load_model(model),
        cluster=load_cluster("dgx-h100", 16),
        global_batch=32,
        seq_len=1024,
        tp=(2,),
        pp=(pp,),
        micro_batch=(1,),
        schedule=("1f1b", "interleaved-1f1b", "zb-h1"),
        sharding=(sharding,),
        others={"conventions": (("host_work", 4.0),)},
    )
    assert min(check_bounds(some)) > 0.8


def test_traffic_of_sharded_parameters_is_a_bound() -> None:
    cluster = load_cluster("a100-ethernet", 16)
    times = PipelineTimes(cluster)
    some = Space(
        model=load_model("llama3.2-1b"),
        cluster=cluster,
        global_batch=32,
        seq_len=1024,
        tp=(1,),
        pp=(1, 2),
        micro_batch=(1,),
        schedule=("1f1b", "zb-v"),
        sharding=("fsdp",),
        recompute=("none",),
        others={"shard_ranks": 2},
    )
    jobs = list(some.jobs())
    assert any(times.replicas_ns(job) > times.pipeline_ns(job) for job in jobs)
    for job in jobs:
        assert times.replicas_ns(job) <= step_s(job) * 1e9


def test_every_layout_of_the_space_is_there_once() -> None:
    jobs = list(space(gpus=8, schedule=("1f1b",), sharding=("zero1",), recompute=("none",)).jobs())
    described = [(job.layout, job.micro_batch) for job in jobs]
    assert len(set(described)) == len(described)
    for tp, pp in ((1, 1), (2, 4), (8, 1), (1, 8)):
        assert any((job.layout.tp, job.layout.pp) == (tp, pp) for job in jobs)
    assert all(job.layout.world_size == 8 for job in jobs)
    assert {job.schedule for job in jobs if job.layout.pp == 1} == {"1f1b"}


def test_long_sequences_are_also_cut_over_ranks() -> None:
    degrees = {n: {job.layout.cp for job in space(seq_len=n).jobs()} for n in (8192, 32768)}
    assert degrees == {8192: {1}, 32768: {1, 2, 4}}


def test_a_weight_orders_by_what_it_says() -> None:
    sizes = [space(gpus=gpus, recompute=("none",)) for gpus in (4, 8)]
    jobs = [family for one in sizes for family in one.families()]
    fastest = cheapest(jobs, 1).best[0]
    cheapest_one = cheapest(jobs, 1, weight=lambda job: job.cluster.n_gpus).best[0]
    assert fastest.job.cluster.n_gpus == 8
    used = [one.summary["step_time_s"] * one.job.cluster.n_gpus for one in (cheapest_one, fastest)]
    assert used == sorted(used)


WORDS = (
    "search --model llama3.2-1b --cluster dgx-h100 --gpus 8 --global-batch 32 --seq-len 2048 --top 3 "
    "--micro-batch 1,2 --recompute none"
).split()


def test_the_verb_prints_the_best_and_writes_it(tmp_path: Path) -> None:
    target = tmp_path / "best.toml"
    words = [*WORDS, "--tokens", "10B", "--price", "2 USD/h", "-o", str(target), "--json"]
    said = json.loads(CliRunner().invoke(main, words, catch_exceptions=False).output)
    steps = [one["step_time_s"] for one in said["layouts"]]
    assert len(steps) == 3
    assert steps == sorted(steps)
    best = said["layouts"][0]
    again = simulate(job_from(read_config(target)))
    assert again.summary["step_time_s"] == best["step_time_s"]
    assert best["usd_per_1b_tokens"] == pytest.approx(1e9 / best["tokens_per_s_per_gpu"] / 3600 * 2)
    assert sum(part["seconds"] for part in said["why_not_the_second"]) == pytest.approx(
        steps[1] - steps[0], abs=1e-9
    )
    shown = CliRunner().invoke(main, WORDS, catch_exceptions=False).output
    assert f"{said['n_candidates']:,} layouts considered" in shown


def test_a_layout_alone_is_not_held_against_itself() -> None:
    shown = CliRunner().invoke(main, [*WORDS, "--top", "1"], catch_exceptions=False).output
    assert "considered" in shown
    assert "together" not in shown


def test_a_line_of_eighty_letters_holds_every_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = [*WORDS, "--pp", "2", "--schedule", "interleaved-1f1b", "--tokens", "10B"]
    shown = CliRunner().invoke(main, words, catch_exceptions=False).output.splitlines()
    assert shown[0].split() == ["layout", "batch", "step", "MFU", "memory", "days", "$", "in", "all"]
    assert shown[2].split()[0] == "interleaved-1f1b"


@pytest.mark.parametrize(
    ("words", "error", "what"),
    [
        (["--model", "llama3-405b", "--tp", "1", "--pp", "1"], JobError, "none of .* fits"),
        (["--global-batch", "7", "--tp", "1", "--pp", "1"], JobError, "no layout is possible"),
        (["--expert-tp", "2"], JobError, "no layout is possible: .* has no experts"),
        (["--by", "cost", "--cluster", "hgx-h20"], ConfigError, "need a price"),
    ],
)
def test_what_cannot_be_found_is_said_in_one_line(
    words: list[str], error: type[Exception], what: str
) -> None:
    with pytest.raises(error, match=what):
        CliRunner().invoke(search, [*WORDS[1:], *words], catch_exceptions=False)


def test_a_choice_that_does_not_exist_is_refused() -> None:
    result = CliRunner().invoke(search, [*WORDS[1:], "--schedule", "1f1b,2f2b"])
    assert result.exit_code == 2
    assert "2f2b" in result.output


def test_activations_of_some_layers_are_offloaded_where_that_is_asked_for_and_possible() -> None:
    """Other offloads, pipelines and recomputation have no layers of their own, and are not searched twice."""
    some = Space(
        model=load_model("llama3.2-1b"),
        cluster=load_cluster("dgx-h100", 2),
        global_batch=4,
        seq_len=4096,
        tp=(1,),
        micro_batch=(1,),
        schedule=("1f1b",),
        sharding=("fsdp",),
        offload=("none", "activations"),
        offload_layers=(4, 8),
    )
    found = [(job.layout.pp, job.recompute, job.offload, job.offload_layers) for job in some.jobs()]
    assert len(found) == len(set(found))
    assert {one for one in found if one[2] == "activations"} == {
        (1, "none", "activations", n) for n in (4, 8)
    }
    assert {one[3] for one in found if one[2] == "none"} == {0}
    check_bounds(some)


def test_an_interrupted_search_gives_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C behind the third step: who asks for it gets what was simulated."""
    space = Space(
        model=load_model("llama3-8b"), cluster=load_cluster("dgx-h100", 16), global_batch=32, seq_len=4096
    )
    whole, _ = fastest(space.families(), 5)
    run = Search._step_ns

    def run_three(self: Search, job: Job) -> int | None:
        if self.n_simulated == 3:
            raise KeyboardInterrupt
        return run(self, job)

    monkeypatch.setattr(Search, "_step_ns", run_three)
    with pytest.raises(KeyboardInterrupt):
        fastest(space.families(), 5)
    found, counts = fastest(space.families(), 5, partial=True)
    assert counts.n_simulated == 3
    assert not counts.is_whole
    assert 1 <= len(found) <= 3
    for one in found:
        assert one.cost == pytest.approx(step_s(one.job) * 1e9)
    assert whole[0].cost <= found[0].cost
