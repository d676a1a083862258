"""Writes a job as arguments of Megatron-LM; names as in ``megatron.toml`` beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from foretrace.simulator.builder.stages import stage_layers
from foretrace.simulator.configs.megatron import FUSED_ROUTER_LAUNCHES
from foretrace.simulator.configs.megatron_layout import layout_word
from foretrace.simulator.configs.rules import words_for
from foretrace.simulator.job import Job, counted_layers
from foretrace.simulator.models.model import Model
from foretrace.simulator.schedules import SCHEDULES

_STRATEGIES: Final = {"zero2": "optim_grads", "zero3": "optim_grads_params", "fsdp": "optim_grads_params"}

Argument = tuple[str, Any]
"""A name and a value; true is a switch."""


def text(job: Job) -> str:
    """Return the command that launches *job*, one group of arguments per line."""
    # A job smaller than a node does not fill it.
    per_node = min(job.most_ranks_per_node, job.cluster.n_gpus)
    launch = [("nproc-per-node", per_node), ("nnodes", -(-job.cluster.n_gpus // per_node))]
    lines = [f"torchrun {_line(launch)} pretrain_gpt.py"]
    for part in (_model(job.model, job), _parallel(job), _batch(job), _memory(job), _overlap(job)):
        if line := _line(list(part)):
            lines.append(f"  {line}")
    return " \\\n".join(lines) + "\n"


def _line(arguments: list[Argument]) -> str:
    return " ".join(
        f"--{name}" if value is True else f"--{name} {value}"
        for name, value in arguments
        if value is not None and value is not False
    )


def _model(model: Model, job: Job) -> Iterator[Argument]:
    yield from (("num-layers", model.n_layers), ("hidden-size", model.hidden))
    yield from (("ffn-hidden-size", model.ffn_hidden or None), ("num-attention-heads", model.n_heads))
    if not model.kv_lora_rank:
        yield "kv-channels", model.head_dim
    if model.n_kv_heads != model.n_heads:
        yield from (("group-query-attention", True), ("num-query-groups", model.n_kv_heads))
    yield from (("swiglu", model.gated), ("qk-layernorm", model.qk_norm))
    yield "normalization", {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}[model.norm]
    yield "position-embedding-type", "learned_absolute" if model.max_positions else "rope"
    yield "max-position-embeddings", model.max_positions or job.seq_len
    yield "untie-embeddings-and-output-weights", not model.tied_embeddings
    # Megatron-LM has one switch for all biases of a layer; those of queries alone are another.
    yield "disable-bias-linear", not model.mlp_bias
    yield "add-qkv-bias", model.qkv_bias and not model.mlp_bias
    yield from (("hidden-dropout", 0.1 if model.dropout else 0.0), ("attention-dropout", 0.0))
    # Written as it is: padded already, so that nothing is added.
    yield from (("vocab-size", model.vocab), ("make-vocab-size-divisible-by", 1))
    if model.n_experts:
        yield from (("num-experts", model.n_experts), ("moe-router-topk", model.top_k))
        if model.n_dense_layers:
            sparse = model.n_layers - model.n_dense_layers
            yield "moe-layer-freq", f"'([0]*{model.n_dense_layers}+[1]*{sparse})'"
        elif not all(routed := [model.is_moe(layer) for layer in range(model.n_layers)]):
            yield "moe-layer-freq", f"'[{','.join(str(int(one)) for one in routed)}]'"
        yield "moe-ffn-hidden-size", model.moe_ffn_hidden
        yield "moe-shared-expert-intermediate-size", model.shared_ffn_hidden or None
    if model.kv_lora_rank:
        yield from (("multi-latent-attention", True), ("kv-lora-rank", model.kv_lora_rank))
        yield from (("q-lora-rank", model.q_lora_rank or None), ("v-head-dim", model.v_head_dim))
        yield from (
            ("qk-head-dim", model.head_dim - model.rope_head_dim),
            ("qk-pos-emb-head-dim", model.rope_head_dim),
        )


def _parallel(job: Job) -> Iterator[Argument]:
    layout = job.layout
    yield from (("tensor-model-parallel-size", layout.tp), ("pipeline-model-parallel-size", layout.pp))
    if layout.cp > 1:
        yield "context-parallel-size", layout.cp
        yield "cp-comm-type", words_for("megatron", "cp-comm-type")[job.profile.context]
    if layout.ep > 1:
        yield "expert-model-parallel-size", layout.ep
    if layout.expert_tp:
        yield "expert-tensor-parallel-size", layout.expert_tp
    if layout.tp > 1:
        yield from (("sequence-parallel", job.sequence_parallel), ("tp-comm-overlap", job.profile.async_tp))
    listed = _listed(job)
    several = job.virtual_stages or (2 if job.schedule == "interleaved-1f1b" else 1)
    if job.schedule in ("interleaved-1f1b", "combined-1f1b") and layout.pp > 1 and several > 1 and not listed:
        yield "num-virtual-stages-per-pipeline-rank", several
    if job.overlap_p2p is not None:
        yield "overlap-p2p-communication" if job.overlap_p2p else "no-overlap-p2p-communication", True
    # Both ends may differ if all between are alike; anything else needs the layout in words.
    if listed and len(listed) == layout.pp and len(set(listed[1:-1])) < 2:
        yield "decoder-first-pipeline-num-layers", listed[0]
        yield "decoder-last-pipeline-num-layers", listed[-1]
    elif listed:
        yield "pipeline-model-parallel-layout", f"'{layout_word(listed)}'"
    yield "account-for-embedding-in-pipeline-split", job.counted_ends in ("embedding", "both")
    yield "account-for-loss-in-pipeline-split", job.counted_ends in ("head", "both")


def _listed(job: Job) -> tuple[int, ...]:
    """Return the layers of every stage, where they do not divide evenly and have to be told."""
    n_layers = counted_layers(job.model.n_layers, job.counted_ends)
    if job.layout.pp == 1 or (not job.layers_per_stage and n_layers % job.layout.pp == 0):
        return ()
    several = job.virtual_stages or SCHEDULES[job.schedule].virtual_stages
    return tuple(len(layers) for layers in stage_layers(job, job.layout.pp * several))


def _batch(job: Job) -> Iterator[Argument]:
    yield from (("micro-batch-size", job.micro_batch), ("global-batch-size", job.global_batch))
    yield from (("seq-length", job.seq_len), (job.precision, job.precision != "fp32"))
    if job.fp8:
        recipe = job.recipe or job.profile.fp8_recipe
        yield from (("fp8-format", "hybrid"), ("fp8-recipe", words_for("megatron", "fp8-recipe").get(recipe)))
    yield "attention-backend", None if job.flash_attention else "unfused"


def _memory(job: Job) -> Iterator[Argument]:
    yield "use-distributed-optimizer", job.shards.optimizer
    if job.sharding in _STRATEGIES:
        yield from (
            ("use-megatron-fsdp", True),
            ("data-parallel-sharding-strategy", _STRATEGIES[job.sharding]),
        )
    if job.recompute != "none":
        yield "recompute-granularity", job.recompute
    if job.recompute == "full":
        yield "recompute-method", "block" if job.recompute_layers else "uniform"
        yield "recompute-num-layers", job.recompute_layers or 1
    yield "optimizer-cpu-offload", job.offload == "optimizer"
    yield "cpu-offloading-num-layers", job.offload_layers or None
    yield "accumulate-allreduce-grads-in-fp32", job.fp32_gradients and job.precision != "fp32"
    yield "moe-expert-capacity-factor", job.capacity_factor or None
    yield "moe-pad-expert-input-to-capacity", job.capacity_factor > 0


def _overlap(job: Job) -> Iterator[Argument]:
    profile = job.profile
    yield "overlap-grad-reduce", profile.overlap_grad_reduce
    yield "overlap-param-gather", profile.overlap_param_gather and job.shards.optimizer
    yield "fp8-param-gather", profile.fp8_param_gather and job.fp8
    yield "grad-reduce-in-bf16", profile.reduces_in_16_bit
    yield "no-gradient-accumulation-fusion", not profile.fused_wgrad
    if job.layout.ep > 1:
        yield "moe-token-dispatcher-type", "flex" if profile.expert_dispatch == "once" else "alltoall"
        yield "overlap-moe-expert-parallel-comm", job.schedule == "combined-1f1b"
    if job.model.n_experts:
        yield "moe-router-fusion", profile.router_launches == FUSED_ROUTER_LAUNCHES
    # 4 bytes of fp32 for each element.
    yield "ddp-bucket-size", round(profile.bucket_mib * 2**20 / 4) if profile.bucket_mib else None
    yield "clip-grad", 1.0 if profile.grad_norm else 0.0
