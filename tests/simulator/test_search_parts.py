"""A search in parts, by whoever: the same answer as one process has, also when processes are lost."""

from __future__ import annotations

import json
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.simulator import lost_work
from tests.simulator.searched import cheapest

from foretrace.cli import main
from foretrace.simulator.builder.groups import Groups
from foretrace.simulator.builder.step import RecentGroups
from foretrace.simulator.errors import SearchError
from foretrace.simulator.job import Job
from foretrace.simulator.memory.ranks import rank_memories
from foretrace.simulator.models.sources import load_model
from foretrace.simulator.schedules import SCHEDULES, in_flight, plan
from foretrace.simulator.search.bubbles import MOST_PER_STAGE, bubble, passes
from foretrace.simulator.search.executors import Executor, Here, Local, open_executor
from foretrace.simulator.search.layouts import LeastMemory, short_microbatches
from foretrace.simulator.search.parts import Part, cut, search_parts
from foretrace.simulator.search.space import Space
from foretrace.simulator.search.what_if import half_as_fast
from foretrace.simulator.simulate import simulate
from foretrace.topologies.catalog import load_cluster

pytest.importorskip("numba")


def space(model: str = "llama3.2-1b", **given: Any) -> Space:
    """Return some 100 layouts on 8 GPUs."""
    given = {"micro_batch": (1,), "schedule": ("1f1b", "zb-h1"), "recompute": ("none",), **given}
    cluster = load_cluster("dgx-a100", 8)
    return Space(model=load_model(model), cluster=cluster, global_batch=16, seq_len=2048, **given)


def answer(executor: Executor | None) -> list[tuple[float, Any, str, str]]:
    """Return the best of the space, as *executor* finds them."""
    found = search_parts([space()], 4, executor=executor)
    return [(one.cost, one.job.layout, one.job.schedule, one.job.sharding) for one in found.best]


@pytest.fixture(scope="module")
def alone() -> list[tuple[float, Any, str, str]]:
    return answer(None)


class InOrder:
    """This process, as if there were several: parts are cut, and done one after the other."""

    workers = 3

    def __init__(self) -> None:
        here = Here()
        self.start, self.wait, self.close = here.start, here.wait, here.close


def test_parts_find_what_one_process_finds(alone: list[Any]) -> None:
    assert answer(InOrder()) == alone
    direct = cheapest(space().families(), 4)
    assert [one.cost for one in direct.best] == [cost for cost, *_ in alone]


@pytest.mark.parametrize("n_parts", [1, 2, 7, 1000])
def test_parts_have_every_layout_once(n_parts: int) -> None:
    whole = Part(spaces=(space(), space(cp=(2,))), n_best=1, weights={})
    dealt = [job for part in cut(whole, n_parts) for family in part.families() for job in family.jobs()]
    assert len(dealt) == len(set(dealt))
    assert set(dealt) == {*space().jobs(), *space(cp=(2,)).jobs()}


@pytest.mark.slow
def test_a_lost_process_loses_nothing(tmp_path: Path) -> None:
    executor = Local(2)
    try:
        tasks = {executor.start(lost_work.kill_once, (str(tmp_path / "killed"), n)): n for n in range(4)}
        left, found = set(tasks), {}
        while left:
            for task, result in executor.wait(left):
                left.discard(task)
                found[tasks[task]] = result
    finally:
        executor.close()
    assert found == {n: n * n for n in range(4)}
    assert (tmp_path / "killed").exists()


@pytest.mark.slow
def test_work_that_kills_every_process_is_given_up() -> None:
    executor = Local(1)
    task = executor.start(lost_work.dies, None)
    with pytest.raises(SearchError, match="lost 5 times"):
        executor.wait([task])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "package"),
    [("local:2", "numba"), ("dask://local:2", "distributed"), ("ray://local:2", "ray")],
)
def test_a_worker_that_is_killed_on_the_way_changes_nothing(
    name: str, package: str, alone: list[Any]
) -> None:
    pytest.importorskip(package)
    executor = open_executor(name)
    try:
        ((_, pid),) = executor.wait([executor.start(lost_work.pid, None)])
        killed: list[int] = []

        def kill() -> None:
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

        timer = threading.Timer(0.3, kill)
        timer.start()
        found = answer(executor)
        timer.join()
        assert killed == [pid]
        assert found == alone
    finally:
        executor.close()


