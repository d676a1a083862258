"""Memory of a stage: published formulas, published measurements, and laws over all ways to shard."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import assume, given
from hypothesis.strategies import booleans, builds, integers, sampled_from

from simulator.job import RECOMPUTE_MODULES, RECOMPUTES, SHARDINGS, Job
from simulator.memory.activations import kept_bytes, logits_bytes, working_bytes
from simulator.memory.moments import AT_HEAD, AT_LAYER, IN_LOSS
from simulator.memory.stage import StageMemory, stage_memory, state_bytes
from simulator.models.model import Model
from simulator.models.sources import load_model
from topologies.catalog import load_cluster
from traces.layout import Layout

cluster = cache(load_cluster)


def job(model: Model, layout: Layout | None = None, **settings: object) -> Job:
    layout = layout or Layout()
    values: dict[str, object] = {"seq_len": 2048, "micro_batch": 1, **settings}
    return Job(
        model=model,
        cluster=cluster("dgx-h100", layout.world_size),
        layout=layout,
        global_batch=layout.dp * int(str(values["micro_batch"])),
        **values,  # type: ignore[arg-type]
    )


def cut(name: str, n_layers: int) -> Model:
    return replace(load_model(name), n_layers=n_layers)


def memory_of(some: Job, in_flight: int = 1) -> StageMemory:
    return stage_memory(some, range(some.model.n_layers), 0, in_flight, first=True, last=True)


jobs = builds(
    lambda name, dp, tp, cp, sp, sharding, recompute, flash, precision: job(
        cut(name, 4),
        Layout(tp=tp, cp=cp, dp=dp),
        sequence_parallel=sp,
        sharding=sharding,
        recompute=recompute,
        flash_attention=flash,
        precision=precision,
    ),
    sampled_from(["llama3-8b", "gpt3-175b", "mixtral-8x7b", "deepseek-v3"]),
    sampled_from([1, 2, 3, 8]),
    sampled_from([1, 2, 4]),
    sampled_from([1, 2]),
    booleans(),
    sampled_from(SHARDINGS),
    sampled_from(RECOMPUTES),
    booleans(),
    sampled_from(["bf16", "fp16", "fp32"]),
)


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("micro_batch", [1, 4])
class TestKorthikanti:
    """Bytes per layer of a GPT in 16 bit, arXiv:2205.05198, equations 1 to 4 and table 2."""

    s, h, a = 2048, 12288, 96

    def kept(self, tp: int, micro_batch: int, **settings: object) -> int:
        some = job(
            load_model("gpt3-175b"),
            Layout(tp=tp),
            micro_batch=micro_batch,
            **{"flash_attention": False, **settings},
        )
        return kept_bytes(some, 0)

    def test_tensor_parallel(self, tp: int, micro_batch: int) -> None:
        """sbh (10 + 24/t + 5as/ht)."""
        s, b, h, a = self.s, micro_batch, self.h, self.a
        wanted = s * b * h * 10 + (24 * s * b * h + 5 * a * s * s * b) // tp
        assert self.kept(tp, b, sequence_parallel=False) == wanted

    def test_tensor_and_sequence_parallel(self, tp: int, micro_batch: int) -> None:
        """sbh/t (34 + 5as/h)."""
        s, b, h, a = self.s, micro_batch, self.h, self.a
        assert self.kept(tp, b) == (34 * s * b * h + 5 * a * s * s * b) // tp

    def test_selective_recomputation(self, tp: int, micro_batch: int) -> None:
        """34 sbh/t, whether or not the core is fused."""
        for flash in (False, True):
            wanted = 34 * self.s * micro_batch * self.h // tp
            assert self.kept(tp, micro_batch, recompute="selective", flash_attention=flash) == wanted

    def test_full_recomputation(self, tp: int, micro_batch: int) -> None:
        """2sbh, as a shard with sequence parallelism."""
        wanted = 2 * self.s * micro_batch * self.h
        assert self.kept(tp, micro_batch, recompute="full", sequence_parallel=False) == wanted
        assert self.kept(tp, micro_batch, recompute="full") == wanted // tp


def test_a_llama_layer_keeps_what_its_matrices_and_kernels_need() -> None:
    """Per token: two norm inputs, two matrix inputs, q k v and output, gate and up, their product; bf16.

    The fused kernel adds one fp32 statistic per query head, which selective recomputation brings back.
    """
    model = cut("llama3-8b", 2)
    per_token = 2 * (4 * 4096 + (32 + 2 * 8 + 32) * 128 + 3 * 14336)
    assert kept_bytes(job(model), 0) == 2048 * (per_token + 4 * 32)
    assert kept_bytes(job(model, recompute="selective"), 0) == 2048 * per_token


def test_an_expert_layer_keeps_every_copy_of_a_token() -> None:
    """Per token and expert: input, gate, up and product; beside the router's fp32 scores."""
    some = job(cut("mixtral-8x7b", 2), recompute="selective")
    attention = 2 * (2 * 4096 + (32 + 2 * 8 + 32) * 128)
    moe = 2 * (2 * 4096 + 2 * (4096 + 3 * 14336)) + 8 * 4
    assert kept_bytes(some, 0) == 2048 * (attention + moe)


