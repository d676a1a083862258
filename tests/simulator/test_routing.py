"""How tokens fall on experts: closed forms, and what more tokens on the fullest rank do to a layer."""

from __future__ import annotations

import random
from statistics import mean
from typing import Any

import pytest
from hypothesis import given
from hypothesis.strategies import floats, sampled_from

from foretrace.simulator.errors import JobError
from foretrace.simulator.job import Job
from foretrace.simulator.memory.activations import kept_bytes
from foretrace.simulator.models.sources import load_model
from foretrace.simulator.workload.linear import fullest, load_factor
from foretrace.simulator.workload.micro_batch import layer_blocks
from foretrace.simulator.workload.ops import Comm, Op
from foretrace.topologies.catalog import load_cluster
from foretrace.traces.layout import Layout


def job(ep: int = 8, **settings: object) -> Job:
    layout = Layout(dp=ep, ep=ep)
    found = {"global_batch": ep, "seq_len": 4096, **settings}
    cluster = load_cluster("dgx-h100", ep)
    return Job(model=load_model("qwen3-30b-a3b"), cluster=cluster, layout=layout, **found)  # type: ignore[arg-type]


def grouped(some: Job) -> dict[str, Op]:
    block = layer_blocks(some, 0)[1]
    return {op.name: op for op in block.phases["forward"] if isinstance(op, Op)}


@given(experts=sampled_from((8, 64, 256)), ranks=sampled_from((2, 4, 8)), low=floats(0, 1), more=floats(0, 1))
def test_the_fullest_rank_has_more_the_less_even_the_router_is(
    experts: int, ranks: int, low: float, more: float
) -> None:
    assert 1.0 <= fullest(experts, ranks, low) <= fullest(experts, ranks, low + more) <= ranks


@given(experts=sampled_from((16, 64, 256)), imbalance=floats(0, 1))
def test_more_experts_on_a_rank_even_out(experts: int, imbalance: float) -> None:
    assert fullest(4 * experts, 8, imbalance) <= fullest(experts, 8, imbalance)


def test_the_fullest_rank_is_that_of_experts_dealt_at_random() -> None:
    """64 experts with normal loads of mean 1 and deviation 0.3, dealt to 8 ranks 2,000 times; within 2 %."""
    chance = random.Random(1)
    found = []
    for _ in range(2000):
        loads = [chance.gauss(1, 0.3) for _ in range(64)]
        found.append(max(mean(loads[at : at + 8]) for at in range(0, 64, 8)) / mean(loads))
    assert fullest(64, 8, 0.3) == pytest.approx(mean(found), rel=0.02)


@pytest.mark.parametrize("settings", [{"capacity_factor": 1.25}, {"expert_imbalance": 0.5}])
def test_products_exchanges_and_activations_grow_with_the_load(settings: dict[str, Any]) -> None:
    even, uneven = job(), job(**settings)
    load = load_factor(uneven)
    assert load > 1.0
    for name in ("moe.up", "moe.down", "moe.activation", "moe.dispatch.sort"):
        ratio = grouped(uneven)[name].bytes_moved / grouped(even)[name].bytes_moved
        assert 1.0 < ratio <= load * 1.001
    assert grouped(uneven)["moe.up"].flops == pytest.approx(load * grouped(even)["moe.up"].flops, rel=1e-3)
    sizes = [
        next(op.size_bytes for op in layer_blocks(one, 0)[1].phases["forward"] if isinstance(op, Comm))
        for one in (even, uneven)
    ]
    assert sizes[1] / sizes[0] == pytest.approx(load, rel=1e-3)
    assert kept_bytes(uneven, 0) > kept_bytes(even, 0)


def test_a_capacity_below_one_drops_tokens() -> None:
    assert grouped(job(capacity_factor=0.5))["moe.up"].flops * 2 == grouped(job())["moe.up"].flops


def test_local_experts_are_sorted_only_where_tokens_come_from_elsewhere() -> None:
    assert "moe.dispatch.sort" in grouped(job())
    assert "moe.dispatch.sort" not in grouped(job(ep=1))


def test_shares_below_nothing_are_refused() -> None:
    with pytest.raises(JobError, match="capacity_factor=-1"):
        job(capacity_factor=-1.0)
    with pytest.raises(JobError, match="expert_imbalance"):
        job(expert_imbalance=float("inf"))
