"""Laws of the programs that jobs become: who takes part, what waits, and what adds up."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.simulator.builder.gradients import DDP_BUCKET_BYTES
from foretrace.simulator.builder.groups import Groups
from foretrace.simulator.builder.merged import NotSerialError, merged
from foretrace.simulator.builder.program_builder import STREAMS, Task, Template
from foretrace.simulator.builder.stage_layers import split_layers
from foretrace.simulator.builder.step import build, representatives
from foretrace.simulator.compute.timing import ComputeModel
from foretrace.simulator.engine import event
from foretrace.simulator.job import Job
from foretrace.simulator.models.sources import load_model
from foretrace.simulator.network.cost import Network
from foretrace.simulator.program import Label, Program, Transfer
from foretrace.simulator.sharding import SHARDINGS
from foretrace.simulator.workload.dispatch import Routing
from foretrace.simulator.workload.micro_batch import embedding_block, head_blocks, layer_blocks
from foretrace.simulator.workload.ops import DTYPE_BYTES
from foretrace.topologies.catalog import load_cluster
from foretrace.traces.layout import Layout


class Wire:
    """A network of one speed: every communication takes *latency_ns* and its size times *ns_per_byte*."""

    def __init__(self, latency_ns: int = 0, ns_per_byte: float = 0.0) -> None:
        self.latency_ns, self.ns_per_byte = latency_ns, ns_per_byte

    def collective(self, kind: str, size_bytes: int, ranks: Sequence[int], dtype: str) -> Transfer:
        assert len(ranks) > 1
        return Transfer(self.latency_ns, round(size_bytes * self.ns_per_byte))

    def p2p(self, size_bytes: int, src: int, dst: int) -> Transfer:
        assert src != dst
        return Transfer(self.latency_ns, round(size_bytes * self.ns_per_byte))

    def experts(self, routing: Routing, ranks: Sequence[int]) -> Transfer:
        raise AssertionError("no experts are spread here")

    def unlike(self, groups: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        return list(groups)


def make_job(model: str = "llama2-7b", *, m: int = 4, n_layers: int = 6, **settings: Any) -> Job:
    """Return a job with a few layers of a preset and *m* micro-batches."""
    degrees = {axis: settings.pop(axis) for axis in ("pp", "dp", "cp", "tp", "ep") if axis in settings}
    layout = Layout(**degrees)
    return Job(
        model=replace(load_model(model), n_layers=n_layers),
        cluster=load_cluster("dgx-h100", layout.world_size),
        layout=layout,
        global_batch=m * layout.dp,
        **{"seq_len": 1024, **settings},
    )


def program_of(
    job: Job, network: Wire | Network | None = None, *, folded: bool = True, merges: bool = False
) -> Program:
    compute = ComputeModel(job.cluster.device, job.precision)
    return build(job, network or Wire(1000, 0.01), compute, folded=folded, merges=merges)


def rows_of(job: Job, network: Wire | Network | None = None, *, folded: bool = True) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = event.run(program_of(job, network, folded=folded)).to_pylist()
    return [row | {"end_ns": row["start_ns"] + row["duration_ns"]} for row in rows]


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    pp, dp, cp, tp = (draw(st.sampled_from([1, 2])) for _ in range(4))
    return make_job(
        m=draw(st.integers(1, 3)),
        n_layers=draw(st.integers(pp, 3)),
        pp=pp,
        dp=dp,
        cp=cp,
        tp=tp,
        schedule=draw(st.sampled_from(["1f1b", "gpipe", "naive"])),
        sharding=draw(st.sampled_from(sorted(SHARDINGS))),
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        sequence_parallel=draw(st.booleans()),
        n_steps=draw(st.integers(1, 2)),
    )


@settings(max_examples=25, deadline=None)
@given(jobs())
def test_every_member_of_a_group_takes_part(job: Job) -> None:
    program, groups = program_of(job, folded=False), Groups(job.layout)
    size = {group.id: len(group.ranks) for group in groups.all}
    of_instance: dict[int, list[int]] = defaultdict(list)
    for task, instance in enumerate(program.instance.tolist()):
        if instance >= 0:
            of_instance[instance].append(task)
    for instance, tasks in of_instance.items():
        label = program.labels[program.label[tasks[0]]]
        group = int(program.instance_group[instance])
        expected = 2 if label.category == "p2p" else size[group]
        assert len(tasks) == program.instance_participants[instance] == expected
        kinds = {program.labels[program.label[task]].kind for task in tasks}
        assert kinds == ({"send", "recv"} if label.category == "p2p" else {label.kind})
        assert len({int(program.rank[task]) for task in tasks}) == expected


@settings(max_examples=25, deadline=None)
@given(jobs())
def test_folding_changes_nothing_for_the_ranks_that_are_simulated(job: Job) -> None:
    network = Network(job.cluster)
    rows = [
        row for row in rows_of(job, network, folded=False) if row["rank"] in set(representatives(job.layout))
    ]
    assert rows_of(job, network) == rows


@settings(max_examples=25, deadline=None)
@given(jobs())
def test_a_task_for_several_in_a_row_ends_when_the_last_of_them_would(job: Job) -> None:
    plain, short = (program_of(job, merges=merges) for merges in (False, True))
    merged = [] if short.merged is None else short.merged[short.merged >= 0].tolist()
    assert sum(short.insides[at].n_tasks - 1 for at in merged) == plain.n_tasks - short.n_tasks
    every_ns, some_ns = (set(event.times(program)[1].tolist()) for program in (plain, short))
    assert some_ns <= every_ns
    assert max(some_ns) == max(every_ns)
    assert short.memory_bound_share == plain.memory_bound_share


@pytest.mark.parametrize("given", [{"tp": 4}, {"pp": 2, "tp": 2}, {"dp": 2, "sharding": "zero1"}], ids=str)
def test_most_tasks_of_layers_are_in_a_row(given: dict[str, Any]) -> None:
    job = make_job(n_layers=32, m=8, seq_len=8192, **given)
    assert program_of(job, merges=True).n_tasks * 5 < program_of(job).n_tasks


def test_tasks_of_two_streams_that_do_not_wait_for_each_other_stay_apart() -> None:
    def task(stream: str, kind: str) -> Task:
        return Task(STREAMS.index(stream), Label("compute", kind, ""), 5)

    template = Template()
    template.then(task("compute", "forward"))
    template.add(task("tp", "forward"), (Template.BEFORE,))
    with pytest.raises(NotSerialError):
        merged(template, lambda _: 0)


def test_a_folded_rank_carries_the_slowest_of_the_groups_it_stands_for() -> None:
    """12 GPUs in nodes of 8: rank 0 sends to 6 inside a node, rank 2 to 8 across."""
    job = make_job(pp=2, dp=3, tp=2)
    network = Network(job.cluster)
    folded, unfolded = rows_of(job, network), rows_of(job, network, folded=False)
    across = network.p2p(1, 2, 8)
    assert sum(across[:2]) > sum(network.p2p(1, 0, 6)[:2])
    assert max(row["end_ns"] for row in folded) >= max(row["end_ns"] for row in unfolded)


@settings(max_examples=25, deadline=None)
@given(jobs())
def test_work_of_a_step_is_the_work_of_its_blocks(job: Job) -> None:
    """FLOPs of a rank are those of its layers, embedding and head, once per micro-batch."""
    program = program_of(job)
    phases = ("forward", "backward", *(["recompute"] if job.recompute != "none" else []))
    for pp, layers in enumerate(split_layers(job.model.n_layers, job.layout.pp)):
        blocks = [block for layer in layers for block in layer_blocks(job, layer)]
        blocks += [embedding_block(job)] if pp == 0 else []
        blocks += head_blocks(job) if pp == job.layout.pp - 1 else []
        items = [item for block in blocks for phase in phases for item in block.phases[phase]]
        expected = sum(getattr(item, "flops", 0) for item in items) * job.n_microbatches * job.n_steps
        rank = job.layout.rank(job.layout.coord(0)._replace(pp=pp))
        own = (program.rank == rank) & (program.microbatch >= 0)
        assert int(program.flops[own].sum()) == expected


@settings(max_examples=25, deadline=None)
@given(jobs())
def test_nothing_overlaps_on_a_stream_and_micro_batches_do_not_pass_each_other(job: Job) -> None:
    ends: dict[tuple[int, str], int] = {}
    for row in rows_of(job):
        lane = (row["rank"], row["stream"])
        assert row["start_ns"] >= ends.get(lane, 0)
        ends[lane] = row["end_ns"]


@settings(max_examples=25, deadline=None)
@given(jobs(), st.integers(0, 5000), st.floats(0, 0.02))
def test_a_faster_network_never_makes_a_step_longer(job: Job, latency_ns: int, ns_per_byte: float) -> None:
    slow = max(row["end_ns"] for row in rows_of(job, Wire(5000, 0.02)))
    fast = max(row["end_ns"] for row in rows_of(job, Wire(latency_ns, ns_per_byte)))
    assert fast <= slow


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "naive"])
def test_with_free_communication_one_rank_computes_all_the_time(schedule: str) -> None:
    job = make_job(tp=2, dp=2, m=3, seq_len=4096, schedule=schedule, micro_batch=1)
    rows = rows_of(job, Wire())
    compute = sum(row["duration_ns"] for row in rows if row["category"] == "compute")
    assert max(row["end_ns"] for row in rows) == compute


def test_pipelines_of_unequal_stages_have_their_closed_forms() -> None:
    """Naive: m of everything. GPipe: a flow shop of equal jobs, sum + (m - 1) max, forward and backward."""
    for schedule in ("naive", "gpipe", "1f1b"):
        job = make_job(pp=4, m=6, seq_len=4096, schedule=schedule)
        rows = [
            row for row in rows_of(job, Wire()) if row["category"] == "compute" and row["microbatch"] >= 0
        ]
        first = [row for row in rows if row["microbatch"] == 0]
        f, b = (
            [sum(r["duration_ns"] for r in first if (r["kind"], r["stage"]) == (kind, s)) for s in range(4)]
            for kind in ("forward", "backward")
        )
        gpipe = sum(f) + 5 * max(f) + sum(b) + 5 * max(b)
        least = max(sum(f[:s]) + sum(b[:s]) + 6 * (f[s] + b[s]) for s in range(4))
        makespan = max(row["end_ns"] for row in rows)
        assert makespan == {"naive": 6 * sum(f + b), "gpipe": gpipe}.get(schedule, makespan)
        assert makespan >= least


@pytest.mark.parametrize(
    ("sharding", "kind", "width", "times"),
    [
        ("ddp", "all_reduce", 4, 1),
        ("zero1", "reduce_scatter", 4, 1),
        ("zero2", "reduce_scatter", 4, 3),
        ("zero3", "reduce_scatter", 4, 3),
        ("fsdp", "reduce_scatter", 4, 3),
    ],
)
def test_gradients_are_reduced_as_often_as_the_framework_does(
    sharding: str, kind: str, width: int, times: int
) -> None:
    job = make_job(dp=2, m=3, sharding=sharding)
    rows = [row for row in rows_of(job) if row["axis"] == "dp" and row["kind"] == kind]
    assert sum(row["size_bytes"] for row in rows) == job.model.n_params * width * times


@pytest.mark.parametrize(
    ("sharding", "times"), [("ddp", 0), ("zero1", 1), ("zero2", 1), ("zero3", 6), ("fsdp", 6)]
)
def test_parameters_are_gathered_as_often_as_the_framework_does(sharding: str, times: int) -> None:
    """After the update; or before every forward and every backward of three micro-batches, but for the head.

    Its backward follows its forward.
    """
    job = make_job(dp=2, m=3, sharding=sharding)
    rows = [row for row in rows_of(job) if row["axis"] == "dp" and row["kind"] == "all_gather"]
    head = job.model.head_params() + job.model.norm_params
    n_params = job.model.n_params * times - head * times // 2 * SHARDINGS[sharding].parameters
    assert sum(row["size_bytes"] for row in rows) == n_params * DTYPE_BYTES["bf16"]


def test_a_model_wrapped_as_one_is_gathered_once_in_a_microbatch() -> None:
    job = make_job(dp=2, m=3, sharding="fsdp", conventions=(("wrap", "model"),))
    rows = [row for row in rows_of(job) if row["axis"] == "dp" and row["kind"] == "all_gather"]
    assert sum(row["size_bytes"] for row in rows) == 3 * job.model.n_params * DTYPE_BYTES["bf16"]


def test_copies_of_shards_are_summed_beside_what_shards_exchange() -> None:
    """HSDP: another communicator than that of the shards, so that no gather waits; the optimizer does."""
    wire = Wire(0, 0.01)
    job = make_job(dp=4, m=2, sharding="fsdp", shard_ranks=2)
    rows = [row for row in rows_of(job, wire) if row["rank"] == 0]
    sums = [row for row in rows if row["stream"] == "dp.copies"]
    assert {row["kind"] for row in sums} == {"all_reduce"}
    assert sum(row["size_bytes"] for row in sums) == 2 * job.model.n_params // 2 * DTYPE_BYTES["fp32"]
    others = [row for row in rows if row["stream"] == "dp"]
    assert any(a["start_ns"] < b["end_ns"] and b["start_ns"] < a["end_ns"] for a in sums for b in others)
    update = next(row for row in rows if row["kind"] == "optimizer")
    assert update["start_ns"] >= max(row["end_ns"] for row in sums)


@pytest.mark.parametrize(("sharding", "times"), [("ddp", 1), ("zero1", 1), ("zero2", 3)])
def test_what_does_not_overlap_with_backward_runs_alone(sharding: str, times: int) -> None:
    """Stage 2 of DeepSpeed without ``overlap_comm`` reduces in every micro-batch, and backward waits."""
    job = make_job(dp=2, m=3, sharding=sharding, conventions=(("overlap_grad_reduce", False),))
    rows = rows_of(job, Wire(0, 0.01))
    sums = [row for row in rows if row["axis"] == "dp" and row["kind"] != "all_gather"]
    assert sum(row["size_bytes"] for row in sums) == times * job.model.n_params * DTYPE_BYTES["fp32"]
    busy = [row for row in rows if row["stream"] == "compute" and row["rank"] == sums[0]["rank"]]
    assert not any(a["start_ns"] < b["end_ns"] and b["start_ns"] < a["end_ns"] for a in sums for b in busy)


def test_ddp_buckets_are_at_least_25_mib_and_wait_for_the_gradients_in_them() -> None:
    rows = rows_of(make_job(dp=2, m=2, sharding="ddp"))
    buckets = [row for row in rows if row["kind"] == "all_reduce" and row["axis"] == "dp"]
    assert all(row["size_bytes"] >= DDP_BUCKET_BYTES for row in buckets[:-1])
    backward = [row for row in rows if row["kind"] == "backward"]
    first = min(row["start_ns"] for row in buckets)
    assert all(row["microbatch"] == 1 for row in buckets)
    assert any(row["end_ns"] <= first and row["microbatch"] == 1 for row in backward)
    assert any(row["start_ns"] > first for row in backward), "the reduction overlaps the rest of backward"


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_full_sharding_holds_at_most_two_units(kind: str) -> None:
    """A unit is gathered only when the last but one has computed: limit_all_gathers."""
    rows = rows_of(make_job(dp=2, m=2, sharding="fsdp", seq_len=512), Wire(0, 0.001))
    passes = [row for row in rows if row["kind"] == kind and row["microbatch"] == 0]
    order = list(dict.fromkeys((row["layer"], row["name"] if row["layer"] < 0 else "") for row in passes))
    ends = [
        max(r["end_ns"] for r in passes if (r["layer"], r["name"] if r["layer"] < 0 else "") == u)
        for u in order
    ]
    begin = min(row["start_ns"] for row in passes)
    gathers = [
        row for row in rows if row["kind"] == "all_gather" and row["axis"] == "dp" and row["microbatch"] == 0
    ]
    n_forward = len(gathers) // 2 + 1
    gathers = gathers[:n_forward] if kind == "forward" else gathers[n_forward:]
    if kind == "backward":  # the head is whole since its forward
        order, ends, begin = order[1:], ends[1:], ends[0]
    assert [row["layer"] for row in gathers] == [layer for layer, _ in order]
    assert all(row["start_ns"] >= end for row, end in zip(gathers[2:], ends, strict=False))
    assert gathers[1]["start_ns"] < ends[0], "the next unit is gathered while the first one computes"
    assert begin >= gathers[0]["end_ns"]


def test_without_a_limit_all_units_are_asked_for_before_the_first_computes() -> None:
    job = make_job(dp=2, m=1, sharding="fsdp", seq_len=512, conventions=(("limit_all_gathers", False),))
    rows = rows_of(job, Wire(0, 0.001))
    begin = min(row["start_ns"] for row in rows if row["kind"] == "forward")
    gathers = [row for row in rows if row["kind"] == "all_gather" and row["axis"] == "dp"]
    forward = sorted(gathers, key=lambda row: row["start_ns"])[: len(gathers) // 2]
    assert begin == forward[0]["end_ns"]
    for row, after in pairwise(forward):
        assert after["start_ns"] == row["end_ns"], "one follows the other, whatever computes"


def test_experts_reduce_over_their_own_replicas() -> None:
    job = make_job("mixtral-8x7b", dp=4, ep=2, m=1)
    rows = [row for row in rows_of(job) if row["kind"] == "reduce_scatter" and row["axis"] == "dp"]
    groups = Groups(job.layout)
    by_group: Counter[int] = Counter()
    for row in rows:
        by_group[row["group"]] += row["size_bytes"] // 4
    dense, experts = groups.of("dp", 0), groups.of("edp", 0)
    assert dense is not None
    assert experts is not None
    n_experts = sum(job.model.expert_params(layer, 1, 2) for layer in range(job.model.n_layers))
    assert experts.ranks == (0, 2)
    assert by_group == {dense.id: job.model.n_params - 2 * n_experts, experts.id: n_experts}


def test_a_receive_is_posted_when_the_action_before_it_has_been_computed() -> None:
    rows = rows_of(make_job(pp=2, m=4, seq_len=4096))
    for rank in {row["rank"] for row in rows}:
        own = [row for row in rows if row["rank"] == rank]
        compute = [row for row in own if row["category"] == "compute" and row["microbatch"] >= 0]
        for row in own:
            if row["kind"] == "recv":
                assert row["start_ns"] in {0, *(other["end_ns"] for other in compute)}


def test_sends_do_not_hold_up_compute() -> None:
    """With a link so slow that a send takes longer than a forward, the next forward still follows at once."""
    rows = rows_of(make_job(pp=2, m=4, schedule="gpipe", seq_len=4096), Wire(10**9))
    forwards = [row for row in rows if row["rank"] == 0 and row["kind"] == "forward"]
    assert all(a["end_ns"] == b["start_ns"] for a, b in pairwise(forwards))


def test_host_that_launches_slower_than_the_device_works_sets_the_pace() -> None:
    small, large = make_job(m=2, seq_len=64), make_job(m=2, seq_len=8192)
    assert not [row for row in rows_of(large) if row["stream"] == "host"]
    rows = rows_of(small)
    host = [row for row in rows if row["kind"] == "launch"]
    device = small.cluster.device
    ops = [
        op
        for layer in layer_blocks(small, 0)
        for phase in ("forward", "backward")
        for op in layer.phases[phase]
    ]
    launch_s = device.launch_s * small.profile.host_work
    per_layer_s = sum(op.count for op in ops if hasattr(op, "count")) * launch_s
    assert sum(row["duration_ns"] for row in host if row["layer"] == 0) == pytest.approx(2e9 * per_layer_s)
    end = max(row["end_ns"] for row in rows if row["kind"] == "backward")
    assert end >= sum(row["duration_ns"] for row in host)
    assert end <= 1.05 * sum(row["duration_ns"] for row in host)


def test_steps_follow_one_another_and_are_alike() -> None:
    rows = rows_of(make_job(pp=2, dp=2, m=3, n_steps=3))
    windows = [row for row in rows if row["category"] == "step" and row["rank"] == 0]
    assert [row["step"] for row in windows] == [0, 1, 2]
    assert all(a["end_ns"] == b["start_ns"] for a, b in pairwise(windows))
    assert len({row["duration_ns"] for row in windows[1:]}) == 1


def test_representatives_stand_for_their_pipeline_rank() -> None:
    assert representatives(Layout(pp=2, dp=2, tp=2)) == (0, 0, 0, 0, 4, 4, 4, 4)


def test_building_is_deterministic() -> None:
    job = make_job(pp=2, dp=2, tp=2, cp=2, sharding="zero2")
    one, two = program_of(job), program_of(job)
    for field in ("rank", "stream", "label", "duration_ns", "instance", "deps", "dep_start", "peer"):
        assert np.array_equal(getattr(one, field), getattr(two, field))
