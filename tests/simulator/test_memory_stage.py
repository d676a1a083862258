"""Memory of a stage: states, its fullest moment, published measurements, and laws over all ways to shard."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis.strategies import integers, sampled_from
from tests.simulator.made_jobs import cluster, cut, fixed_bytes, memory_of
from tests.simulator.made_jobs import short_job as job
from tests.simulator.made_jobs import short_jobs as jobs

from foretrace.simulator.job import RECOMPUTE_MODULES, Job
from foretrace.simulator.memory.activations import kept_bytes, logits_bytes, working_bytes
from foretrace.simulator.memory.stage import AT_HEAD, AT_LAYER, IN_LOSS, stage_memory, state_bytes
from foretrace.simulator.models.sources import load_model
from foretrace.simulator.sharding import SHARDINGS
from foretrace.simulator.workload.micro_batch import head_blocks
from foretrace.traces.layout import Layout


@pytest.mark.parametrize(
    ("vocab", "seq_len", "recompute", "when"),
    [
        (1000, 8192, "none", AT_LAYER),
        (2_000_000, 8192, "none", IN_LOSS),
        (128256, 512, "none", AT_HEAD),
        (32000, 8192, "full", AT_LAYER),
    ],
)
def test_a_stage_peaks_where_it_holds_its_most(vocab: int, seq_len: int, recompute: str, when: str) -> None:
    """Many logits; a large head, few tokens, and what stands for its gradient; or a layer."""
    some = job(replace(cut("llama3-8b", 2), vocab=vocab), seq_len=seq_len, recompute=recompute)
    memory = memory_of(some)
    assert memory.when == when
    assert (memory.items["logits"] == 0) == (when == AT_LAYER)


@given(some=jobs, in_flight=integers(1, 4))
def test_what_stages_hold_at_once_is_less_than_all_they_ever_hold(some: Job, in_flight: int) -> None:
    """Gradients of a layer's activations and logits are never there together: a stage needs the larger."""
    memory = memory_of(some, in_flight)
    loss, layer = logits_bytes(some, in_flight), working_bytes(some, 3)
    kept = in_flight * memory.activation_bytes_per_microbatch
    held = memory.peak_bytes - fixed_bytes(memory)
    assert held >= kept + max(loss, layer + logits_bytes(some, in_flight - 1, working=False))


def test_in_the_backward_of_the_head_logits_of_one_micro_batch_have_their_gradient() -> None:
    """Both in 16 bit; of those that wait, what is kept."""
    some = job(replace(cut("llama3-8b", 2), vocab=128256), seq_len=512)
    for in_flight in (1, 2):
        memory = memory_of(some, in_flight)
        waiting = logits_bytes(some, in_flight - 1, working=False)
        assert memory.when == AT_HEAD
        assert memory.items["logits"] == waiting + 2 * 2 * 512 * 128256


def test_stages_of_a_pipeline_hold_a_message_each_way() -> None:
    """As large as the input of a layer; there is none where there is one stage."""
    alone, staged = job(cut("llama3-8b", 2)), job(cut("llama3-8b", 4), Layout(pp=2))
    one, two = (
        stage_memory(some, range(2), 0, 1, first=True, last=False).items["buffers"]
        for some in (alone, staged)
    )
    assert two - one == 2 * 2048 * 4096 * 2


@pytest.mark.parametrize("dropout", [False, True])
def test_the_ends_of_a_model_keep_a_mask_and_inputs_of_norm_and_head(dropout: bool) -> None:
    """A byte for each element behind the embedding where some are dropped; two states at the other end."""
    some = job(replace(cut("llama3-8b", 6), dropout=dropout), Layout(pp=3))
    ends = ((True, False), (False, False), (False, True))
    first, middle, last = (
        stage_memory(some, range(2), 0, 1, first=first, last=last).activation_bytes_per_microbatch
        for first, last in ends
    )
    assert (first - middle, last - middle) == (2048 * 4096 * dropout, 2 * 2048 * 4096 * 2)


