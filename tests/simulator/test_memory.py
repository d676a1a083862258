"""What a micro-batch keeps between its forward and its backward: published formulas, tensor by tensor."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.simulator.made_jobs import cut
from tests.simulator.made_jobs import short_job as job

from foretrace.simulator.memory.activations import kept_bytes, logits_bytes, working_bytes
from foretrace.simulator.memory.stage import stage_memory
from foretrace.simulator.models.sources import load_model
from foretrace.traces.layout import Layout


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


@pytest.mark.parametrize(("name", "n_norms"), [("gpt-neox-20b", 2), ("falcon-7b", 1), ("gemma2-9b", 2)])
def test_every_norm_before_a_block_leaves_its_result_out(name: str, n_norms: int) -> None:
    """Blocks in parallel have one norm each, or one for both."""
    plain = job(cut(name, 2))
    again = replace(plain, recompute="selective", recompute_modules="layernorm")
    assert kept_bytes(plain, 0) - kept_bytes(again, 0) == n_norms * 2 * 2048 * plain.model.hidden


@pytest.mark.parametrize("kind", ["mamba2", "attention", "mlp"])
def test_backward_works_on_the_blocks_that_a_layer_has(kind: str) -> None:
    """A layer of a mixer needs the same however wide MLPs are, one of an MLP however many heads there are."""
    model = replace(cut("nemotron-h-8b", 2), pattern=kind)
    heads, mlp = replace(model, n_heads=1024, n_kv_heads=1024), replace(model, ffn_hidden=10**6)
    plain, wide = (working_bytes(job(one), 0) for one in (model, heads if kind == "mlp" else mlp))
    assert plain == wide


def test_inputs_of_matrices_are_kept_in_few_bits() -> None:
    """Of a Llama layer two results of norms and the product of the gate; attention keeps its result too."""
    plain = job(cut("llama3-8b", 2))
    few = replace(plain, fp8=True, recipe="delayed")
    assert kept_bytes(plain, 0) - kept_bytes(few, 0) == 2048 * (2 * 4096 + 14336 - 4096)
    torch = replace(plain, fp8=True, recipe="tensorwise")
    assert kept_bytes(torch, 0) == kept_bytes(plain, 0)
