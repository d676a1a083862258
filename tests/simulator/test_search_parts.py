"""A search by several processes: the same answer as one has, also when one is lost; and what is searched."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
from click.testing import CliRunner
from tests.simulator.searched import cheapest

from foretrace.cli import main
from foretrace.simulator.builder.groups import Groups
from foretrace.simulator.builder.step import RecentGroups
from foretrace.simulator.job import Job
from foretrace.simulator.memory.ranks import rank_memories
from foretrace.simulator.models.sources import load_model
from foretrace.simulator.schedules import SCHEDULES, in_flight, plan
from foretrace.simulator.search.best import Nobody, Search, State
from foretrace.simulator.search.bubbles import MOST_PER_STAGE, bubble, passes
from foretrace.simulator.search.layouts import LeastMemory, short_microbatches
from foretrace.simulator.search.parts import Asked, Board, Worker, search_parts
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


def answer(processes: int) -> list[tuple[float, Any, str, str]]:
    """Return the best of the space, as so many *processes* find them."""
    found = search_parts([space()], 4, processes=processes)
    return [(one.cost, one.job.layout, one.job.schedule, one.job.sharding) for one in found.best]


@pytest.fixture(scope="module")
def alone() -> list[tuple[float, Any, str, str]]:
    return answer(1)


@pytest.mark.parametrize("n", [1, 2, 7, 1000])
def test_processes_have_every_layout_once_and_no_layer_twice(n: int) -> None:
    asked = Asked(spaces=(space(), space(cp=(2,))), n_best=1, weights={})
    worker = Worker(asked, standing_here(n), n)
    dealt = [[number for *_, number in worker.bounded(at)] for at in range(min(n, len(asked.families)))]
    assert sorted(chain(*dealt)) == list(range(len(asked.families)))
    layouts = [[asked.families[number].job.layout for number in numbers] for numbers in dealt]
    layers = [{(one.tp, one.cp, one.ep, one.expert_tp) for one in own} for own in layouts]
    assert sum(map(len, layers)) == len(set().union(*layers))


def standing_here(n: int) -> Board:
    """Return a board that answers this process as one that was started for it."""
    board = Board(1, n)
    board._parent = os.getppid()
    return board


def test_processes_find_what_one_finds_and_look_at_hardly_more(alone: list[Any]) -> None:
    one, two = (search_parts([space()], 4, processes=n) for n in (1, 2))
    assert [(it.cost, it.job, it.summary) for it in two.best] == [
        (it.cost, it.job, it.summary) for it in one.best
    ]
    assert [cost for cost, *_ in alone] == [it.cost for it in one.best]
    assert two.counts.n_candidates == one.counts.n_candidates
    assert two.counts.n_simulated <= 2 * one.counts.n_simulated


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_what_costs_more_than_the_best_of_others_is_not_simulated(share: float, alone: list[Any]) -> None:
    """And of those that cost no more none is missed."""
    costs: list[float] = [cost for cost, *_ in alone]

    class Known(Nobody):
        def cutoff(self) -> float:
            return share * costs[-1]

    search = Search(others=Known())
    for family in space().families():
        search.add(family)
    found, counts = search.run(4, partial=False, progress=lambda _: None)
    assert [one.cost for one in found] == [cost for cost in costs if cost <= share * costs[-1]]
    assert (counts.n_simulated > 0) == (share == 1)


def test_a_board_has_the_lowest_costs_and_all_states() -> None:
    board = Board(2, 2)
    board._parent = os.getppid()
    assert board.cutoff() == math.inf
    for cost in (5.0, 3.0, 9.0, 4.0):
        board.ran(cost)
    assert board.cutoff() == 4.0
    board.tell(0, State(7, 3, 1, 2.0, 1.5))
    board.tell(1, State(10, 4, 2, 3.0, 2.5))
    assert board.state() == State(17, 7, 3, 2.0, 1.5)
    assert board.state().words() == "7 pipelines run, 3 simulated of 17; best so far 2 s, none below 1.5 s"
    board.end()
    with pytest.raises(KeyboardInterrupt):
        board.cutoff()


def test_work_for_a_process_that_is_gone_ends() -> None:
    worker = Worker(Asked(spaces=(space(),), n_best=1, weights={}), Board(1, 1), 1)
    with pytest.raises(KeyboardInterrupt):
        worker.bounded(0)


def test_a_process_that_is_killed_on_the_way_changes_nothing(
    alone: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed, told = list[int](), list[str]()
    state = Board.state

    def looked(self: Board) -> State:
        for process in [] if killed else multiprocessing.active_children()[:1]:
            killed.append(process.pid or 0)
            process.kill()
        return state(self)

    monkeypatch.setattr(Board, "state", looked)
    found = search_parts([space()], 4, processes=2, progress=told.append)
    assert len(killed) == 1
    assert [one.cost for one in found.best] == [cost for cost, *_ in alone]
    assert any("was lost" in words for words in told)


LONG = "search --model llama3.2-1b --cluster dgx-h100 --gpus 16 --top 100 --processes 2"


def test_ctrl_c_is_told_to_all_processes_and_gives_what_they_have() -> None:
    """The terminal sends it to all of them."""
    command = [sys.executable, "-m", "foretrace", *LONG.split()]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as running:
        assert running.stderr is not None
        said = list[str]()
        for line in running.stderr:
            said.append(line)
            if "best so far" in line:
                os.killpg(running.pid, signal.SIGINT)
                break
        output, rest = running.communicate(timeout=60)
    assert (running.returncode, "Traceback" in "".join([*said, rest])) == (130, False)
    assert "interrupted: these are the best that had been simulated" in " ".join(output.split())


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
    best = search_parts(whole, 3).best
    held: list[int] = []
    groups = RecentGroups.of

    def asked(self: RecentGroups, job: Job) -> Groups:
        found = groups(self, job)
        held.append(sum(one.layout.world_size for one in self._kept.values()))
        return found

    monkeypatch.setattr(RecentGroups, "of", asked)
    monkeypatch.setattr("foretrace.simulator.builder.step.MOST_RANKS_KEPT", 16)
    assert [one.summary for one in search_parts(whole, 3).best] == [one.summary for one in best]
    assert max(held) == 16