def test_products_that_add_in_place_leave_a_tensor_per_shape_and_one_of_the_head() -> None:
    """Query-key-value, projection, up and down of Llama 3 8B, once each however many layers; and the head."""
    some = job(replace(cut("llama3-8b", 4), vocab=1_000_000), seq_len=512)
    apart = replace(some, conventions=(("wgrad_placeholders", False),))
    layer = 2 * (4096 * 6144 + 4096 * 4096 + 4096 * 28672 + 14336 * 4096)
    more = memory_of(some).items["buffers"] - memory_of(apart).items["buffers"]
    assert memory_of(some).when == AT_HEAD
    assert more == layer + 2 * 1_000_000 * 4096 + 512 * 2 * 4096  # apart, its peak is in the loss
    narrow = memory_of(replace(some, fp32_gradients=False))  # products add to sums in 16 bit just the same
    assert narrow.items["buffers"] == memory_of(some).items["buffers"]
    for other in ({"sharding": "fsdp"}, {"lora_rank": 8}):
        one, two = (memory_of(replace(job_, **other)) for job_ in (some, apart))
        assert one.items == two.items


def test_a_step_in_16_bit_first_makes_a_copy_of_its_gradients_in_32() -> None:
    """DeepSpeed flattens the rank's share (2) and casts it (4): 6 bytes for each parameter it updates."""
    model = cut("gpt3-175b", 2)
    some = job(model, Layout(dp=4), framework="megatron-deepspeed", precision="fp16", fp32_gradients=False)
    without = replace(some, conventions=(("step_copy_bytes", 0),))
    assert memory_of(some).peak_bytes - memory_of(without).peak_bytes == 6 * -(-model.n_params // 4)
    flat = replace(some, conventions=(("flat_bucket_bytes", 0),))
    assert memory_of(some).peak_bytes - memory_of(flat).peak_bytes == 10**9


def test_adam_in_mixed_precision_keeps_14_14_84_gigabytes_of_7_billion() -> None:
    """2 + 2 + 12 bytes per parameter, arXiv:1910.02054 section 3.1."""
    some = job(load_model("llama2-7b"), sharding="ddp", fp32_gradients=False)
    assert state_bytes(some, 7 * 10**9, 1) == (14e9, 14e9, 84e9)


@pytest.mark.parametrize(
    ("sharding", "per_param"),
    [
        ("ddp", (2, 4, 12)),
        ("zero1", (2, 4, 3)),
        ("zero2", (2, 1, 3)),
        ("zero3", (0.5, 1, 3)),
        ("fsdp", (1, 1, 2)),
    ],
)
def test_states_over_four_replicas(sharding: str, per_param: tuple[float, float, float]) -> None:
    some = job(load_model("llama3-8b"), Layout(dp=4), sharding=sharding)
    assert state_bytes(some, 1000, 4) == tuple(1000 * size for size in per_param)


def test_fp32_keeps_no_second_copy() -> None:
    some = job(load_model("llama3-8b"), sharding="ddp", precision="fp32")
    assert state_bytes(some, 1000, 1) == (4000, 4000, 8000)


@given(some=jobs)
def test_more_zero_never_needs_more_state_memory(some: Job) -> None:
    sizes = [
        fixed_bytes(memory_of(replace(some, sharding=sharding)))
        for sharding in ("ddp", "zero1", "zero2", "zero3")
    ]
    assert sizes == sorted(sizes, reverse=True)


@given(n=integers(1, 10**6), replicas=integers(1, 64), sharding=sampled_from(sorted(SHARDINGS)))
def test_replicas_together_hold_every_state(n: int, replicas: int, sharding: str) -> None:
    some = job(load_model("llama3-8b"), sharding=sharding)
    one, many = state_bytes(some, n, 1), state_bytes(some, n, replicas)
    for alone, shared in zip(one, many, strict=True):
        assert alone <= shared * replicas
        assert shared <= alone


@given(some=jobs, in_flight=integers(1, 8))
def test_recomputation_never_raises_the_peak(some: Job, in_flight: int) -> None:
    sizes = [
        memory_of(replace(some, recompute=recompute), in_flight).peak_bytes
        for recompute in ("none", "selective", "full")
    ]
    assert sizes == sorted(sizes, reverse=True)


@given(some=jobs, in_flight=integers(0, 8))
def test_items_are_the_whole(some: Job, in_flight: int) -> None:
    memory = memory_of(some, in_flight)
    assert all(size >= 0 for size in memory.items.values())
    assert sum(size for _, size in memory.largest(len(memory.items))) == memory.peak_bytes
    (_, first), (_, second) = memory.largest(2)
    assert first == max(memory.items.values()) >= second


@given(some=jobs, in_flight=integers(0, 8))
def test_one_more_micro_batch_adds_what_one_keeps(some: Job, in_flight: int) -> None:
    assume(some.recompute == "none")
    less, more = (memory_of(some, n).items["activations"] for n in (in_flight, in_flight + 1))
    assert more - less == memory_of(some).activation_bytes_per_microbatch


@given(some=jobs, tp=sampled_from([2, 4]))
def test_tensor_parallelism_never_keeps_more(some: Job, tp: int) -> None:
    one = replace(
        some, layout=replace(some.layout, tp=1), cluster=cluster("dgx-h100", some.layout.dp * some.layout.cp)
    )
    layout = replace(some.layout, tp=tp)
    many = replace(some, layout=layout, cluster=cluster("dgx-h100", layout.world_size))
    assert kept_bytes(many, 3) <= kept_bytes(one, 3)


@given(ep=sampled_from([1, 2, 4, 8]))
def test_expert_states_are_shared_out_either_way(ep: int) -> None:
    """Under ZeRO-3, expert parallelism and sharding divide the same states by the same eight ranks."""
    model = cut("mixtral-8x7b", 2)
    memory = memory_of(job(model, Layout(dp=8, ep=ep), sharding="zero3"))
    assert memory.items["parameters"] == 2 * model.n_params // 8


def test_a_stage_holds_its_own_layers_only() -> None:
    model = load_model("llama3-70b")
    some = job(model, Layout(pp=4), sharding="ddp")
    stages = [
        stage_memory(some, range(20 * i, 20 * i + 20), i, 4 - i, first=i == 0, last=i == 3) for i in range(4)
    ]
    assert sum(stage.items["parameters"] for stage in stages) == 2 * model.n_params
    assert [stage.items["logits"] > 0 for stage in stages] == [False, False, False, True]
    assert stages[1].items["activations"] * 2 == stages[2].items["activations"] * 3


def test_sharded_layers_are_whole_two_at_a_time() -> None:
    """ZeRO-3: two neighbours gathered in bf16, one gradient in bf16 and in fp32 to reduce it."""
    model = replace(cut("llama3-8b", 4), vocab=8192)
    sizes = [model.embedding_params(), *[model.layer_params(0)] * 4, model.head_params() + model.norm_params]
    memory = memory_of(job(model, Layout(dp=8), sharding="zero3"))
    pair, largest = 2 * sizes[1], sizes[1]
    assert max(sizes) == largest
    assert memory.items["gathered"] == 2 * pair + 6 * largest


@pytest.mark.parametrize(
    ("layout", "stage", "seq_len", "allocated_gb"),
    [
        (Layout(tp=2, dp=4), 0, 4096, 65.15),
        (Layout(tp=4, dp=2), 0, 4096, 41.95),
        (Layout(tp=8), 0, 4096, 30.37),
        (Layout(pp=2, dp=4), 0, 4096, 71.46),
        (Layout(pp=2, dp=4), 1, 4096, 67.61),
        (Layout(tp=2, cp=4), 0, 32768, 73.47),
        (Layout(cp=8), 0, 32768, 112.21),
        (Layout(tp=2, cp=4), 0, 131072, 120.98),
        (Layout(cp=8), 0, 131072, 158.94),
    ],
)
def test_measured_peaks_of_megatron_on_eight_gpus(
    layout: Layout, stage: int, seq_len: int, allocated_gb: float
) -> None:
    """Llama 3 70B cut to 12 layers, bf16, distributed optimizer: within 3 % of measured.

    ``torch.cuda.max_memory_allocated`` on 8 B200, published by MooreThreads/SimuMax 1.2 in
    ``docs/b200/b200_release_v1.2_summary.json``. Allocated memory does not count the context.
    """
    some = job(cut("llama3-70b", 12), layout, seq_len=seq_len)
    n = 12 // layout.pp
    memory = stage_memory(
        some,
        range(stage * n, stage * n + n),
        stage,
        layout.pp - stage,
        first=stage == 0,
        last=stage == layout.pp - 1,
    )
    allocated = memory.peak_bytes - memory.items["reserved"]
    assert allocated / 1e9 == pytest.approx(allocated_gb, rel=0.03)


def test_multi_token_prediction_is_held_by_the_last_stage() -> None:
    """States of its own parameters and of a copy of the embedding; kept: a layer, inputs, and more logits."""
    model = replace(cut("deepseek-v3", 8), n_mtp=1)
    some = job(model, Layout(pp=2), sharding="ddp")
    with_it, without = (
        stage_memory(one, range(4, 8), 1, 1, first=False, last=True)
        for one in (some, replace(some, model=replace(model, n_mtp=0)))
    )
    more = with_it.items["parameters"] - without.items["parameters"]
    assert more == 2 * sum(block.params for block in head_blocks(some)[1:])
    kept = with_it.activation_bytes_per_microbatch - without.activation_bytes_per_microbatch
    assert kept == kept_bytes(some, 7) + 6 * 2048 * 2 * model.hidden
    assert logits_bytes(some, 1) - logits_bytes(replace(some, model=replace(model, n_mtp=0)), 1) == (
        2048 * model.vocab * 4
    )
    first = stage_memory(some, range(4), 0, 2, first=True, last=False)
    assert first.items["parameters"] == 2 * (
        model.embedding_params() + sum(map(model.layer_params, range(4)))
    )


@given(
    name=sampled_from(["deepseek-v3", "mixtral-8x7b", "llama3-8b"]),
    tp=sampled_from([1, 2]),
    modules=sampled_from([*RECOMPUTE_MODULES, "layernorm,moe_act", "core_attn,mlp,moe,mla_up_proj"]),
    in_flight=integers(1, 3),
)
def test_modules_that_are_computed_again_never_raise_the_peak(
    name: str, tp: int, modules: str, in_flight: int
) -> None:
    plain = job(cut(name, 5), Layout(tp=tp))
    some = replace(plain, recompute="selective", recompute_modules=modules)
    full = replace(plain, recompute="full")
    least, less, most = (memory_of(one, in_flight).peak_bytes for one in (full, some, plain))
    assert least <= less <= most
    assert all(
        kept_bytes(full, layer) <= kept_bytes(some, layer) <= kept_bytes(plain, layer) for layer in (0, 4)
    )


@pytest.mark.parametrize(
    ("machine", "recipe", "copies"),
    [
        ("dgx-h100", "delayed", 2),
        ("dgx-b200", "current", 1),
        ("dgx-b200", "mxfp8", 2),
        ("dgx-b200", "nvfp4", 2 * 4.5 / 8),
        ("dgx-b200", "tensorwise", 0),
    ],
)
def test_weights_in_few_bits_stay_beside_those_in_16(machine: str, recipe: str, copies: float) -> None:
    """Bytes per weight of a layer: by rows and columns, or once; torchao makes them anew for each use."""
    model = cut("llama3-8b", 2)
    plain = job(model, sharding="ddp")
    plain = replace(plain, cluster=cluster(machine, 1))
    few = replace(plain, fp8=True, recipe=recipe)
    matrices = 2 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336)
    more = memory_of(few).items["parameters"] - memory_of(plain).items["parameters"]
    assert more == copies * matrices
    if copies:  # --fp8-param-gather: nothing in 16 bit
        alone = replace(few, conventions=(("fp8_param_gather", True),))
        less = memory_of(few).items["parameters"] - memory_of(alone).items["parameters"]
        assert less == 2 * matrices
    assert memory_of(replace(few, sharding="fsdp")).items["parameters"] == 4 * model.n_params


def test_each_sharding_shares_out_what_the_one_before_it_does() -> None:
    """So that a remedy for memory is any that comes later."""
    names = ("stage", "optimizer", "gradients", "parameters", "updates_shards")
    for one, other in pairwise(SHARDINGS.values()):
        assert all(getattr(one, name) <= getattr(other, name) for name in names)
        assert one != other
