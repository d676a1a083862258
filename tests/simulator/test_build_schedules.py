"""Programs of every schedule: they run, transfers are joined as in NCCL, and stages are where they belong."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretrace.simulator.builder.stages import job_plan, n_stages, stage_layers
from foretrace.simulator.builder.step import build, job_groups, representatives
from foretrace.simulator.compute.timing import ComputeModel
from foretrace.simulator.engine import compiled, contended, contended_compiled, event
from foretrace.simulator.job import Job
from foretrace.simulator.models.sources import load_model
from foretrace.simulator.network.cost import Network
from foretrace.simulator.program import Transfer
from foretrace.simulator.schedules import SCHEDULES, holders, plan, write_csv
from foretrace.simulator.workload.dispatch import Routing
from foretrace.topologies.catalog import load_cluster
from foretrace.traces.layout import Layout


class Wire:
    """A network of one speed."""

    def __init__(self, latency_ns: int) -> None:
        self.latency_ns = latency_ns

    def collective(self, kind: str, size_bytes: int, ranks: Sequence[int], dtype: str) -> Transfer:
        return Transfer(self.latency_ns, 0)

    def p2p(self, size_bytes: int, src: int, dst: int) -> Transfer:
        return Transfer(self.latency_ns, 0)

    def experts(self, routing: Routing, ranks: Sequence[int]) -> Transfer:
        return Transfer(self.latency_ns, 0)

    def unlike(self, groups: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        return list(groups)


def make_job(schedule: str, *, pp: int = 4, m: int = 16, dp: int = 1, **settings: Any) -> Job:
    """Return a job with 12 small layers and *m* micro-batches; of experts if only they run *schedule*."""
    if schedule == "combined-1f1b":
        name, dp, ep = "deepseek-v2-lite", max(dp, 2), 2
        settings = {"virtual_stages": 2, **settings}
    else:
        name, ep = "llama2-7b", 1
    layout = Layout(pp=pp, dp=dp, ep=ep)
    return Job(
        model=replace(load_model(name), n_layers=12),
        cluster=load_cluster("dgx-h100", layout.world_size),
        layout=layout,
        global_batch=m * dp,
        schedule=schedule,
        **{"seq_len": 1024, **settings},
    )


def rows_of(job: Job, latency_ns: int = 5000, *, folded: bool = True) -> list[dict[str, Any]]:
    compute = ComputeModel(job.cluster.device, job.precision)
    rows: list[dict[str, Any]] = event.run(build(job, Wire(latency_ns), compute, folded=folded)).to_pylist()
    return [row | {"end_ns": row["start_ns"] + row["duration_ns"]} for row in rows]


@pytest.mark.parametrize("overlap_p2p", [False, True])
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_runs_on_links_so_slow_that_everybody_waits(
    name: str, pp: int, *, overlap_p2p: bool
) -> None:
    """A send that takes longer than an action, met by receives that are posted late: nothing deadlocks."""
    m = 8
    job = make_job(name, pp=pp, m=m, overlap_p2p=overlap_p2p)
    stages: dict[tuple[str, int], set[int]] = defaultdict(set)
    for row in rows_of(job, 10**8):
        kind = "backward" if row["kind"] == "backward_weight" else row["kind"]
        stages[kind, row["microbatch"]].add(row["stage"])
    whole = set(range(n_stages(job_plan(job))))
    assert all(stages[kind, i] == whole for kind in ("forward", "backward") for i in range(m))


@pytest.mark.parametrize("name", SCHEDULES)
def test_transfers_are_joined_by_pair_direction_and_sequence(name: str) -> None:
    """docs/timeline-format.md, section 3: both ends agree, and sequence counts the sends of a direction."""
    sides: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows_of(make_job(name)):
        if row["category"] == "p2p":
            ends = (row["rank"], row["peer"]) if row["kind"] == "send" else (row["peer"], row["rank"])
            sides[row["group"], *ends, row["sequence"]].append(row)
    by_direction: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for key, both in sides.items():
        send, recv = sorted(both, key=lambda row: row["kind"], reverse=True)
        assert (send["kind"], recv["kind"]) == ("send", "recv")
        assert send["end_ns"] == recv["end_ns"]
        assert send["name"] == recv["name"]
        assert send["microbatch"] == recv["microbatch"]
        assert recv["stage"] - send["stage"] == (1 if send["name"] == "activations" else -1)
        by_direction[key[:3]].append(send)
    for sends in by_direction.values():
        assert [row["sequence"] for row in sends] == list(range(len(sends)))


@pytest.mark.parametrize("name", SCHEDULES)
def test_stages_are_on_the_ranks_of_the_plan_with_their_layers(name: str) -> None:
    job = make_job(name)
    orders = job_plan(job)
    layers, holder = stage_layers(job, n_stages(orders)), holders(orders)
    for row in rows_of(job):
        if row["microbatch"] >= 0 and row["category"] == "compute":
            assert job.layout.coord(row["rank"]).pp == holder[row["stage"], row["microbatch"]]
            assert row["layer"] in (-1, *layers[row["stage"]])


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("sharding", ["zero1", "fsdp"])
def test_folding_changes_nothing_for_the_ranks_that_are_simulated(name: str, sharding: str) -> None:
    job = make_job(name, pp=2, m=8, dp=2, sharding=sharding)
    stored = set(representatives(job.layout))
    assert rows_of(job) == [row for row in rows_of(job, folded=False) if row["rank"] in stored]


@pytest.mark.parametrize("name", SCHEDULES)
def test_both_engines_give_the_same_table(name: str) -> None:
    recompute = "selective" if name == "combined-1f1b" else "full"
    job = make_job(name, dp=2, sharding="zero3", recompute=recompute, n_steps=2)
    program = build(job, Wire(5000), ComputeModel(job.cluster.device, job.precision))
    assert compiled.run(program).equals(event.run(program))


@pytest.mark.parametrize("name", SCHEDULES)
def test_both_contended_engines_give_the_same_table(name: str) -> None:
    job = make_job(name, pp=2, m=8, dp=4, sharding="fsdp")
    network = Network(job.cluster)
    program = build(job, network, ComputeModel(job.cluster.device, job.precision), folded=False)
    assert contended_compiled.run(program).equals(contended.run(program))


@pytest.mark.parametrize(
    "name", [name for name, schedule in SCHEDULES.items() if schedule.virtual_stages > 1]
)
def test_overlapped_receives_hide_messages_behind_compute(name: str) -> None:
    slow, fast = (
        max(row["end_ns"] for row in rows_of(make_job(name, m=32, overlap_p2p=on), 300_000))
        for on in (False, True)
    )
    assert fast < slow


def test_both_copies_of_dualpipe_reduce_their_gradients_together() -> None:
    job = make_job("dualpipe", dp=2)
    assert [g.ranks for g in job_groups(job).all if g.axis == "dp"] == [(0, 1, 6, 7), (2, 3, 4, 5)]
    reduced: dict[int, int] = defaultdict(int)
    for row in rows_of(job):
        if row["kind"] == "reduce_scatter":
            reduced[row["rank"]] += row["size_bytes"]
    assert reduced[0] == reduced[6] > 0
    assert reduced[2] == reduced[4] > 0
    assert reduced[0] + reduced[2] == 4 * job.model.n_params


def test_a_plan_from_a_file_is_the_schedule_it_was_written_from(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    write_csv(path, plan("zb-v", 4, 16))
    assert rows_of(make_job(str(path))) == rows_of(make_job("zb-v"))
