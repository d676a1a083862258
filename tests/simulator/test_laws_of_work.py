"""Laws of work and memory: how they scale, and what never gets larger."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.strategies import integers, sampled_from
from tests.simulator.made_jobs import fixed_bytes
from tests.simulator.predicted import simulate

from foretrace.simulator.job import RECOMPUTES, Job
from foretrace.simulator.memory.ranks import rank_memories
from foretrace.simulator.models.sources import load_model
from foretrace.simulator.schedules import SCHEDULES
from foretrace.simulator.sharding import SHARDINGS
from foretrace.simulator.workload.micro_batch import embedding_block, head_block, layer_blocks
from foretrace.simulator.workload.ops import PHASES, Op
from foretrace.simulator.workload.recipes import RECIPES
from foretrace.topologies.catalog import load_cluster
from foretrace.traces.layout import Layout

MODELS = sampled_from(
    ("llama3-8b", "gpt3-175b", "mixtral-8x7b", "deepseek-v2-lite", "gemma2-9b", "gpt-oss-20b")
)
SMALL = replace(load_model("llama3-8b"), n_layers=4)


def job(model: Any, layout: Layout | None = None, **given_: Any) -> Job:
    layout = layout or Layout()
    found = {"global_batch": 8 * layout.dp, "seq_len": 2048, **given_}
    cluster = load_cluster("dgx-b200", layout.world_size)
    model = load_model(model) if isinstance(model, str) else model
    return Job(model=model, cluster=cluster, layout=layout, **found)


def flops(some: Job, kind: str) -> int:
    """FLOPs of an operation kind in all phases of the last layer and both ends."""
    blocks = [embedding_block(some), *layer_blocks(some, some.model.n_layers - 1), head_block(some)]
    return sum(
        op.flops
        for block in blocks
        for phase in PHASES
        for op in block.phases[phase]
        if isinstance(op, Op) and op.kind.startswith(kind)
    )


@given(model=MODELS, times=integers(1, 8), recompute=sampled_from(RECOMPUTES))
def test_work_is_proportional_to_the_micro_batch(model: str, times: int, recompute: str) -> None:
    one, more = (job(model, micro_batch=n, recompute=recompute, global_batch=n) for n in (1, times))
    for kind in ("gemm", "attention"):
        assert flops(more, kind) == pytest.approx(times * flops(one, kind), rel=1e-6)


@given(model=sampled_from(("llama3-8b", "mixtral-8x7b", "deepseek-v2-lite")), times=sampled_from((2, 4, 8)))
def test_products_grow_with_the_sequence_and_attention_with_its_square(model: str, times: int) -> None:
    short, long = (job(model, seq_len=n * 2048, global_batch=8) for n in (1, times))
    assert flops(long, "gemm") == pytest.approx(times * flops(short, "gemm"), rel=1e-6)
    assert flops(long, "attention") == pytest.approx(times**2 * flops(short, "attention"), rel=1e-6)


@given(times=sampled_from((2, 4, 8)))
def test_under_a_window_attention_grows_with_the_sequence_at_last(times: int) -> None:
    local = replace(load_model("mistral-7b"), window=64)
    short, long = (job(local, seq_len=n * 4096, global_batch=8) for n in (1, times))
    assert flops(long, "attention") == pytest.approx(times * flops(short, "attention"), rel=0.01)


@given(model=MODELS, recipe=sampled_from(sorted(RECIPES)))
def test_fewer_bits_do_the_same_work(model: str, recipe: str) -> None:
    plain, few = job(model), job(model, fp8=True, recipe=recipe)
    assert flops(plain, "gemm") == flops(few, "gemm")


@given(
    schedule=sampled_from(sorted(SCHEDULES)),
    pp=sampled_from((1, 2, 4)),
    sharding=sampled_from(sorted(SHARDINGS)),
)
def test_recomputation_never_raises_the_peak_of_a_rank(schedule: str, pp: int, sharding: str) -> None:
    try:
        kept = [
            rank_memories(
                job(SMALL, Layout(pp=pp, dp=2), schedule=schedule, sharding=sharding, recompute=one)
            )
            for one in RECOMPUTES
        ]
    except ValueError:  # a schedule that does not allow these stages
        return
    for none, selective, full in zip(*kept, strict=True):
        assert full.peak_bytes <= selective.peak_bytes <= none.peak_bytes


@settings(max_examples=6)
@given(
    pp=sampled_from((1, 2, 4)),
    sharding=sampled_from(sorted(SHARDINGS)),
    recompute=sampled_from(RECOMPUTES),
    n_steps=integers(1, 2),
)
def test_after_a_step_memory_holds_what_it_held_before(
    pp: int, sharding: str, recompute: str, n_steps: int
) -> None:
    some = job(SMALL, Layout(pp=pp, dp=2), sharding=sharding, recompute=recompute, n_steps=n_steps)
    table = simulate(some).memory
    for rank in set(table["rank"].to_pylist()):
        own = table.filter(np.array(table["rank"]) == rank)
        total = own.filter(np.array(own["category"]) == "total").sort_by("t_ns")
        held = total["bytes"].to_pylist()
        memory = rank_memories(some)[some.layout.coord(rank).pp]
        assert held[-1] == min(held) == fixed_bytes(memory)  # nothing but states is left, as before the step
        assert max(held) == memory.peak_bytes


@given(model=sampled_from(("llama3-8b", "gpt3-175b")), times=integers(1, 4))
def test_the_head_is_proportional_to_the_vocabulary(model: str, times: int) -> None:
    one, more = (job(replace(load_model(model), vocab=n * 1024)) for n in (1, times))
    of_head = [
        [op for op in head_block(some).phases["forward"] if isinstance(op, Op)] for some in (one, more)
    ]
    products = [sum(op.flops for op in ops if op.kind == "gemm") for ops in of_head]
    assert products[1] == times * products[0]


@given(top_k=integers(1, 8), tp=sampled_from((1, 2)))
def test_experts_work_for_every_copy_of_a_token(top_k: int, tp: int) -> None:
    """One more expert per token is one more up and down; the router and all else stay."""
    base = load_model("qwen3-30b-a3b")
    one, more = (job(replace(base, top_k=n), Layout(tp=tp)) for n in (1, top_k))
    single = [
        op.flops
        for op in layer_blocks(one, 0)[1].phases["forward"]
        if isinstance(op, Op) and op.name in ("moe.up", "moe.down")
    ]
    # forward 1, backward 2, and its halves apart, 1 each
    assert flops(more, "gemm") - flops(one, "gemm") == 5 * (top_k - 1) * sum(single)