@pytest.mark.parametrize("text", ["here", "local:0", "local:x", "dask://", "spark://x"])
def test_an_executor_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(SearchError, match="executor"):
        open_executor(text)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_schedule_holds_fewer_in_a_longer_step(schedule: str) -> None:
    fits = SCHEDULES[schedule].fits
    for p in (2, 4, 6):
        for m in (n for n in range(2 * p, 6 * p) if fits(p, n)):
            short = short_microbatches(schedule, p, m)
            held = [[in_flight(rank) for rank in plan(schedule, p, n)] for n in (short, m)]
            assert all(a <= b for a, b in zip(*held, strict=True)), (p, m)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_bound_on_memory_is_never_above_it(schedule: str) -> None:
    model = "mixtral-8x7b" if schedule == "combined-1f1b" else "llama3.2-1b"
    jobs = list(space(model, schedule=(schedule,), pp=(2, 4), sharding=("zero1", "fsdp")).jobs())
    memory = LeastMemory()
    assert jobs
    for job in jobs:
        peak_bytes = max(rank.peak_bytes for rank in rank_memories(job))
        assert memory.family_bytes(job) <= memory.least_bytes(job) <= peak_bytes


def test_offload_is_part_of_the_space_and_costs_time() -> None:
    found = list(space(offload=("none", "optimizer"), tp=(1,), pp=(1,), sharding=("fsdp",)).families())
    assert {family.job.offload for family in found} == {"none", "optimizer"}
    best = cheapest(found, 2).best
    assert best[0].job.offload == "none"


@pytest.mark.parametrize(
    ("schedule", "p", "m", "v"),
    [("1f1b", 32, 8, 1), ("gpipe", 8, 24, 1), ("1f1b", 4, 64, 1), ("interleaved-1f1b", 4, 16, 4)],
)
def test_bubbles_are_those_of_the_closed_forms(schedule: str, p: int, m: int, v: int) -> None:
    found = bubble(schedule, p, m, v)
    assert found.fraction == pytest.approx((p - 1) / (v * m + p - 1))
    assert found.overhead == pytest.approx((p - 1) / (v * m))


def test_an_efficiency_is_passed_from_where_the_closed_form_says() -> None:
    assert passes("1f1b", 8, 0.9) == 9 * 7  # m / (m + p - 1) = 0.9
    assert passes("1f1b", 8, 0.999) is None
    assert bubble("zb-h1", 8, 32).fraction < bubble("1f1b", 8, 32).fraction


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1"])
def test_an_efficiency_is_passed_where_looking_at_all_sizes_finds_it(schedule: str) -> None:
    sizes = [m for m in range(1, MOST_PER_STAGE * 2 + 1) if SCHEDULES[schedule].fits(2, m)]
    reached = [bubble(schedule, 2, m).efficiency for m in sizes]
    for efficiency in (0.0, 0.3, 0.75, 0.95, 0.98, 1.0):
        enough = [m for m, found in zip(sizes, reached, strict=True) if found >= efficiency]
        assert passes(schedule, 2, efficiency) == (enough[0] if enough else None)


def test_the_verb_says_where_the_efficiency_is_passed() -> None:
    words = "bubble --stages 8 --micro-batches 8,16 --schedule 1f1b,interleaved-1f1b --json".split()
    said = json.loads(CliRunner().invoke(main, words, catch_exceptions=False).output)
    assert said["passes_from"]["1f1b"] == 63
    assert [row["n_microbatches"] for row in said["rows"]] == [8, 16, 8, 16]
    shown = CliRunner().invoke(main, words[:-1], catch_exceptions=False).output
    assert "1f1b reaches 90 % from 63 micro-batches on" in shown


