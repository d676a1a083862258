"""What waits for what on the main line of an action, and how templates join into a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulator.predicted import simulate

from foretrace.simulator.builder.chain import Chains, Pass, _phases, _pieces
from foretrace.simulator.builder.groups import Groups
from foretrace.simulator.builder.instances import Costs, Message
from foretrace.simulator.builder.program_builder import COMPUTE, DP, ProgramBuilder, Task, Template
from foretrace.simulator.builder.stages import Unit
from foretrace.simulator.compute.timing import ComputeModel
from foretrace.simulator.config import job_from
from foretrace.simulator.job import Job
from foretrace.simulator.program import Label, Program, Transfer
from foretrace.simulator.workload.dispatch import Routing
from foretrace.simulator.workload.micro_batch import layer_blocks
from foretrace.simulator.workload.ops import Block, Comm, Op, memory
from foretrace.topologies.catalog import load_cluster
from foretrace.traces.layout import Layout

OP = memory("op", 1000, "bf16")


class Free:
    """A network that costs nothing."""

    def collective(self, kind: str, size_bytes: int, ranks: Sequence[int], dtype: str) -> Transfer:
        return Transfer(0, 0)

    def p2p(self, size_bytes: int, src: int, dst: int) -> Transfer:
        return Transfer(0, 0)

    def experts(self, routing: Routing, ranks: Sequence[int]) -> Transfer:
        return Transfer(0, 0)

    def unlike(self, groups: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        return list(groups)


def comm(overlap_ops: int = 0, axis: str = "tp") -> Comm:
    return Comm("all_gather", axis, 1024, overlap_ops)


def cut(*items: Op | Comm) -> tuple[list[tuple[int, tuple[int, ...]]], tuple[int, ...]]:
    """Return for every piece how many operations it has and what it waits for; and the tails."""
    pieces, tails = _pieces(items)
    return [(len(piece.ops), piece.waits) for piece in pieces], tails


def test_operations_between_communications_are_one_task() -> None:
    assert cut(OP, OP, comm(), OP, OP, OP) == ([(2, (-1,)), (0, (0,)), (3, (1,))], (2,))


def test_what_is_beside_a_communication_does_not_wait_for_it() -> None:
    """Gather, two operations beside it, and a third one that needs it."""
    assert cut(comm(2), OP, OP, OP) == ([(0, (-1,)), (2, (-1,)), (1, (1, 0))], (2,))


def test_backward_of_a_column_linear_under_sequence_parallelism() -> None:
    """Gather beside the input gradient, scatter beside the weight gradient; the next operation needs both."""
    pieces, tails = cut(comm(1), OP, comm(1), OP, OP)
    assert pieces == [(0, (-1,)), (1, (-1,)), (0, (1, 0)), (1, (1, 0)), (1, (3, 2))]
    assert tails == (4,)


def test_a_communication_that_nothing_has_waited_for_is_a_tail() -> None:
    assert cut(OP, comm(1), OP) == ([(1, (-1,)), (0, (0,)), (1, (0,))], (2, 1))
    assert cut() == ([], (-1,))


@settings(deadline=None)
@given(st.lists(st.one_of(st.just(OP), st.builds(comm, st.integers(0, 3))), max_size=12))
def test_what_comes_after_a_phase_waits_for_all_of_it(items: list[Op | Comm]) -> None:
    pieces, tails = _pieces(items)
    behind: list[set[int]] = []
    for piece in pieces:
        direct = {at for at in piece.waits if at >= 0}
        behind.append(direct.union(*(behind[at] for at in direct)))
    ended = {at for at in tails if at >= 0}
    assert ended.union(*(behind[at] for at in ended)) == set(range(len(pieces)))
    in_order = [item for piece in pieces for item in (*piece.ops, piece.comm) if item is not None]
    assert in_order == items


def block(name: str, **phases: tuple[Op | Comm, ...]) -> Block:
    return Block(name=name, layer=3, params=0, expert_params=0, phases=phases)


@pytest.mark.parametrize(
    ("kind", "recompute", "expected"),
    [
        ("F", "full", ["a.forward", "m.forward"]),
        ("B", "none", ["m.backward", "a.backward"]),
        ("B", "full", ["a.recompute", "m.recompute", "m.backward", "a.backward"]),
        ("B", "selective", ["m.recompute", "m.backward", "a.recompute", "a.backward"]),
        ("I", "full", ["a.recompute", "m.recompute", "m.backward_input", "a.backward_input"]),
        ("W", "full", ["m.backward_weight", "a.backward_weight"]),
    ],
)
def test_order_of_the_phases_of_a_layer(kind: str, recompute: str, expected: list[str]) -> None:
    blocks = (block("a"), block("m"))
    assert [f"{one.name}.{phase}" for one, phase in _phases(blocks, kind, recompute)] == expected


def test_a_layer_waits_for_what_is_beside_the_main_line() -> None:
    """A gathered layer: its first task waits for the line before it and for the gather."""
    compute = ComputeModel(load_cluster("dgx-h100", 8).device, "bf16")
    template = Template()
    gather = template.add(Task(DP, Label("collective", "all_gather", "parameters", "dp", "bf16")), ())
    unit = Unit(3, (block("a", forward=(OP,)), block("m", forward=(OP, comm(), OP))))
    Chains(compute).units(template, [(unit, Pass("F", "none"))], (gather,))
    assert template.waits == [(1, Template.BEFORE), (1, gather), (2, 1), (3, 2), (4, 3)]
    assert template.tails == (4,)
    assert {task.layer for task in template.tasks[1:]} == {3}


def compute_task(name: str) -> Task:
    return Task(COMPUTE, Label("compute", "forward", name), duration_ns=1)


def build(*templates: Template, layout: Layout | None = None) -> Program:
    builder = ProgramBuilder(Costs(Groups(layout or Layout()), Free(), folded=False))
    for template in templates:
        builder.place(template, 0)
    return builder.build()


def deps_of(program: Program) -> list[list[int]]:
    bounds = program.dep_start.tolist()
    return [program.deps[a:b].tolist() for a, b in pairwise(bounds)]


def test_templates_are_joined_by_their_tails() -> None:
    two = Template()
    two.add(compute_task("beside"), ())
    two.then(compute_task("line"))
    assert deps_of(build(two, two, two)) == [[], [], [], [1], [], [3]]


def test_an_empty_template_changes_nothing() -> None:
    one = Template()
    one.then(compute_task("line"))
    assert deps_of(build(one, Template(), one)) == [[], [0]]


def test_the_update_waits_for_the_last_gradient() -> None:
    backward, update = Template(), Template()
    backward.then(compute_task("backward"))
    for _ in range(2):
        message = Message("all_reduce", "dp", 8, "fp32")
        backward.add(Task(DP, Label("collective", "all_reduce", "", "dp"), message=message), backward.tails)
    update.tails = (Template.BEFORE, Template.GRADIENTS)
    update.then(compute_task("optimizer"))
    program = build(backward, update, layout=Layout(dp=2))
    assert deps_of(program) == [[], [0], [0], [0, 2]]
    assert program.instance.tolist() == [-1, 0, 1, -1]
    assert program.instance_sequence.tolist() == [0, 1]


def test_a_builder_without_tasks_builds_an_empty_program() -> None:
    program = build()
    assert program.n_tasks == program.n_instances == 0
    assert np.array_equal(program.dep_start, [0])


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 10**9)), min_size=1, max_size=8))
def test_a_device_that_starts_when_it_is_told_never_runs_out_of_work(ops: list[tuple[int, int]]) -> None:
    """An operation can run once the host has prepared it and those before; later would be waiting."""
    compute = ComputeModel(load_cluster("dgx-h100", 8).device, "bf16")
    work = [memory("op", size, "bf16", count=count) for count, size in ops]
    chains = Chains(compute)
    lead_ns, rest_ns = chains._launch(work)
    launch_s, done_s, launched_s, slack_s = compute.device.launch_s, 0.0, 0.0, []
    for op in work:
        launched_s += op.n_launches * launch_s
        slack_s.append(lead_ns / 1e9 + done_s - launched_s)
        done_s += compute.op_s(op)
    assert min(slack_s) == pytest.approx(0, abs=1e-8)
    assert lead_ns + rest_ns == pytest.approx(launched_s * 1e9, abs=2)


def test_more_work_for_the_host_or_the_device_never_makes_a_step_shorter() -> None:
    """Also not where it decides which of the two is the slower one."""
    where = {"model": "mixtral-8x7b", "cluster": "dgx-h100", "gpus": 8, "ep": 8, "global_batch": 8}
    times: list[float] = []
    capacities = (0.0, 1.0, 1.05)
    for host in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.5, 6.0):
        for capacity in capacities:
            given = {**where, "capacity_factor": capacity, "conventions": {"host_work": host}}
            times.append(simulate(job_from(given)).summary["step_time_s"])
    dropless, filled, padded = (times[at :: len(capacities)] for at in range(len(capacities)))
    for own in (dropless, filled, padded):
        assert own == sorted(own)
    assert all(a <= b for a, b in zip(filled, padded, strict=True))
    # Of experts that are filled the host knows how many tokens they have: it waits for no router.
    assert filled[0] == dropless[0]
    assert filled[-1] < dropless[-1]


GRAPHED = {
    "attention": ("attention", "forward"),
    "router": ("moe", "forward"),
    "dispatch": ("moe", "forward"),
}


def test_experts_that_are_filled_are_a_graph_of_their_own() -> None:
    """Shapes of a graph are fixed, as are those of experts with a capacity; of others it is left out."""
    where = {"model": "mixtral-8x7b", "cluster": "dgx-h100", "gpus": 8, "ep": 8, "global_batch": 8}
    jobs = [job_from({**where, "capacity_factor": capacity}) for capacity in (0.0, 1.0)]
    launches = [
        [
            sum(op.n_launches for op in layer_blocks(one, 0)[1].phases["forward"] if isinstance(op, Op))
            for one in (job, replace(job, conventions=(("graphed", ("mlp",)),)))
        ]
        for job in jobs
    ]
    (eager, same), (filled, graph) = launches
    assert same == eager == filled
    assert graph == 1


@pytest.mark.parametrize("part", GRAPHED)
def test_a_part_that_is_a_graph_is_launched_at_once(part: str) -> None:
    """The device does the same work; the host launches once for all of the part, and for all of a step."""
    where = {"model": "mixtral-8x7b", "cluster": "dgx-h100", "gpus": 8, "ep": 8, "global_batch": 8}
    eager = job_from({**where, "seq_len": 512, "framework": "megatron"})
    name, phase = GRAPHED[part]

    def ops(job: Job) -> list[Op]:
        block = next(one for one in layer_blocks(job, 0) if one.name == name)
        return [op for op in block.phases[phase] if isinstance(op, Op)]

    graph = replace(eager, conventions=(("graphed", (part,)),))
    assert [replace(op, launches=None) for op in ops(graph)] == [
        replace(op, launches=None) for op in ops(eager)
    ]
    assert sum(op.n_launches for op in ops(graph)) < sum(op.n_launches for op in ops(eager))
    times = [
        simulate(replace(eager, conventions=(("graphed", parts),)), only_figures=True).summary["step_time_s"]
        for parts in ((), (part,), ("attention", "router", "dispatch"), ("step",))
    ]
    assert times == sorted(times, reverse=True)
    assert times[-1] < times[0]


def test_the_host_launches_collectives_that_are_in_no_graph() -> None:
    where = {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 2, "tp": 2, "global_batch": 1}
    eager = job_from({**where, "seq_len": 512})
    graph = replace(eager, conventions=(("graphed", ("attention",)),))
    launches = [
        [one.launches for one in layer_blocks(job, 0)[0].phases["forward"] if isinstance(one, Comm)]
        for job in (eager, graph)
    ]
    assert launches == [[0.5, 0.5], [0, 0]]


def test_dropout_in_a_fused_kernel_takes_time_for_its_random_numbers() -> None:
    """As many as there are scores below the diagonal, forward and backward, at the rate of a processor."""
    job = job_from(
        {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 1, "global_batch": 1, "seq_len": 4096}
    )
    dropped = replace(job, model=replace(job.model, dropout=True))
    compute = ComputeModel(job.cluster.device, job.precision)
    for phase in ("forward", "backward"):
        plain, random = (
            next(
                op for op in layer_blocks(one, 0)[0].phases[phase] if isinstance(op, Op) and op.k and op.v_dim
            )
            for one in (job, dropped)
        )
        assert random.n_random == job.model.n_heads * 4096 * 4096 // 2
        assert compute.op_s(random) > compute.op_s(plain)
