"""What a micro-batch leaves in memory until its backward, block by block.

The list of Korthikanti et al. 2022 (arXiv:2205.05198, section 4), generalised to grouped-query and latent
attention, gated MLPs, experts, fused attention, and context parallelism. Tensors of a few bytes per token
(norm statistics, token ids) are left out, as there.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from foretrace.simulator.compute.fusion import is_clamped_apart, is_separate
from foretrace.simulator.job import Job
from foretrace.simulator.models.kinds import KINDS
from foretrace.simulator.models.model import share
from foretrace.simulator.workload.linear import (
    expert_tokens,
    hidden_bytes,
    job_recipe,
    residual_dtype,
    routed_tokens,
    tokens_per_rank,
    tokens_per_shard,
)
from foretrace.simulator.workload.ops import DTYPE_BYTES, operand_bytes
from foretrace.simulator.workload.tower import tower_job

WHOLE_AT_ONCE: Final[Mapping[str, int]] = MappingProxyType({"all_gather": 0, "ring": 2, "ulysses": 1})
"""Shares of keys and values that a context-parallel rank holds at once; 0 means those of all ranks.

A ring holds the share in use and the one that arrives; Ulysses holds all tokens of a share of the heads.
"""


def layer_input_bytes(job: Job) -> int:
    """Return the size of the input of one layer: what full recomputation keeps."""
    return tokens_per_shard(job) * job.model.hidden * DTYPE_BYTES[residual_dtype(job)]


def kept_bytes(job: Job, layer: int) -> int:
    """Return what one micro-batch keeps of *layer* from forward to backward, under ``job.recompute``."""
    if job.recompute == "full":
        return layer_input_bytes(job)
    if job.recompute_modules:
        modules = job.recomputed_modules
        whole = _layer_bytes(job, layer, scores="core_attn" not in modules)
        return whole - _dropped_bytes(job, layer)
    if job.recompute == "selective" and job.profile.selective == "operations":
        return _saved_bytes(job, layer)
    return _layer_bytes(job, layer, scores=job.recompute == "none")


def tower_bytes(job: Job) -> tuple[int, int, int]:
    """Return what one micro-batch keeps of the tower, and of one of its layers what is brought back and held.

    Recomputation brings back, backward holds; nothing where there are no images, or it runs forward alone.
    """
    tower = job.model.tower
    if tower is None or not job.images or job.lora_rank:
        return 0, 0, 0
    inside, layers = tower_job(job), range(tower.n_layers)
    tokens = inside.micro_batch * (job.image_tokens or tower.image_tokens)
    # Patches, and what each matrix of the projector reads.
    inputs = tokens_per_rank(inside) * tower.vocab + tokens * sum(n_in for n_in, _ in tower.projector)
    return (
        sum(kept_bytes(inside, layer) for layer in layers) + inputs * DTYPE_BYTES[job.precision],
        max(recomputed_bytes(inside, layer) for layer in layers),
        max(working_bytes(inside, layer) for layer in layers),
    )


def recomputed_bytes(job: Job, layer: int) -> int:
    """Return what recomputation brings back for the backward of *layer*, beside what was kept."""
    if job.recompute == "none":
        return 0
    return _layer_bytes(job, layer, scores=True) - kept_bytes(job, layer)


def _layer_bytes(job: Job, layer: int, *, scores: bool) -> int:
    """Return what the blocks of *layer* keep; *scores* as of ``_attention_bytes``."""
    return _mixer_bytes(job, job.model.mixer(layer), scores=scores) + _mlp_bytes(job, layer)


def _mixer_bytes(job: Job, kind: str, *, scores: bool) -> int:
    """Return what a mixer of *kind* keeps; of a recurrence what its kernels save (``Scan.kept``)."""
    if not kind:
        return 0
    if (scan_of := KINDS[kind].scan) is None:
        return _attention_bytes(job, kind, scores=scores)
    scan, n_tokens = scan_of(job.model, job.layout.tp, job.seq_len), tokens_per_rank(job)
    kept = n_tokens * scan.kept * DTYPE_BYTES[job.precision]
    # Both of two mixers that run side by side have one input.
    branch = _attention_bytes(job, kind, scores=scores) if KINDS[kind].attends else _branch_bytes(job)
    return branch + kept + matrix_input_bytes(job, n_tokens * scan.result)


def _dropped_bytes(job: Job, layer: int) -> int:
    """Return what recomputed modules save in *layer*, not counting the attention core.

    A norm drops its result, an activation its own, the up-projections of latent attention queries, keys and
    values, an MLP or the experts all but their input. Reference: Megatron-LM, ``CheckpointWithoutOutput``.
    """
    model, modules, width = job.model, job.recomputed_modules, DTYPE_BYTES[job.precision]
    n_tokens, routed = tokens_per_rank(job), model.is_moe(layer)
    norms = min(model.norms_per_layer, 2) * tokens_per_shard(job) * model.hidden
    found = matrix_input_bytes(job, norms) if "layernorm" in modules else 0
    if "mla_up_proj" in modules and model.kv_lora_rank:
        heads, kv_heads = model.n_heads // job.layout.tp, model.kv_heads_per_rank(job.layout.tp)
        features = heads * model.head_dim + kv_heads * (model.head_dim + model.value_head_dim)
        found += n_tokens * features * width
    if ("moe" if routed else "mlp") in modules:
        return found + _mlp_bytes(job, layer) - _branch_bytes(job)
    if "moe_act" in modules and routed:
        rows, inner = routed_tokens(job, expert_tokens(job)), share(model.moe_ffn_hidden, job.layout.etp)
        found += matrix_input_bytes(job, rows * inner)
    if "shared_experts" in modules and routed and model.n_shared_experts:
        found += _kept_inner_bytes(job, model.shared_ffn_hidden, n_tokens)
    return found


def _saved_bytes(job: Job, layer: int) -> int:
    """Return what is kept: input of the layer, result of attention, every other product (query, value, ...).

    Reference: torchtitan ``parallelize_llama.py``, selective activation checkpointing of operations.
    """
    model, layout, width = job.model, job.layout, DTYPE_BYTES[job.precision]
    n_tokens, heads = tokens_per_rank(job), model.n_heads // layout.tp
    features = heads * (model.head_dim + model.value_head_dim)
    features += model.kv_heads_per_rank(layout.tp) * model.value_head_dim
    # 4: the fp32 statistic of every query that fused attention keeps.
    found = 2 * layer_input_bytes(job) + n_tokens * (features * width + heads * 4)
    ffn_hidden = model.ffn_hidden if not model.is_moe(layer) else model.moe_ffn_hidden * model.top_k
    return found + n_tokens * share(ffn_hidden, layout.tp) * width


def matrix_input_bytes(job: Job, n_elements: int) -> int:
    """Return what is kept of an input of matrices for their weight gradients.

    A framework that quantises weights once per step keeps inputs in the bits of its recipe: Transformer
    Engine, issue 1764. The others (torchao) keep them as they came, and quantise again.
    """
    recipe = job_recipe(job)
    if recipe is None or recipe.weights_each:
        return n_elements * DTYPE_BYTES[job.precision]
    return operand_bytes(n_elements, recipe.dtype)


def head_bytes(job: Job) -> int:
    """Return what one micro-batch keeps of the head beside logits: inputs of norm and matrix.

    A module for multi-token prediction keeps as much again, both inputs of its norms and of the matrix that
    joins them, and its layer.
    """
    shard = hidden_bytes(job, tokens_per_shard(job))
    found = 2 * shard
    if job.profile.keeps_gathered_inputs:
        found += hidden_bytes(job, tokens_per_rank(job)) - shard
    if not job.model.n_mtp:
        return found
    return found + job.model.n_mtp * (found + 4 * shard + kept_bytes(job, job.model.n_layers - 1))


def n_logits(job: Job) -> int:
    """Return the number of logits of one micro-batch on a rank of the last stage, in one pass of the head."""
    return tokens_per_rank(job) * share(job.model.vocab, job.layout.tp)


def logits_bytes(job: Job, in_flight: int, *, working: bool = True) -> int:
    """Return the logits of the last stage: fp32 log-probabilities of *in_flight* micro-batches are kept.

    With *working*, one micro-batch also has its logits in ``job.precision`` and what the loss computes from
    them, as the framework does it. A compiled loss keeps logits and makes their gradient, in that precision.
    Every module for multi-token prediction has logits of its own.
    """
    framework, width = job.profile, DTYPE_BYTES[job.precision]
    if framework.compiles_loss and not is_separate(job, "loss"):
        return n_logits(job) * width * (in_flight * (1 + job.model.n_mtp) + working)
    # In fp32 there is one copy of 4 bytes in all, where 16 bits and their fp32 cast are 6.
    uncast = 4 - 6 if job.precision == "fp32" else 0
    beside = max(framework.logits_working_bytes + uncast, 0) if working else 0
    return n_logits(job) * (framework.logits_kept_bytes * in_flight * (1 + job.model.n_mtp) + beside)


def _branch_bytes(job: Job, *, n_shared: int = 0) -> int:
    """Return the inputs of a block's norm and of its first matrix, and its dropout mask (a byte per element).

    An RMSNorm in kernels of its own keeps its input in fp32, and its result before the weight.

    *n_shared* of the two inputs are kept by the block that runs in parallel with this one.
    """
    framework, n_tokens = job.profile, tokens_per_shard(job)
    elements = n_tokens * job.model.hidden
    found = (2 - n_shared) * hidden_bytes(job, n_tokens) + (elements if job.model.dropout else 0)
    if n_shared in (0, 1):
        # One of the inputs is that of a matrix, which may be kept in fewer bits; it is exchanged here.
        found += matrix_input_bytes(job, elements) - hidden_bytes(job, n_tokens)
    if framework.keeps_gathered_inputs and n_shared < 2:
        found += hidden_bytes(job, tokens_per_rank(job)) - hidden_bytes(job, n_tokens)
    apart = is_separate(job, "norm") and job.model.norm == "rmsnorm"
    return found + (4 * elements if framework.keeps_norm_in_fp32 or apart else 0)


def _casts_bytes(job: Job, n_products: int) -> int:
    """Return the casts of its input that autocast makes for each of *n_products*, kept for their backward.

    The input itself stays in fp32 for the weight of its norm, as does what the norm has read.
    """
    if not job.autocasts:
        return 0
    return tokens_per_shard(job) * job.model.hidden * DTYPE_BYTES[job.precision] * n_products


def _attention_bytes(job: Job, kind: str, *, scores: bool) -> int:
    """Return queries, keys, values and output; *scores* adds what a recomputed core does not keep.

    That is one fp32 statistic per query for a fused kernel. For an unfused one it is the softmax and, with
    dropout, its mask and its result.
    """
    model, layout = job.model, job.layout
    n_tokens, width = tokens_per_rank(job), DTYPE_BYTES[job.precision]
    heads = model.n_heads // layout.tp
    kv_heads = model.kv_heads_per_rank(layout.tp)
    features = heads * (model.head_dim + model.value_head_dim)
    features += kv_heads * (model.head_dim + model.value_head_dim)
    compressed = (
        2 * (model.q_lora_rank + model.kv_lora_rank) + model.rope_head_dim if model.kv_lora_rank else 0
    )
    n_shared = int(model.parallel_blocks) + int(model.norms_per_layer == 1)
    found = _branch_bytes(job, n_shared=n_shared) + _casts_bytes(job, 3)
    found += (n_tokens * features + tokens_per_shard(job) * compressed) * width
    if model.qk_norm:
        found += n_tokens * (heads + kv_heads) * model.head_dim * width
    if model.attention_gate:  # the gate, and its product with the result
        found += 2 * n_tokens * heads * model.head_dim * width
    if kind == "sparse":  # queries and key of the indexer, and which keys it chose
        indexed = (model.index_heads + 1) * model.index_head_dim * width
        # 4 bytes for the number of each key that was chosen.
        found += n_tokens * (indexed + 4 * min(model.index_top_k, job.seq_len))
    result = n_tokens * heads * model.value_head_dim
    if (quantised := matrix_input_bytes(job, result)) < result * width:
        found += quantised  # the core keeps its result as it is
    if not scores:
        return found
    if job.flash_attention:
        return found + n_tokens * heads * 4
    per_score = 2 * width + 1 if model.dropout else width
    return found + per_score * heads * n_tokens * job.seq_len


def _has_mlp(job: Job, layer: int) -> bool:
    return any(KINDS[kind].is_mlp for kind in job.model.kinds(layer))


def _mlp_bytes(job: Job, layer: int) -> int:
    """Return input and output of the activation function; for experts also the tokens sent to them.

    What experts answer is not kept: the weight of a token is applied in the activation. Reference:
    Megatron-LM ``moe/experts.py``, ``weighted_bias_swiglu_impl`` of ``permuted_probs``.
    """
    model = job.model
    if not _has_mlp(job, layer):
        return 0
    if not model.is_moe(layer):
        inner = _kept_inner_bytes(job, model.ffn_hidden, tokens_per_rank(job))
        return _branch_bytes(job) + _casts_bytes(job, 2 if model.gated else 1) + inner
    n_routed = routed_tokens(job, expert_tokens(job))
    found = _branch_bytes(job) + _kept_inner_bytes(job, model.moe_ffn_hidden, n_routed, job.layout.etp)
    found += matrix_input_bytes(job, n_routed * model.hidden)
    # 4: the router scores in fp32.
    found += tokens_per_shard(job) * model.n_experts * 4
    if model.n_shared_experts:
        found += _kept_inner_bytes(job, model.shared_ffn_hidden, tokens_per_rank(job))
    return found


def _kept_inner_bytes(job: Job, ffn_hidden: int, n_tokens: int, parts: int = 0) -> int:
    """Inputs and output of the activation function, the output as the next matrix keeps it.

    Inputs may be kept so too. Reference: Megatron-LM ``--activation-func-fp8-input-store``; DeepSeek-V3,
    arXiv:2412.19437, section 3.3.3, "Low-Precision Activation".
    """
    outputs = n_tokens * share(ffn_hidden, parts or job.layout.tp)
    narrow = outputs * DTYPE_BYTES[job.precision] - matrix_input_bytes(job, outputs)
    n_inputs = (2 if job.model.gated else 1) if job.profile.fp8_activation_inputs else 0
    saved = (1 + n_inputs) * narrow
    return _inner_bytes(job, ffn_hidden, n_tokens, parts) - saved


def _inner_bytes(job: Job, ffn_hidden: int, n_tokens: int, parts: int = 0) -> int:
    """Inputs (two with a gate) and output of the activation function, in *parts*; 0: tensor-parallel ones."""
    inputs = 2 if job.model.gated else 1
    if job.model.gated and (job.profile.keeps_gate_output or is_separate(job, "activation")):
        inputs += 1  # silu(gate), to be multiplied
    if is_clamped_apart(job):
        inputs += 2  # as they were before
    inner = share(ffn_hidden, parts or job.layout.tp)
    return n_tokens * inner * (inputs + 1) * DTYPE_BYTES[job.precision]


def working_bytes(job: Job, layer: int) -> int:
    """Return what the backward of *layer* holds at its worst moment beside what forward kept.

    In the MLP: the gradients of the activation's inputs and output, and one gathered hidden state. In
    attention: gradients of queries (summed in fp32 by the fused kernel), keys, values and output, of unfused
    scores (one copy: what dropout made is freed as they come), one gathered hidden state, and keys and values
    gathered over context-parallel ranks with their gradients; by then what the MLP kept is free.
    """
    model, layout = job.model, job.layout
    n_tokens, width = tokens_per_rank(job), DTYPE_BYTES[job.precision]
    routed = model.is_moe(layer)
    rows = routed_tokens(job, expert_tokens(job)) if routed else n_tokens
    width_of_one, parts = (model.moe_ffn_hidden, layout.etp) if routed else (model.ffn_hidden, layout.tp)
    mlp = (_inner_bytes(job, width_of_one, rows, parts) + hidden_bytes(job, rows)) * _has_mlp(job, layer)
    if not model.mixer(layer):
        return mlp + layer_input_bytes(job)
    kind, scanned = KINDS[model.mixer(layer)], 0
    if kind.scan is not None:  # gradients of what is kept, and the states of all chunks in fp32
        scan = kind.scan(model, layout.tp, job.seq_len)
        states = 4 * -(-n_tokens // scan.chunk) * scan.heads * scan.state
        scanned = n_tokens * scan.kept * width + states
        if not kind.attends:
            return max(mlp, scanned - _mlp_bytes(job, layer)) + layer_input_bytes(job)
    heads, kv_heads = model.n_heads // layout.tp, model.kv_heads_per_rank(layout.tp)
    both = model.head_dim + model.value_head_dim
    attention = n_tokens * (heads + kv_heads) * both * width + n_tokens * heads * model.head_dim * 4
    attention += hidden_bytes(job, n_tokens)
    if not job.flash_attention:
        attention += heads * n_tokens * job.seq_len * width
    if layout.cp > 1:
        parts = WHOLE_AT_ONCE[job.profile.context] or layout.cp
        attention += 2 * n_tokens * parts * kv_heads * both * width
    return max(mlp, attention + scanned - _mlp_bytes(job, layer)) + layer_input_bytes(job)
