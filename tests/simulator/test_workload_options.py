"""What options change of a micro-batch: modules computed again, more predicted tokens, shared experts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from tests.simulator.made_jobs import cluster, job, two_layers
from tests.simulator.predicted import simulate

from foretrace.simulator.errors import JobError
from foretrace.simulator.models.sources import load_model
from foretrace.simulator.workload.micro_batch import (
    Comm,
    Op,
    head_block,
    head_blocks,
    layer_blocks,
)
from foretrace.traces.layout import Layout


def test_torchtitan_computes_every_other_product_again() -> None:
    """Of a Llama layer: key (8 of 48 heads of the fused product), output and up; never attention or down."""
    some = job(framework="torchtitan", recompute="selective", kernels="fused")
    blocks = layer_blocks(some, 0)
    again = {op.name: op for block in blocks for op in block.phases["recompute"] if isinstance(op, Op)}
    whole = {op.name: op for block in blocks for op in block.phases["forward"] if isinstance(op, Op)}
    assert again["attention.qkv"].flops * 6 == whole["attention.qkv"].flops
    assert again["attention.qkv"].n == 8 * 128
    assert again["mlp.up"].flops * 2 == whole["mlp.up"].flops
    assert again["attention.proj"] == whole["attention.proj"]
    assert not {"mlp.down", "attention.core"} & set(again)
    assert {"mlp.norm", "mlp.activation", "attention.rotary"} <= set(again)


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(pp=4), Layout(dp=8, ep=8)])
def test_multi_token_prediction_is_a_layer_a_matrix_and_another_pass_of_the_head(layout: Layout) -> None:
    """Its products, and its parameters on this rank; the last stage of a pipeline holds the embedding too."""
    model = replace(load_model("deepseek-v3"), n_layers=8)
    with_it, without = (job(replace(model, n_mtp=n), layout) for n in (1, 0))
    more = [block for block in head_blocks(with_it) if block not in head_blocks(without)]
    join, *layer, head = head_blocks(with_it)[1:]
    assert len(more) == len(head_blocks(with_it)) - 1
    plain = layer_blocks(without, 7)
    assert [block.phases for block in layer] == [block.phases for block in plain]
    assert head.phases == head_block(without).phases
    tp, ep = layout.tp, layout.ep
    embedding = 129280 * 7168 // tp if layout.pp > 1 else 0
    wanted = 2 * 7168 * 7168 // tp + 3 * 7168 + model.layer_params(7, tp, ep) + embedding
    assert sum(block.params for block in more) == wanted
    products = [op for op in join.phases["forward"] if isinstance(op, Op) and op.kind == "gemm"]
    assert [(op.k, op.n) for op in products] == [(2 * 7168, 7168 // tp)]


@pytest.mark.parametrize("model", ["deepseek-v3", "qwen3-30b-a3b", "llama3-8b"])
def test_modules_that_are_computed_again_are_those_that_were_asked_for(model: str) -> None:
    """What each module does again, by names; all of them together are the forward without sums and gates."""
    cut = two_layers(model)

    def again(modules: str, layer: int = 1) -> set[str]:
        some = job(cut, recompute="selective", recompute_modules=modules)
        found = [op for block in layer_blocks(some, layer) for op in block.phases["recompute"]]
        return {op.name for op in found if isinstance(op, Op)}

    kind = "moe" if cut.n_experts else "mlp"
    assert again("core_attn") == {"attention.core"}
    assert again("layernorm") == {"attention.norm", f"{kind}.norm"}
    assert again("moe_act") == ({"moe.activation"} if cut.n_experts else set())
    up = {"attention.q_up", "attention.kv_up", "attention.assemble"} if cut.kv_lora_rank else set()
    assert again("mla_up_proj") == up
    shared = (
        {f"moe.shared.{part}" for part in ("up", "activation", "down")} if cut.n_shared_experts else set()
    )
    assert again("shared_experts") == shared
    whole = again("moe") if cut.n_experts else again("mlp")
    assert {f"{kind}.up", f"{kind}.activation", f"{kind}.down"} <= whole
    assert not whole & again("layernorm")
    assert again("layernorm,core_attn") == again("layernorm") | again("core_attn")


def test_recomputed_modules_need_selective_and_names_that_are_known() -> None:
    with pytest.raises(JobError, match="needs recompute=selective"):
        job(recompute="full", recompute_modules="moe")
    with pytest.raises(JobError, match="recompute_modules=gate: any of core_attn"):
        job(recompute="selective", recompute_modules="moe,gate")


def test_shared_experts_run_beside_the_exchange_and_do_the_same_work() -> None:
    """The same items in another order: an exchange, then as many operations as may run beside it."""
    model, layout = replace(load_model("deepseek-v3"), n_layers=4), Layout(dp=8, ep=8)
    plain, beside = (
        job(model, layout, conventions=(("overlap_shared_experts", on),)) for on in (False, True)
    )
    for phase in ("forward", "backward", "backward_input", "backward_weight"):
        one, other = (list(layer_blocks(some, 3)[1].phases[phase]) for some in (plain, beside))
        bare = [
            [replace(item, overlap_ops=0) if isinstance(item, Comm) else item for item in x]
            for x in (one, other)
        ]
        assert Counter(bare[0]) == Counter(bare[1])
        shared = [item for item in one if isinstance(item, Op) and item.name.startswith("moe.shared")]
        if phase != "backward_weight":
            at = next(i for i, item in enumerate(other) if isinstance(item, Comm))
            first = other[at]
            assert isinstance(first, Comm)
            assert other[at + 1 : at + 1 + first.overlap_ops] == shared != []
    faster, slower = (simulate(some).summary["step_time_s"] for some in (beside, plain))
    assert faster < slower
    alone = replace(plain, layout=Layout(), cluster=cluster("dgx-h100", 1), global_batch=1)
    told = replace(alone, conventions=(("overlap_shared_experts", True),))
    assert layer_blocks(told, 3)[1].phases == layer_blocks(alone, 3)[1].phases