def test_more_work_than_it_is_worth_is_refused() -> None:
    words = ["bubble", "--stages", "4", "--micro-batches", "8,300000", "--schedule", "zb-v"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert "300,000 micro-batches on 4 ranks are more than 1,000,000 forwards" in result.output


def test_links_half_as_fast_slow_down_what_crosses_them() -> None:
    """Where no host is slower than what crosses them."""
    found: Job = next(iter(space(tp=(8,), pp=(1,)).jobs()))
    job = replace(found, conventions=(("host_work", 0.0),))
    other = replace(job, cluster=half_as_fast(job.cluster))
    times = [simulate(one).summary["step_time_s"] for one in (job, other)]
    assert times[0] < times[1] < 2 * times[0]


def test_what_if_and_tools_are_in_the_answer() -> None:
    words = "search --model llama3.2-1b --cluster dgx-a100 --gpus 2 --global-batch 4 --seq-len 1024 --top 2"
    more = "--micro-batch 1 --recompute none --sharding fsdp --what-if --to megatron --to fsdp2 --json"
    said = json.loads(
        CliRunner().invoke(main, [*words.split(), *more.split()], catch_exceptions=False).output
    )
    assert [one["what"] for one in said["what_if"]] == ["links were half as fast", "the batch were doubled"]
    assert set(said["written"]) == {"megatron", "fsdp2"}
    assert said["layouts"][0]["tied"] is True
    assert sum(part["seconds"] for part in said["why_not"]["parts"]) == pytest.approx(
        said["layouts"][1]["step_time_s"] - said["layouts"][0]["step_time_s"], abs=1e-9
    )


BUDGET = (
    "search --model llama3.2-1b --cluster dgx-a100 --gpus 1,2,4 --global-batch 8 --seq-len 1024 --tokens 1B "
    "--micro-batch 1 --recompute none --sharding zero1 --top 5 --json"
).split()


def test_a_budget_leaves_the_fastest_that_it_pays_for() -> None:
    every = json.loads(CliRunner().invoke(main, [*BUDGET, "--by", "cost"], catch_exceptions=False).output)
    costs = sorted(one["usd"] for one in every["layouts"])
    limit = str((costs[0] + costs[-1]) / 2)
    said = json.loads(CliRunner().invoke(main, [*BUDGET, "--budget", limit], catch_exceptions=False).output)
    assert said["layouts"]
    assert all(one["usd"] <= float(limit) for one in said["layouts"])
    steps = [one["step_time_s"] for one in said["layouts"]]
    assert steps == sorted(steps)
    for found, by in ((every, "usd_per_1b_tokens"), (said, "step_time_s")):
        best = [one["best"][by] for one in found["machines"]]
        assert len(best) > 1
        assert best == sorted(best)
    within = {one["best"]["usd"] <= float(limit): one["within_budget"] for one in said["machines"]}
    assert within == {True: True, False: False}
    short = CliRunner().invoke(main, [*BUDGET, "--budget", str(costs[0] / 2)])
    assert isinstance(short.exception, SystemExit)
    assert "the cheapest takes" in short.output


def test_a_search_keeps_the_groups_of_a_bounded_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a million GPUs those of a thousand layouts would take a hundred GB; the answer is the same."""
    whole = [space(sharding=("none", "fsdp"))]
    best = search_parts(whole, 3, executor=Here()).best
    held: list[int] = []
    groups = RecentGroups.of

    def asked(self: RecentGroups, job: Job) -> Groups:
        found = groups(self, job)
        held.append(sum(one.layout.world_size for one in self._kept.values()))
        return found

    monkeypatch.setattr(RecentGroups, "of", asked)
    monkeypatch.setattr("foretrace.simulator.builder.step.MOST_RANKS_KEPT", 16)
    assert [one.summary for one in search_parts(whole, 3, executor=Here()).best] == [
        one.summary for one in best
    ]
    assert max(held) == 16
