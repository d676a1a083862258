"""Low-precision recipes: what is quantised, in how many bytes, and where."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis.strategies import integers, sampled_from
from tests.simulator.predicted import simulate

from foretrace.simulator.compute.timing import ComputeModel
from foretrace.simulator.config import job_from
from foretrace.simulator.errors import JobError
from foretrace.simulator.framework import framework_names, load_framework
from foretrace.simulator.job import Job
from foretrace.simulator.models.sources import load_model
from foretrace.simulator.workload.micro_batch import layer_blocks
from foretrace.simulator.workload.ops import Op, gemm, operand_bytes
from foretrace.simulator.workload.recipes import MEMBER_LAUNCH, RECIPES, layouts, quantised, recipe_of
from foretrace.topologies.catalog import load_cluster, load_device
from foretrace.topologies.errors import CatalogError
from foretrace.traces.layout import Layout


def job(recipe: str, **settings: object) -> Job:
    found = {"model": load_model("llama3-8b"), "cluster": load_cluster("gb200-nvl72", 1), "seq_len": 8192}
    return Job(**{**found, "layout": Layout(), "global_batch": 1, "fp8": True, "recipe": recipe, **settings})  # type: ignore[arg-type]


def ops(some: Job, phase: str) -> dict[str, Op]:
    return {
        op.name: op for block in layer_blocks(some, 0) for op in block.phases[phase] if isinstance(op, Op)
    }


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_every_product_of_a_layer_runs_in_the_bits_of_its_recipe(recipe: str) -> None:
    one = RECIPES[recipe]
    forward, backward = ops(job(recipe), "forward"), ops(job(recipe), "backward")
    products = [op for op in (*forward.values(), *backward.values()) if op.kind == "gemm"]
    assert {op.dtype for op in products} == {one.dtype}
    both = one.weights_each or layouts(one, job(recipe).cluster.device) == 2
    moved = one.moved if both else one.moved - 1
    assert forward["mlp.down.quantise"].bytes_moved == round(8192 * 14336 * moved)
    assert backward["mlp.down.dgrad.quantise"].bytes_moved == round(8192 * 4096 * moved)
    assert ("mlp.down.weight.quantise" in forward) == one.weights_each


@given(name=sampled_from(sorted(RECIPES)))
def test_fewer_bits_never_take_longer_in_products_alone(name: str) -> None:
    device = load_device("gb200")
    plain, few = (gemm("product", 8192, 8192, 8192, dtype) for dtype in ("bf16", RECIPES[name].dtype))
    compute = ComputeModel(device, "bf16")
    assert few.bytes_moved < plain.bytes_moved
    assert compute.op_s(few) < compute.op_s(plain)


@given(n=integers(1, 10**6), recipe=sampled_from(sorted(RECIPES)))
def test_a_quantised_operand_is_smaller_than_what_it_came_from(n: int, recipe: str) -> None:
    few = operand_bytes(16 * n, RECIPES[recipe].dtype)
    assert few < operand_bytes(16 * n, "bf16")
    assert 2 * 16 * n + 2 * few <= 16 * n * RECIPES[recipe].moved * 1.01


def test_four_bits_carry_a_scale_of_eight_for_sixteen() -> None:
    assert operand_bytes(16, "fp4") == 9


def test_frameworks_and_tables_name_recipes() -> None:
    assert {load_framework(name).fp8_recipe for name in framework_names()} <= set(RECIPES)
    assert [recipe_of(text) for text in ("fp8", "fp8-tensorwise", "NVFP4")] == ["", "tensorwise", "nvfp4"]


def test_scales_per_32_values_are_refused_where_tensor_cores_take_none() -> None:
    with pytest.raises(JobError, match=r"h100-sxm take no scales per 32 values.*blockwise would work"):
        job("mxfp8", cluster=load_cluster("dgx-h100", 1))


def test_a_recipe_needs_fp8_a_device_and_a_name() -> None:
    with pytest.raises(JobError, match="needs fp8"):
        job("mxfp8", fp8=False)
    with pytest.raises(JobError, match="recipe='fp3': one of delayed, "):
        job("fp3")
    with pytest.raises(CatalogError, match="no peak for 'fp4'"):
        job("nvfp4", cluster=load_cluster("dgx-h100", 1))
    assert replace(job(""), framework="torchtitan").profile.fp8_recipe == "tensorwise"


FIVE_BILLION = replace(
    load_model("llama3-8b"),
    hidden=4096,
    n_heads=32,
    n_kv_heads=32,
    ffn_hidden=16384,
    gated=False,
    n_layers=24,
)


@pytest.mark.parametrize(
    ("machine", "recipe", "times"),
    [
        ("dgx-b300", "current", 13.102 / 6.812),
        ("dgx-b300", "mxfp8", 13.102 / 7.161),
        ("dgx-b300", "nvfp4", 13.102 / 3.764),
        ("dgx-h200", "current", 31.968 / 16.785),
    ],
)
def test_products_of_a_layer_are_so_many_times_as_fast_as_in_16_bit(
    machine: str, recipe: str, times: float
) -> None:
    """Raw products of 15,872 tokens, NVIDIA/TransformerEngine docs/examples/gemm_profiling; within 12 %."""
    plain = job("", fp8=False, model=FIVE_BILLION, cluster=load_cluster(machine, 1), seq_len=15872)
    device = replace(
        plain.cluster.device, sustained_clock_fraction=1.0, gemm_split_share=1.0
    )  # bursts, forward
    compute = ComputeModel(device, "bf16")
    few = replace(plain, fp8=True, recipe=recipe, cluster=replace(plain.cluster, device=device))

    def seconds(some: Job) -> float:
        found = [op for phase in ("forward", "backward") for op in ops(some, phase).values()]
        return sum(compute.op_s(op) for op in found if op.kind == "gemm")

    assert seconds(plain) / seconds(few) == pytest.approx(times, rel=0.12)


def test_gradients_in_8_bits_are_split_on_hopper_alone() -> None:
    rates = {
        machine: {
            phase: {
                op.rate
                for op in ops(job("delayed", cluster=load_cluster(machine, 1)), phase).values()
                if op.kind == "gemm"
            }
            for phase in ("forward", "backward")
        }
        for machine in ("dgx-h100", "dgx-b200")
    }
    assert rates["dgx-h100"] == {"forward": {1.0}, "backward": {0.87}}
    assert rates["dgx-b200"] == {"forward": {1.0}, "backward": {1.0}}


def test_results_of_rowwise_gradient_products_are_scaled_after_them() -> None:
    """A pass over every one of them: input gradient of 8,192 tokens, weight gradient of the matrix."""
    few, plain = (ops(job(recipe), "backward") for recipe in ("rowwise", "tensorwise"))
    assert few["mlp.down.dgrad.rescale"].bytes_moved == 4 * 8192 * 14336
    assert few["mlp.down.wgrad.rescale"].bytes_moved == 4 * 4096 * 14336
    products = {name for name, op in few.items() if op.kind == "gemm"}
    assert {name for name in few if name.endswith("rescale")} == {f"{name}.rescale" for name in products}
    assert not any("rescale" in name for name in plain)
    assert not any("rescale" in name for name in ops(job("rowwise"), "forward"))


@pytest.mark.parametrize(("recipe", "times"), [("rowwise", 6418 / 5760), ("tensorwise", 7186 / 5760)])
def test_a_step_in_8_bits_is_so_many_times_as_fast_as_published(recipe: str, times: float) -> None:
    """Tokens per second of Llama 3 8B on 8 H100, pytorch/torchtitan commit 7a04053; nothing was fitted."""
    settings = {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 8, "global_batch": 8, "seq_len": 8192}
    settings |= {"sharding": "fsdp", "recompute": "selective", "framework": "torchtitan", "kernels": "fused"}
    plain, few = (
        simulate(job_from({**settings, **more})).summary["step_time_s"]
        for more in ({}, {"fp8": True, "recipe": recipe})
    )
    assert plain / few == pytest.approx(times, rel=0.04)


@given(name=sampled_from(sorted(RECIPES)), device=sampled_from(["h100-sxm", "gb200"]))
def test_blackwell_keeps_one_layout_where_one_scale_holds_for_all(name: str, device: str) -> None:
    """Transformer Engine: 8-bit products of Blackwell take an operand by rows or by columns."""
    one = RECIPES[name]
    assert layouts(one, load_device(device)) == (1 if device == "gb200" and not one.in_blocks else 2)


@given(name=sampled_from(sorted(RECIPES)), members=integers(1, 64))
def test_members_are_quantised_one_by_one_but_for_delayed_scales(name: str, members: int) -> None:
    one = RECIPES[name]
    (alone,), (group,) = (quantised("x", 2**20, one, load_device("gb200"), n) for n in (1, members))
    assert group.bytes_moved == alone.bytes_moved
    assert group.n_launches == alone.n_launches
    (seen,) = quantised("x", 2**20, one, load_device("gb200"), members, each=True)
    of_members = 0 if one.in_blocks else MEMBER_LAUNCH * members
    assert seen.n_launches == alone.n_launches + of_members
    assert group.count == alone.count * (1 if name == "delayed" else members)
