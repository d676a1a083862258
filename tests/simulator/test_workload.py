"""What a micro-batch does, held to closed forms: FLOPs, bytes, communication volumes, parameters."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis.strategies import booleans, builds, integers, sampled_from
from tests.simulator.made_jobs import cluster, job, two_layers

from foretrace.simulator.job import Job
from foretrace.simulator.models.sources import load_model
from foretrace.simulator.workload.micro_batch import (
    Block,
    Comm,
    Op,
    embedding_block,
    head_block,
    head_blocks,
    layer_blocks,
    optimizer_ops,
)
from foretrace.simulator.workload.ops import PHASES
from foretrace.topologies.errors import CatalogError
from foretrace.traces.layout import Layout

MODELS = (
    *("llama3-8b", "gpt3-175b", "mixtral-8x7b", "deepseek-v3", "qwen3-30b-a3b", "gemma2-9b"),
    *("command-r-35b", "bloom-176b", "nemotron4-15b"),
)


def all_blocks(some: Job) -> list[Block]:
    layers = [block for layer in range(some.model.n_layers) for block in layer_blocks(some, layer)]
    return [embedding_block(some), *layers, *head_blocks(some)]


def flops(blocks: list[Block], *phases: str, kind: str = "") -> int:
    ops = [op for block in blocks for phase in phases for op in block.phases[phase] if isinstance(op, Op)]
    return sum(op.flops for op in ops if not kind or op.kind.startswith(kind))


def comms(blocks: list[Block], phase: str, axis: str) -> list[Comm]:
    return [c for block in blocks for c in block.phases[phase] if isinstance(c, Comm) and c.axis == axis]


jobs = builds(
    lambda name, tp, cp, ep, sp, recompute, flash, precision, mbs: job(
        two_layers(name),
        Layout(tp=tp, cp=cp, dp=4, ep=ep if "x" in name or "a3b" in name or "deep" in name else 1),
        sequence_parallel=sp,
        recompute=recompute,
        flash_attention=flash,
        precision=precision,
        micro_batch=mbs,
        seq_len=512,
    ),
    sampled_from(MODELS),
    sampled_from([1, 2, 4]),
    sampled_from([1, 2]),
    sampled_from([1, 2, 4]),
    booleans(),
    sampled_from(["none", "selective", "full"]),
    booleans(),
    sampled_from(["bf16", "fp32"]),
    integers(1, 3),
)


@given(some=jobs)
def test_ranks_together_do_the_flops_of_the_model(some: Job) -> None:
    """Matrix products, forward and backward, over tp and cp ranks, are 6 N + attention for every token.

    Compressions of latent attention and routers without sequence parallelism are done by every tp rank, so
    more is done there and never less. A fused kernel computes the causal half, and its scores twice.
    """
    blocks, layout = all_blocks(some), some.layout
    ranks, tokens = layout.tp * layout.cp, some.micro_batch * some.seq_len
    done = flops(blocks, "forward", "backward") * ranks
    core = flops(blocks, "forward", kind="attention") * ranks
    wanted = some.model.flops_per_token(some.seq_len, causal=some.flash_attention) * tokens
    wanted += core * some.model.head_dim // (some.model.head_dim + some.model.value_head_dim)
    if some.model.n_experts and layout.tp > 1 and not some.sequence_parallel:
        assert wanted < done < 1.4 * wanted
    else:
        assert done == wanted


def test_gpt3_with_full_recomputation_is_megatrons_equation_3() -> None:
    """96 B s L h^2 (1 + s/6h + V/16Lh), arXiv:2104.04473 eq. 3: attention over the whole matrix."""
    some = job("gpt3-175b", recompute="full", flash_attention=False, seq_len=2048, micro_batch=2)
    s, n_layers, h, vocab = 2048, 96, 12288, 51200
    done = flops(all_blocks(some), "forward", "recompute", "backward")
    assert done == 2 * s * (96 * n_layers * h**2 + 16 * n_layers * h * s + 6 * vocab * h)


@given(some=jobs)
def test_backward_is_input_and_weight_gradients_together(some: Job) -> None:
    for block in all_blocks(some):
        halves = (*block.phases["backward_input"], *block.phases["backward_weight"])
        assert _counted(block.phases["backward"]) == _counted(halves)


def _counted(phase: tuple[Op | Comm, ...]) -> Counter[Op | Comm]:
    return Counter(replace(item, overlap_ops=0) if isinstance(item, Comm) else item for item in phase)


@given(some=jobs)
def test_recomputation_repeats_the_forward_or_its_attention_core(some: Job) -> None:
    for block in layer_blocks(some, 1):
        forward, again = block.phases["forward"], block.phases["recompute"]
        if some.recompute == "full":
            assert again == forward
        elif some.recompute == "selective" and block.name == "attention":
            core = {"attention.core", "attention.scores", "attention.softmax", "attention.context"}
            assert [op.name for op in again if isinstance(op, Op)] == [
                op.name for op in forward if isinstance(op, Op) and op.name in core
            ]
        else:
            assert again == ()


@given(some=jobs)
def test_operations_are_well_formed(some: Job) -> None:
    for block in all_blocks(some):
        assert set(block.phases) == set(PHASES)
        for phase in block.phases.values():
            for i, item in enumerate(phase):
                if isinstance(item, Comm):
                    following = [op for op in phase[i + 1 :] if isinstance(op, Op)]
                    assert getattr(some.layout, item.axis) > 1
                    assert item.size_bytes > 0
                    assert 0 <= item.overlap_ops <= len(following)
                else:
                    assert item.bytes_moved > 0
                    assert item.count >= 1
                    assert (item.flops > 0) == (item.kind != "memory")
                    assert item.name.split(".")[0] == block.name


@given(some=jobs)
def test_double_width_moves_double_bytes(some: Job) -> None:
    """In fp32 every operand and message of a forward is twice that of bf16."""
    narrow = replace(some, precision="bf16", fp32_gradients=False)
    wide = replace(some, precision="fp32", fp32_gradients=False)
    fixed = {"moe.gate", "moe.gate.backward", "attention.softmax"}  # fp32 scores; one byte of dropout mask
    for a, b in zip(layer_blocks(narrow, 1), layer_blocks(wide, 1), strict=True):
        for x, y in zip(a.phases["forward"], b.phases["forward"], strict=True):
            if isinstance(x, Comm) and isinstance(y, Comm):
                assert y.size_bytes == 2 * x.size_bytes
            elif isinstance(x, Op) and isinstance(y, Op) and x.name not in fixed and not some.model.dropout:
                assert y.bytes_moved == 2 * x.bytes_moved


def test_bytes_of_a_llama_layer() -> None:
    """Element-wise operations of Llama 3 8B in bf16, per token, by hand."""
    some = job("llama3-8b", micro_batch=2)
    moved = {
        op.name: op.bytes_moved / (2 * 4096) / 2
        for block in layer_blocks(some, 0)
        for phase in ("forward", "backward")
        for op in block.phases[phase]
        if isinstance(op, Op) and op.kind != "gemm"
    }
    rotated, heads = (32 + 8) * 128, (2 * 32 + 2 * 8) * 128
    assert moved == {
        "attention.norm": 2 * 4096,  # read, write
        "attention.rotary": 2 * rotated,
        "attention.core": heads,  # q, k, v, output
        "attention.residual": 3 * 4096,
        "attention.core.backward": 2 * heads,
        "attention.rotary.backward": 2 * rotated,
        "attention.norm.backward": 3 * 4096,
        "attention.residual.backward": 3 * 4096,
        "mlp.norm": 2 * 4096,
        "mlp.activation": 3 * 14336,  # gate, up; product
        "mlp.residual": 3 * 4096,
        "mlp.activation.backward": 5 * 14336,  # gate, up, gradient; two gradients
        "mlp.norm.backward": 3 * 4096,
        "mlp.residual.backward": 3 * 4096,
    }


def test_bytes_of_matrix_products() -> None:
    """Operands once; the sum of weight gradients is read and written in fp32."""
    up, down = 2 * 14336, 4096
    some = job("llama3-8b", micro_batch=2)
    mlp = layer_blocks(some, 0)[1]
    moved = {op.name: op.bytes_moved for op in mlp.phases["backward"] if isinstance(op, Op)}
    assert moved["mlp.up.dgrad"] == 2 * (8192 * up + up * down + 8192 * down)
    assert moved["mlp.up.wgrad"] == 2 * 8192 * (up + down) + 8 * up * down


@pytest.mark.parametrize("name", MODELS)
def test_blocks_hold_every_parameter_once(name: str) -> None:
    some = job(two_layers(name))
    blocks = all_blocks(some)
    assert sum(block.params for block in blocks) == some.model.n_params
    assert sum(block.expert_params for block in blocks) == sum(
        some.model.expert_params(layer) for layer in range(2)
    )


def test_a_tied_head_on_another_stage_is_a_copy() -> None:
    model = load_model("gpt3-175b")
    alone, piped = job(model), job(model, Layout(pp=2))
    assert head_block(piped).params - head_block(alone).params == model.vocab * model.hidden


@given(some=jobs)
def test_sequence_parallelism_splits_every_all_reduce_in_two(some: Job) -> None:
    """Gather and scatter of a forward carry the volume of the all-reduces that they replace.

    Reference: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.
    """
    if some.layout.tp == 1 or some.model.kv_lora_rank:
        return
    split = [*layer_blocks(replace(some, sequence_parallel=True), 1)]
    whole = [*layer_blocks(replace(some, sequence_parallel=False), 1)]
    volume = Counter[str]()
    for c in comms(split, "forward", "tp"):
        volume[c.kind] += c.size_bytes
    assert volume["all_gather"] == volume["reduce_scatter"]
    assert volume["all_reduce"] == 0
    assert sum(c.size_bytes for c in comms(whole, "forward", "tp")) == volume["all_gather"]


def test_tensor_parallel_traffic_of_a_dense_layer() -> None:
    """With SP two gathers and two scatters forward; backward gathers the kept shards again."""
    some = job("llama3-70b", Layout(tp=8), micro_batch=2)
    blocks = [*layer_blocks(some, 0)]
    size_bytes = 2 * 4096 * 8192 * 2
    forward = [(c.kind, c.size_bytes) for c in comms(blocks, "forward", "tp")]
    assert forward == [("all_gather", size_bytes), ("reduce_scatter", size_bytes)] * 2
    backward = Counter(c.kind for c in comms(blocks, "backward", "tp"))
    assert backward == {"all_gather": 4, "reduce_scatter": 2}
    hidden = [c for c in comms(blocks, "backward", "tp") if c.overlap_ops]
    assert [c.kind for c in hidden] == ["all_gather", "reduce_scatter"] * 2


def test_without_sequence_parallelism_gradients_are_reduced_beside_a_gemm() -> None:
    some = job("llama3-70b", Layout(tp=8), sequence_parallel=False)
    blocks = [*layer_blocks(some, 0)]
    assert [c.kind for c in comms(blocks, "forward", "tp")] == ["all_reduce"] * 2
    assert [(c.kind, c.overlap_ops) for c in comms(blocks, "backward", "tp")] == [("all_reduce", 1)] * 2


def test_context_parallel_gathers_keys_and_values() -> None:
    some = job("llama3-70b", Layout(tp=8, cp=4))
    blocks = [*layer_blocks(some, 0)]
    size_bytes = 4096 * 2 * 1 * 128 * 2  # one of 8 key/value heads per rank
    assert [(c.kind, c.size_bytes) for c in comms(blocks, "forward", "cp")] == [("all_gather", size_bytes)]
    backward = [(c.kind, c.size_bytes) for c in comms(blocks, "backward", "cp")]
    assert backward == [("all_gather", size_bytes), ("reduce_scatter", size_bytes)]


def test_experts_receive_every_token_top_k_times() -> None:
    some = job("mixtral-8x7b", Layout(dp=8, ep=8))
    moe = [layer_blocks(some, 0)[1]]
    size_bytes = 4096 * 2 * 4096 * 2  # tokens, top-k, hidden, bf16
    for phase in ("forward", "backward"):
        assert [(c.kind, c.size_bytes) for c in comms(moe, phase, "ep")] == [("all_to_all", size_bytes)] * 2


@given(ep=sampled_from([1, 2, 4, 8]), tp=sampled_from([1, 2]))
def test_expert_parallelism_keeps_flops_and_splits_weights(ep: int, tp: int) -> None:
    """Each rank computes as many tokens, on fewer experts."""
    one = layer_blocks(job("mixtral-8x7b", Layout(dp=8, tp=tp)), 0)[1]
    some = layer_blocks(job("mixtral-8x7b", Layout(dp=8, tp=tp, ep=ep)), 0)[1]
    assert flops([some], "forward") == flops([one], "forward")
    assert some.expert_params * ep == one.expert_params
    grouped = next(op for op in some.phases["forward"] if isinstance(op, Op) and op.name == "moe.up")
    assert grouped.m == 4096 * 2 * ep // 8
    assert grouped.flops == 2 * grouped.m * grouped.n * grouped.k * (8 // ep)


def test_the_head_has_fp32_logits_and_small_reductions() -> None:
    some = job("llama3-8b", Layout(tp=4))
    head = head_block(some)
    loss = next(op for op in head.phases["forward"] if isinstance(op, Op) and op.name == "head.loss")
    assert loss.bytes_moved == 4096 * 128256 // 4 * (2 + 4 + 12)
    assert [c.size_bytes for c in comms([head], "forward", "tp") if c.kind == "all_reduce"] == [4096 * 4] * 3


def test_the_embedding_has_no_input_gradient() -> None:
    assert embedding_block(job(layout=Layout(tp=2))).phases["backward_input"] == ()


@pytest.mark.parametrize(
    ("precision", "fp32_gradients", "bytes_per_param"),
    [("bf16", True, 12 + 4 + 24 + 2), ("bf16", False, 6 + 2 + 24 + 2), ("fp32", True, 12 + 4 + 24)],
)
def test_adam_moves_a_known_number_of_bytes(
    precision: str, fp32_gradients: bool, bytes_per_param: int
) -> None:
    """Clip: three passes over gradients. Adam: gradient read, weight and moments read and written."""
    some = job(precision=precision, fp32_gradients=fp32_gradients)
    assert sum(op.bytes_moved for op in optimizer_ops(some, 1000)) == 1000 * bytes_per_param


def test_a_window_computes_what_it_lets_through() -> None:
    """Of 8,192 keys a query sees 1,024 at most: 1024 (2 - 1/8) / 2 of a row on average. Half the layers."""
    model = replace(two_layers("gemma2-9b"), window=1024)
    cores = [
        flops([layer_blocks(job(model, seq_len=8192), n)[0]], "forward", kind="attention") for n in (0, 1)
    ]
    assert cores[0] == cores[1] * 2 * 1024 * (2 * 8192 - 1024) // (2 * 8192) // 8192


def test_an_encoder_computes_the_whole_matrix() -> None:
    model = load_model("bert-large")
    one = job(model, seq_len=512)
    core = flops([layer_blocks(one, 0)[0]], "forward", kind="attention")
    assert core == 2 * 2 * 16 * 512 * 512 * 64
    decoder = flops(
        [layer_blocks(job(replace(model, causal=True), seq_len=512), 0)[0]], "forward", kind="attention"
    )
    assert core == 2 * decoder


def test_parallel_blocks_share_a_norm_and_a_residual() -> None:
    names = [
        [op.name for op in block.phases["forward"] if isinstance(op, Op)]
        for block in layer_blocks(job("command-r-35b"), 0)
    ]
    assert not {"attention.norm", "attention.residual"} & set(names[0])
    assert {"mlp.norm", "mlp.residual"} <= set(names[1])


def test_fp8_products_are_quantised_and_the_head_stays_in_16_bit() -> None:
    """Two bytes read and two written per element of an input; the same of the gradient of an output."""
    plain, eight = ([*layer_blocks(job(fp8=fp8), 0), head_block(job(fp8=fp8))] for fp8 in (False, True))
    assert flops(plain, "forward", "backward") == flops(eight, "forward", "backward")
    phases = [op for block in eight for phase in ("forward", "backward") for op in block.phases[phase]]
    ops = {op.name: op for op in phases if isinstance(op, Op)}
    assert ops["mlp.up"].dtype == ops["mlp.up.dgrad"].dtype == ops["mlp.up.wgrad"].dtype == "fp8"
    assert ops["head.logits"].dtype == ops["attention.core"].dtype == "bf16"
    assert ops["mlp.up.quantise"].bytes_moved == 4 * 4096 * 4096
    assert ops["mlp.up.dgrad.quantise"].bytes_moved == 4 * 4096 * 2 * 14336


def test_experts_are_quantised_too_and_a_device_without_8_bits_is_refused() -> None:
    block = layer_blocks(job("mixtral-8x7b", fp8=True), 0)[1]
    ops = {op.name: op for op in block.phases["forward"] if isinstance(op, Op)}
    assert (ops["moe.up"].dtype, ops["moe.router"].dtype) == ("fp8", "bf16")
    assert ops["moe.up.quantise"].bytes_moved == 4 * 2 * 4096 * 4096
    with pytest.raises(CatalogError, match="fp8"):
        replace(job(), cluster=cluster("dgx-a100", 1), fp8=True)
