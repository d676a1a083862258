"""Who meets whom, at what cost, and what a program says of it and of the work between."""

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis.strategies import DrawFn, composite, integers, lists, sampled_from
from tests.simulator.rehearsal_tables import SIDE, machine, message, place, tables, work, written

from foretrace.simulator.network.collectives import KINDS
from foretrace.simulator.network.cost import Network
from foretrace.simulator.program import Transfer
from foretrace.simulator.rehearsed.program import Joiner, RankTasks, assembled
from foretrace.simulator.rehearsed.rank import Meeting, Splits
from foretrace.simulator.rehearsed.works import op_of, precision_of
from foretrace.simulator.workload.ops import Op
from foretrace.topologies.catalog import load_cluster
from foretrace.traces.layout import Group

NETWORK = Network(load_cluster("dgx-h100", 16))
GROUPS = {
    1: Group(id=1, axis="dp", ranks=(0, 1)),
    2: Group(id=2, axis="dp", ranks=(0, 8)),
    3: Group(id=3, axis="pp", ranks=tuple(range(12))),
}


@composite
def met(draw: DrawFn) -> tuple[int, Meeting]:
    """Return a rank and its part in a communication, of a number that no other has."""
    kind, group = draw(sampled_from([*KINDS, "gather", "scatter", "barrier", "other", "send", "recv"])), 0
    group = draw(sampled_from([1, 2, 3, 99]))
    ranks = GROUPS[group].ranks if group in GROUPS else (3, 9)
    rank, *others = draw(sampled_from([ranks, ranks[::-1]]))
    peer = draw(sampled_from(others)) if kind in {"send", "recv"} else -1
    return rank, Meeting(kind, group, 0, draw(sampled_from([1 << 12, 1 << 20, 1 << 26])), peer)


def _cost(rank: int, one: Meeting) -> Transfer:
    """Return what the network says of it: ends of a transfer in its direction, a root's as an all-gather."""
    if one.kind in {"send", "recv"}:
        ends = (rank, one.peer) if one.kind == "send" else (one.peer, rank)
        return NETWORK.p2p(one.size_bytes, *ends)
    ranks = GROUPS[one.group].ranks if one.group in GROUPS else (rank,)
    if one.kind == "barrier":
        return NETWORK.barrier(ranks)
    kind = {"gather": "all_gather", "scatter": "all_gather", "other": "broadcast"}.get(one.kind, one.kind)
    return NETWORK.collective(kind, one.size_bytes, ranks)


@given(lists(met(), min_size=1, max_size=8))
@example([(0, Meeting("send", 3, 0, 1 << 20, peer)) for peer in (1, 11)])
@example([(rank, Meeting("send", 3, 0, 1 << 20, 5)) for rank in (0, 11)])
@example([(0, Meeting(kind, 3, 0, 1 << 20, 11)) for kind in ("send", "recv")])
def test_each_costs_what_the_network_says_of_it_alone(parts: list[tuple[int, Meeting]]) -> None:
    joiner = Joiner(NETWORK, GROUPS, range(16))
    for sequence, (rank, one) in enumerate(parts):
        assert joiner.number(rank, one._replace(sequence=sequence)) == sequence
    transfers, which = joiner.costs()
    assert [transfers[at] for at in which.tolist()] == [_cost(rank, one) for rank, one in parts]
    assert len(set(transfers)) == len(transfers)


@given(lists(lists(integers(1, 1 << 26), min_size=2, max_size=2), min_size=4, max_size=4))
def test_uneven_exchanges_of_a_group_cost_what_each_of_them_sends(sent: list[list[int]]) -> None:
    """Two of one group, one after the other; nothing is assumed of either."""
    joiner, both = Joiner(NETWORK, GROUPS, range(16)), (sent[:2], sent[2:])
    for sequence, matrix in enumerate(both):
        for at, rank in enumerate(GROUPS[2].ranks):
            split = Splits(tuple(matrix[at]), tuple(row[at] for row in matrix))
            joiner.number(rank, Meeting("all_to_all", 2, sequence, sum(matrix[at]), -1, split))
    transfers, which = joiner.costs()
    found = [transfers[at] for at in which.tolist()]
    assert found == [NETWORK.all_to_all_v(matrix, GROUPS[2].ranks) for matrix in both]
    assert not joiner.assumed()