@pytest.mark.parametrize(("precision", "cast"), [("bf16", 2), ("fp32", 0)])
def test_logits_are_kept_in_fp32_for_every_micro_batch_in_flight(precision: str, cast: int) -> None:
    """One copy per micro-batch in flight, and the logits as computed of one at a time."""
    some = job(cut("llama3-8b", 2), Layout(tp=2), precision=precision)
    n_logits = 2048 * 128256 // 2
    for in_flight in (1, 3):
        assert logits_bytes(some, in_flight) == n_logits * (4 * in_flight + cast)
        assert logits_bytes(some, in_flight, working=False) == n_logits * 4 * in_flight


def test_a_compiled_loss_has_nothing_in_fp32() -> None:
    """Logits and their gradient in bf16: what torch.compile leaves of F.cross_entropy."""
    some = job(cut("llama3-8b", 2), framework="torchtitan", kernels="fused")
    assert logits_bytes(some, 1) == 2048 * 128256 * (2 + 2)
    before = replace(some, conventions=(("compiles_loss", False),))
    assert logits_bytes(before, 1) == 2048 * 128256 * (4 + 8)
    assert logits_bytes(replace(some, kernels=""), 1) == logits_bytes(before, 1)


def test_backward_works_on_the_gradients_of_one_block() -> None:
    """MLP of Llama 3 8B: gradients of gate, up and product, a hidden state, and the residual's gradient."""
    some = job(cut("llama3-8b", 2))
    assert working_bytes(some, 0) == 2048 * 2 * (3 * 14336 + 2 * 4096)


def test_without_a_fused_kernel_backward_works_on_scores_once_the_mlp_is_done() -> None:
    """GPT-3: gradients of q (in fp32 too), k, v, output, scores, two hidden states; MLP and norm: 21 sbh."""
    some = job(load_model("gpt3-175b"), flash_attention=False)
    s, h, a = 2048, 12288, 96
    mlp = 21 * s * h
    assert working_bytes(some, 0) == s * (2 * 2 * 2 * h + 4 * h + 2 * 2 * h) + 2 * a * s * s - mlp


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
    held = memory.peak_bytes - memory.fixed_bytes
    assert held >= kept + max(loss, layer + logits_bytes(some, in_flight - 1, working=False))


def test_products_that_add_in_place_leave_a_tensor_per_shape_and_one_of_the_head() -> None:
    """Query-key-value, projection, up and down of Llama 3 8B, once each however many layers; and the head."""
    some = job(replace(cut("llama3-8b", 4), vocab=1_000_000), seq_len=512)
    apart = replace(some, conventions=(("wgrad_placeholders", False),))
    layer = 2 * (4096 * 6144 + 4096 * 4096 + 4096 * 28672 + 14336 * 4096)
    more = memory_of(some).items["buffers"] - memory_of(apart).items["buffers"]
    assert memory_of(some).when == AT_HEAD
    assert more == layer + 2 * 1_000_000 * 4096 + 512 * 2 * 4096  # apart, its peak is in the loss
    for other in ({"sharding": "fsdp"}, {"fp32_gradients": False}, {"lora_rank": 8}):
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
        memory_of(replace(some, sharding=sharding)).fixed_bytes
        for sharding in ("ddp", "zero1", "zero2", "zero3")
    ]
    assert sizes == sorted(sizes, reverse=True)


