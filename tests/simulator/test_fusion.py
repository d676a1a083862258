"""Fused and eager element-wise work: the same arithmetic, more traffic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis.strategies import sampled_from

from foretrace.simulator.compute.fusion import EAGER, FUSED, is_separate
from foretrace.simulator.compute.timing import ComputeModel
from foretrace.simulator.errors import JobError
from foretrace.simulator.framework import EAGER_PARTS, Framework, framework_names, load_framework
from foretrace.simulator.job import Job
from foretrace.simulator.memory.activations import kept_bytes
from foretrace.simulator.models.sources import load_model
from foretrace.simulator.workload.micro_batch import (
    Block,
    Op,
    embedding_block,
    head_block,
    layer_blocks,
    optimizer_ops,
)
from foretrace.simulator.workload.ops import PHASES
from foretrace.topologies.catalog import load_cluster
from foretrace.traces.layout import Layout

MODELS = sampled_from(("llama3-8b", "gpt3-175b", "mixtral-8x7b", "deepseek-v3", "gemma2-9b", "command-r-35b"))
LAYOUTS = sampled_from((Layout(), Layout(tp=4), Layout(cp=2), Layout(tp=2, dp=2)))


def job(model: str, layout: Layout, kernels: str, **settings: object) -> Job:
    found = {"global_batch": layout.dp, "seq_len": 4096, "kernels": kernels, **settings}
    cluster = load_cluster("dgx-h100", layout.world_size)
    return Job(model=load_model(model), cluster=cluster, layout=layout, **found)  # type: ignore[arg-type]


def blocks(some: Job) -> list[Block]:
    return [embedding_block(some), *layer_blocks(some, some.model.n_layers - 1), head_block(some)]


def ops(block: Block, phase: str) -> list[Op]:
    return [op for op in block.phases[phase] if isinstance(op, Op)]


@given(model=MODELS, layout=LAYOUTS, phase=sampled_from(PHASES))
def test_eager_code_computes_the_same_and_moves_no_less(model: str, layout: Layout, phase: str) -> None:
    fused, eager = (blocks(job(model, layout, kernels, recompute="full")) for kernels in ("fused", "eager"))
    for one, other in zip(fused, eager, strict=True):
        assert sum(op.flops for op in ops(one, phase)) == sum(op.flops for op in ops(other, phase))
        assert sum(op.bytes_moved for op in ops(one, phase)) <= sum(
            op.bytes_moved for op in ops(other, phase)
        )
        assert sum(op.count for op in ops(one, phase)) <= sum(op.count for op in ops(other, phase))
        assert (one.params, one.expert_params) == (other.params, other.expert_params)


@given(model=MODELS, layout=LAYOUTS)
def test_eager_code_is_never_faster(model: str, layout: Layout) -> None:
    compute = ComputeModel(load_cluster("dgx-h100", 1).device, "bf16")

    def seconds(kernels: str) -> float:
        some = job(model, layout, kernels)
        return sum(compute.op_s(op) for block in blocks(some) for op in ops(block, "forward"))

    assert seconds("eager") > seconds("fused")


def test_bytes_per_element_of_a_norm_and_a_gate() -> None:
    some = job("llama3-8b", Layout(), "eager")
    hidden, inner = 4096 * 4096, 4096 * 14336
    found = {op.name: op for block in layer_blocks(some, 0) for op in ops(block, "forward")}
    back = {op.name: op for block in layer_blocks(some, 0) for op in ops(block, "backward")}
    assert found["mlp.norm"].bytes_moved == 36 * hidden
    assert back["mlp.norm.backward"].bytes_moved == 92 * hidden
    assert found["mlp.activation"].bytes_moved == 10 * inner
    assert back["mlp.activation.backward"].bytes_moved == 18 * inner


def test_apart_projections_sum_the_gradients_of_their_input() -> None:
    some = job("llama3-8b", Layout(), "eager")
    attention, mlp = layer_blocks(some, 0)
    widths = [op.n for op in ops(attention, "forward") if op.name == "attention.qkv"]
    assert widths == [4096, 1024, 1024]
    assert [op.n for op in ops(mlp, "forward") if op.name == "mlp.up"] == [14336, 14336]
    sums = {
        op.name: op.count for block in (attention, mlp) for op in ops(block, "backward") if "sum" in op.name
    }
    assert sums == {"attention.qkv.dgrad.sum": 2, "mlp.up.dgrad.sum": 1}


def test_operations_are_selected_alike_whether_products_are_apart_or_not() -> None:
    fused, eager = (
        job("llama3-8b", Layout(), kernels, framework="torchtitan", recompute="selective")
        for kernels in ("fused", "eager")
    )
    for one, other in zip(layer_blocks(fused, 0), layer_blocks(eager, 0), strict=True):
        again = [sum(op.flops for op in ops(block, "recompute")) for block in (one, other)]
        assert again[0] == again[1] > 0


def test_the_host_is_charged_for_what_the_fused_form_launches() -> None:
    some = job("llama3-8b", Layout(), "eager")
    norm = next(op for op in ops(layer_blocks(some, 0)[0], "forward") if op.name == "attention.norm")
    assert (norm.count, norm.n_launches) == (
        EAGER["rmsnorm"].forward.kernels,
        FUSED["rmsnorm"].forward.kernels,
    )


def test_a_framework_says_what_is_apart_and_a_job_may_overrule_it() -> None:
    eager = replace(job("llama3-8b", Layout(), ""), framework="torchtitan")
    assert is_separate(eager, "rotary")
    assert not is_separate(eager, "optimizer")
    assert not is_separate(replace(eager, kernels="fused"), "rotary")
    assert is_separate(replace(eager, framework="megatron", kernels="eager"), "optimizer")
    assert all(set(load_framework(name).eager) <= set(EAGER_PARTS) for name in framework_names())


def test_an_eager_adam_moves_its_states_three_times_as_often() -> None:
    fused, eager = (
        optimizer_ops(job("llama3-8b", Layout(), kernels), 1000)[1] for kernels in ("fused", "eager")
    )
    assert (fused.bytes_moved, eager.bytes_moved) == (30_000, 82_000)


def test_unknown_kernels_and_parts_are_refused() -> None:
    with pytest.raises(JobError, match="kernels='fast'"):
        job("llama3-8b", Layout(), "fast")
    with pytest.raises(JobError, match="eager="):
        Framework(name="mine", matches=("mine",), eager=("gelu",))


def test_latent_keys_are_joined_in_either_case_and_queries_by_eager_code_alone() -> None:
    fused, eager = (
        {op.name: op for op in ops(layer_blocks(job("deepseek-v3", Layout(), kernels), 0)[0], "forward")}
        for kernels in ("fused", "eager")
    )
    assert fused["attention.assemble"].bytes_moved == 2 * 2 * 4096 * 128 * 192
    assert eager["attention.assemble"].bytes_moved == 2 * fused["attention.assemble"].bytes_moved


def test_clamps_apart_read_and_write_both_halves_and_join_them() -> None:
    """Two clamps and a copy: Megatron-LM ``weighted_bias_quick_geglu_impl``."""
    apart, fused = (job("gpt-oss-20b", Layout(), kernels, framework="megatron") for kernels in ("", "fused"))
    rows, inner = 4096 * 4, 2880
    found = {op.name: op for op in ops(layer_blocks(apart, 0)[1], "forward")}
    assert found["moe.clamp"].bytes_moved == 8 * 2 * rows * inner
    assert "moe.clamp" not in {op.name for op in ops(layer_blocks(fused, 0)[1], "forward")}
    assert "mlp.clamp" not in {
        op.name for op in ops(layer_blocks(job("llama3-8b", Layout(), "eager"), 0)[1], "forward")
    }
    assert kept_bytes(apart, 0) - kept_bytes(fused, 0) == 2 * 2 * rows * inner


def test_rotations_that_also_scale_are_not_one_kernel_in_megatron() -> None:
    """Half negated, joined, two products, sum, joined: 12 passes; the host is charged as for one kernel."""
    scaled = job("gpt-oss-20b", Layout(), "", framework="megatron")
    plain = replace(scaled, model=replace(scaled.model, scaled_rotary=False))
    apart, fused = (
        {op.name: op for op in ops(layer_blocks(one, 0)[0], "forward")}["attention.rotary"]
        for one in (scaled, plain)
    )
    features = 4096 * (64 + 8) * 64
    assert (apart.bytes_moved, fused.bytes_moved) == (12 * 2 * features, 2 * 2 * features)
    assert (apart.count, apart.n_launches) == (12, fused.n_launches)


def test_turned_halves_move_as_much_as_a_complex_product_in_more_kernels() -> None:
    """Queries and keys: 10 passes in 16 bit, as 2 in 16 and 4 in 32; in backward 16 (transformers)."""
    complex_form = job("llama3-8b", Layout(), "", framework="torchtitan")
    halves = replace(complex_form, conventions=(("rotary", "halves"),))
    features = 4096 * (32 + 8) * 128
    for phase, name, moved in (
        ("forward", "attention.rotary", (20, 20)),
        ("backward", "attention.rotary.backward", (20, 32)),
    ):
        found = [
            next(op for op in ops(layer_blocks(one, 0)[0], phase) if op.name == name)
            for one in (complex_form, halves)
        ]
        assert tuple(op.bytes_moved // features for op in found) == moved
        assert [op.count for op in found] == [6, 10 if phase == "forward" else 16]
    fused = replace(halves, kernels="fused")
    assert layer_blocks(fused, 0) == layer_blocks(replace(fused, conventions=()), 0)


@given(model=MODELS, layout=LAYOUTS)
def test_recomputation_that_stops_early_leaves_out_what_no_backward_needs(model: str, layout: Layout) -> None:
    """The last sum and, where nothing after it keeps its result, the last product; nothing else."""
    plain = job(model, layout, "eager", recompute="full")
    early = replace(plain, conventions=(("stops_early", True),))
    for one, other in zip(blocks(plain), blocks(early), strict=True):
        kept = len(other.phases["recompute"])
        assert other.phases["recompute"] == one.phases["recompute"][:kept]
        left = {op.name.partition(".")[2] for op in ops(one, "recompute")[len(ops(other, "recompute")) :]}
        assert left <= ({"residual", "down"} if one.name == "mlp" else {"residual"})
        assert bool(left) == (one.name in ("mlp", "moe") and not plain.model.dropout)
        assert one.phases["backward"] == other.phases["backward"]


def test_autocast_casts_what_every_product_reads() -> None:
    """Weights once, an input for each product that reads it, gradients of both; 4 bytes and 2 of each."""
    some = job("llama3-8b", Layout(dp=2), "", framework="transformers", sharding="ddp", fp32_gradients=True)
    n_tokens, hidden, inner = 4096, 4096, 14336
    found = {op.name: op for block in layer_blocks(some, 0) for op in ops(block, "forward")}
    back = {op.name: op for block in layer_blocks(some, 0) for op in ops(block, "backward")}
    assert found["mlp.up.weight.cast"].bytes_moved == 6 * 2 * inner * hidden
    assert (
        found["mlp.up.cast"].bytes_moved == back["mlp.up.dgrad.cast"].bytes_moved == 6 * 2 * n_tokens * hidden
    )
    assert "mlp.down.cast" not in found  # silu(gate) * up is in bf16
    assert back["mlp.down.dgrad.cast"].bytes_moved == 6 * n_tokens * hidden
    assert back["mlp.up.dgrad.sum"].bytes_moved == 12 * n_tokens * hidden
    assert found["mlp.residual"].bytes_moved == 10 * n_tokens * hidden  # in bf16 what is added, else fp32
    assert found["attention.norm"].bytes_moved == 28 * n_tokens * hidden
    assert back["mlp.down.wgrad.sum"].bytes_moved == (6 + 16) * inner * hidden  # cast, into a bucket, back


@given(layout=sampled_from((Layout(dp=2), Layout(tp=2, dp=2))), n_microbatches=sampled_from((1, 2, 8)))
def test_autocast_changes_neither_products_nor_what_the_host_launches(
    layout: Layout, n_microbatches: int
) -> None:
    settings = {"global_batch": layout.dp * n_microbatches, "sharding": "ddp", "fp32_gradients": True}
    on = job("llama3-8b", layout, "", framework="transformers", **settings)
    off = replace(on, conventions=(("autocast", False),))
    for one, other in zip(blocks(on), blocks(off), strict=True):
        for phase in ("forward", "backward"):
            mine, plain = ops(one, phase), ops(other, phase)
            assert sum(op.flops for op in mine) == sum(op.flops for op in plain)
            assert sum(op.n_launches for op in mine) == sum(op.n_launches for op in plain)
            assert sum(op.bytes_moved for op in mine) > sum(op.bytes_moved for op in plain)


@pytest.mark.parametrize(
    "settings",
    [{"sharding": "fsdp"}, {"sharding": "zero1"}, {"precision": "fp32"}, {"fp32_gradients": False}],
)
def test_autocast_is_for_whole_parameters_in_fp32(settings: dict[str, Any]) -> None:
    some = {"framework": "transformers", "sharding": "ddp", "fp32_gradients": True, **settings}
    on = job("llama3-8b", Layout(dp=2), "", **some)
    assert blocks(on) == blocks(replace(on, conventions=(("autocast", False),)))


def test_fused_experts_do_between_their_products_what_kernels_did() -> None:
    """With MXFP8, and only with it: activation, clamps, biases and quantisation between products are gone."""
    settings: dict[str, Any] = {"framework": "nemo", "fp8": True, "recipe": "mxfp8"}
    apart = replace(job("gpt-oss-20b", Layout(), ""), cluster=load_cluster("gb200-nvl72", 1), **settings)
    fused = replace(apart, conventions=(("fused_experts", True),))
    names = [[op.name for op in ops(layer_blocks(one, 0)[1], "forward")] for one in (apart, fused)]
    gone = {"moe.activation", "moe.clamp", "moe.bias", "moe.down.quantise"}
    assert set(names[0]) - set(names[1]) == gone
    back = [{op.name for op in ops(layer_blocks(one, 0)[1], "backward")} for one in (apart, fused)]
    assert "moe.up.dgrad.quantise" in back[0] - back[1]
    plain = replace(fused, fp8=False, recipe="")
    assert layer_blocks(plain, 0) == layer_blocks(replace(plain, conventions=()), 0)


@pytest.mark.parametrize(
    "names", ["gated activation, joined activation", "rotary, half_rotary, scaled_rotary"]
)
def test_a_fused_kernel_does_not_mind_how_its_halves_lie(names: str) -> None:
    assert len({FUSED[name] for name in names.split(", ")}) == 1