def test_what_a_ring_sends_both_ways_are_two_transfers() -> None:
    """A rank that stands for all meets itself in each direction, not in both at once."""
    joiner = Joiner(NETWORK, {4: Group(id=4, axis="cp", ranks=(0, 1, 2, 3))}, (0,) * 4)
    sides = [("send", 1), ("send", 3), ("recv", 1), ("recv", 3)]
    found = [joiner.number(0, Meeting(kind, 4, 0, 1 << 20, peer)) for kind, peer in sides]
    assert found == [0, 1, 1, 0]
    assert joiner.participants == [2, 2]
    assert not joiner.alone()


def test_a_program_says_what_each_task_does_and_where() -> None:
    """Two ranks: places, work, its share that memory bounds, and dependencies within each rank."""
    works = [work(), work(kind="memory", flops=0, bytes_moved=SIDE)]
    at = place(step=1, stage=2, virtual_stage=1, microbatch=5, layer=7)
    events = [("op", 0, 0, -1), ("op", 1, 0, -1), ("communication", 0, 0, 0), ("op", 0, 0, -1)]
    sent = message(is_async=False)
    one = written(tables(events, works, [sent], [at]))
    joiner = Joiner(NETWORK, GROUPS, range(16))
    found: Any = assembled([RankTasks(rank, one.tasks, one.places) for rank in (0, 1)], joiner, 1)
    assert found.rank.tolist() == [0] * 3 + [1] * 3
    for name, value in {"step": 0, "stage": 2, "virtual_stage": 1, "microbatch": 5, "layer": 7}.items():
        assert set(getattr(found, name).tolist()) == {value}
    assert found.flops.tolist() == [2 * SIDE**3, 0, 2 * SIDE**3] * 2
    assert found.bytes_moved.tolist() == [6 * SIDE**2 + SIDE, 0, 6 * SIDE**2] * 2
    waits = np.split(found.deps, found.dep_start[1:-1])
    assert [list(each) for each in waits] == [[], [0], [1], [], [3], [4]]
    seconds = [task.duration_ns for task in one.tasks]
    share = (seconds[0] - seconds[2]) / seconds[0]
    assert found.memory_bound.tolist() == pytest.approx([share * 1e6, 0, 0] * 2, abs=50)
    assert found.instance_participants.tolist() == [2]


def test_an_operation_is_what_its_row_says() -> None:
    """Attention in the kernel that torch takes first, groups in one kernel; a type without a size is fp32."""
    device = machine(8).device
    row = work(name="aten.x", kind="attention", dtype="fp16", batch=3, v_dim=5, causal=True, kernels=4)
    sizes: dict[str, Any] = {
        "flops": 2 * SIDE**3,
        "bytes_moved": 6 * SIDE**2,
        "m": SIDE,
        "n": SIDE,
        "k": SIDE,
    }
    assert op_of(row, device) == Op(
        "aten.x", "attention", **sizes, dtype="fp16", batch=3, v_dim=5, causal=True, count=4, kernel="flash2"
    )
    grouped = work(name="aten._grouped_mm", dtype="int8", rows=(1, 2), along="m")
    shared: dict[str, Any] = {"dtype": "fp32", "causal": False, "grouped": True, "kernel": "torch"}
    wanted = Op("aten._grouped_mm", "gemm", **sizes, **shared, rows=(1, 2), along="m")
    assert op_of(grouped, device) == wanted
    names = {"fsdp.split": "copy.", "aten._fused_adamw_": "optimizer.", "aten._foreach_add_": "optimizer."}
    assert {name: op_of(work(name=name), device).name for name in names} == {
        name: prefix + name for name, prefix in names.items()
    }
    assert op_of(work(), load_cluster("mi300x", 8).device).kernel == ""


def test_the_type_of_a_run_is_that_of_most_of_its_products() -> None:
    """Over all ranks, by FLOPs; a type of no product, and of what nobody knows, counts for nothing."""
    fp32, bf16 = work(dtype="fp32", flops=60), work(flops=25)
    other = [work(kind="memory", dtype="fp16", flops=999), work(is_known=False, dtype="fp16", flops=999)]
    ranks = [tables([], [fp32, *other]).works, tables([], [bf16, bf16]).works]
    assert precision_of(ranks, machine(8).device) == "fp32"
    assert precision_of([*ranks, ranks[1]], machine(8).device) == "bf16"
    assert precision_of([tables([], other).works], machine(8).device) == "bf16"