@given(n=integers(1, 10**6), replicas=integers(1, 64), sharding=sampled_from(SHARDINGS))
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
    assert sum(memory.items.values()) == memory.peak_bytes
    assert all(size >= 0 for size in memory.items.values())
    assert memory.fixed_bytes == sum(memory.baseline().values()) <= memory.peak_bytes
    assert set(memory.baseline()) == set(memory.items)
    largest = memory.largest(3)
    assert largest == sorted(memory.items.items(), key=lambda item: -item[1])[:3]


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


def test_layers_that_are_computed_again_keep_less_and_only_they() -> None:
    llama = load_model("llama3-8b")
    none, full = job(llama), job(llama, recompute="full")
    every = replace(full, recompute_every=2)
    first = replace(full, recompute_layers=8)
    kept = [stage_memory(one, range(32), 0, 1, first=True, last=True) for one in (full, every, first, none)]
    per_microbatch = [one.activation_bytes_per_microbatch for one in kept]
    assert per_microbatch[1] * 2 == per_microbatch[0] + per_microbatch[3]
    assert per_microbatch[2] * 4 == per_microbatch[0] + 3 * per_microbatch[3]
    assert kept[0].peak_bytes < kept[1].peak_bytes < kept[2].peak_bytes < kept[3].peak_bytes


def test_eager_kernels_keep_the_input_of_a_norm_in_fp32_and_the_activated_gate() -> None:
    llama = load_model("llama3-8b")
    fused, eager = (job(llama, kernels=kernels) for kernels in ("fused", "eager"))
    tokens = 2048
    more = 2 * 4 * tokens * 4096 + 2 * tokens * 14336
    assert kept_bytes(eager, 0) - kept_bytes(fused, 0) == more
    gpt = load_model("gpt3-175b")  # layer_norm and GELU are one kernel each in either mode
    assert kept_bytes(job(gpt, kernels="eager"), 0) == kept_bytes(job(gpt, kernels="fused"), 0)


def test_a_ring_and_heads_dealt_out_hold_fewer_keys_at_once_than_a_gather() -> None:
    llama, layout = replace(load_model("llama3-8b"), ffn_hidden=1024), Layout(cp=8)
    held = [
        working_bytes(job(llama, layout, seq_len=131072, conventions=(("context", name),)), 0)
        for name in ("ulysses", "ring", "all_gather")
    ]
    assert held[0] < held[1] < held[2]


def test_multi_token_prediction_is_held_by_the_last_stage() -> None:
    """States of its own parameters and of a copy of the embedding; kept: a layer, inputs, and more logits."""
    model = replace(cut("deepseek-v3", 8), n_mtp=1)
    some = job(model, Layout(pp=2), sharding="ddp")
    with_it, without = (
        stage_memory(one, range(4, 8), 1, 1, first=False, last=True)
        for one in (some, replace(some, model=replace(model, n_mtp=0)))
    )
    more = with_it.items["parameters"] - without.items["parameters"]
    assert more == 2 * (model.n_mtp_params + model.vocab * model.hidden)
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


def test_what_modules_leave_out_is_what_they_make() -> None:
    """Results of two norms, of the activation of 8 routed copies, and queries, keys and values of MLA."""
    model = cut("deepseek-v3", 5)
    plain = job(model)

    def left_out(modules: str) -> int:
        some = replace(plain, recompute="selective", recompute_modules=modules)
        return kept_bytes(plain, 4) - kept_bytes(some, 4)

    assert left_out("layernorm") == 2 * 2 * 2048 * 7168
    assert left_out("moe_act") == 2 * 2048 * 8 * 2048
    assert left_out("mla_up_proj") == 2 * 2048 * 128 * (192 + 192 + 128)
    assert left_out("core_attn") == 4 * 2048 * 128
    assert left_out("shared_experts") == 2 * 2048 * 3 * 2048
    assert left_out("mlp") == 0


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
    assert memory_of(replace(few, sharding="fsdp")).items["parameters"] == 4 * model.n_params


def test_inputs_of_matrices_are_kept_in_few_bits() -> None:
    """Of a Llama layer two results of norms and the product of the gate; attention keeps its result too."""
    plain = job(cut("llama3-8b", 2))
    few = replace(plain, fp8=True, recipe="delayed")
    assert kept_bytes(plain, 0) - kept_bytes(few, 0) == 2048 * (2 * 4096 + 14336 - 4096)
    torch = replace(plain, fp8=True, recipe="tensorwise")
    assert kept_bytes(torch, 0) == kept_bytes(plain, 0)
