"""Megatron-LM's arguments, and those of torchrun beside them: what each means here.

Names as in NVIDIA/Megatron-LM megatron/training/arguments.py and its examples, dashes or underscores.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from foretrace.simulator.configs import rules
from foretrace.simulator.configs.megatron_ignored import IGNORED
from foretrace.simulator.configs.megatron_layout import stage_counts
from foretrace.simulator.configs.rules import Leave, Rule, Use, one_of, some, whole, words
from foretrace.simulator.framework import load_framework
from foretrace.simulator.models.sizes import MOST_LAYERS

VOCABULARIES: Final[Mapping[str, int]] = MappingProxyType(
    {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000, "BertWordPieceLowerCase": 30522}
)
"""Tokens of tokenizers whose size is the same everywhere."""


def on(fact: str, *, gives: Any = True) -> Use:
    """Return the rule of a switch: present, it gives something."""
    return Use(fact, lambda value: gives if str(value).lower() in ("true", "1") else None)


def _bucket_mib(value: Any) -> float:
    """Return the size of a bucket of so many elements of fp32 gradients."""
    # 4 bytes for each element, in MiB.
    return whole(value) * 4 / 2**20


def comma_list(value: Any) -> str:
    """Names with commas between, of a list or of words with blanks between."""
    return ",".join(value.split() if isinstance(value, str) else map(str, value))


def _moe_layers(value: Any) -> Any:
    """Return which layers have experts: every so many, or a 1 for each, as ``([0]*3+[1]*58)`` lists them."""
    if str(value).isdigit():
        return whole(value)
    try:
        found = _listed(ast.parse(str(value).strip(), mode="eval").body)
    except (SyntaxError, RecursionError):
        found = 0
    if not isinstance(found, list) or not set(found) <= {0, 1}:
        raise ValueError("every so many layers, or lists of 0 and 1 such as ([0]*3+[1]*58)")
    return found


def _listed(node: ast.expr) -> list[int] | int:
    """Return what an expression of whole numbers, lists of them, + and * comes to; 0 if it is another.

    Lists of more than ``MOST_LAYERS`` are none.
    """
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, int) else 0
    if isinstance(node, ast.List):
        return [one for one in map(_listed, node.elts) if isinstance(one, int)]
    if not isinstance(node, ast.BinOp):
        return 0
    left, right = _listed(node.left), _listed(node.right)
    if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
        return left + right if len(left) + len(right) <= MOST_LAYERS else 0
    if isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int):
        return left * right if len(left) * right <= MOST_LAYERS else 0
    return 0


FUSED_ROUTER_LAUNCHES: Final = load_framework("nemo").router_launches
"""Of a profile whose recipes fuse the choice of experts; simulator/frameworks/nemo.toml has the source."""

RULES: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        "nproc-per-node": Use("gpus_per_node", whole),
        "nnodes": Use("nodes", whole),
        "num-gpus": Use("gpus_per_node", whole),
        "num-nodes": Use("nodes", whole),
        "tensor-model-parallel-size": Use("tp", whole),
        "pipeline-model-parallel-size": Use("pp", whole),
        "context-parallel-size": Use("cp", whole),
        "expert-model-parallel-size": Use("ep", whole),
        "moe-expert-parallel-size": Use("ep", whole),
        "expert-tensor-parallel-size": Use("expert_tp", whole),
        "num-layers-per-virtual-pipeline-stage": Use("layers_per_virtual_stage", whole),
        "num-virtual-stages-per-pipeline-rank": Use("virtual_stages", whole),
        "decoder-first-pipeline-num-layers": Use("first_stage_layers", whole),
        "decoder-last-pipeline-num-layers": Use("last_stage_layers", whole),
        "pipeline-model-parallel-layout": Use("layers_per_stage", stage_counts),
        "account-for-embedding-in-pipeline-split": on("counted_embedding"),
        "account-for-loss-in-pipeline-split": on("counted_head"),
        "overlap-p2p-communication": on("overlap_p2p"),
        "no-overlap-p2p-communication": on("overlap_p2p", gives=False),
        "sequence-parallel": on("sequence_parallel"),
        "tp-comm-overlap": on("convention.async_tp"),
        "moe-shared-expert-overlap": on("convention.overlap_shared_experts"),
        "cp-comm-type": Use(
            "convention.context",
            words(p2p="ring", a2a="ulysses", all_gather="all_gather", allgather="all_gather"),
        ),
        "world-size": Use("gpus", whole),  # this and five more: as AICB, which makes workloads, has them
        "pipeline-model-parallel": Use("pp", whole),
        "micro-batch": Use("micro_batch", whole),
        "global-batch": Use("global_batch", whole),
        "ep": Use("ep", whole),
        "sp": on("sequence_parallel"),
        "micro-batch-size": Use("micro_batch", whole),
        "global-batch-size": Use("global_batch", whole),
        "seq-length": Use("seq_len", whole),
        "bf16": on("precision", gives="bf16"),
        "fp16": on("precision", gives="fp16"),
        "fp8-format": Use("fp8", words(hybrid=True, e4m3=True)),
        "fp8-recipe": Use(
            "recipe", words(delayed="delayed", tensorwise="current", mxfp8="mxfp8", blockwise="blockwise")
        ),
        "accumulate-allreduce-grads-in-fp32": on("fp32_gradients"),
        "grad-reduce-in-bf16": on("convention.reduces_in_16_bit"),
        "use-distributed-optimizer": on("distributed"),
        "data-parallel-sharding-strategy": Use(
            "sharding", words(no_shard="ddp", optim="zero1", optim_grads="zero2", optim_grads_params="fsdp")
        ),
        "use-torch-fsdp2": on("sharding", gives="fsdp"),
        "deepspeed": on("framework", gives="megatron-deepspeed"),
        "deepspeed-config": Leave("a file of its own: give it beside this one"),
        "pp-partition-method": Leave("--layers-per-stage or --counted-ends say it"),
        "moe-train-capacity-factor": Use("capacity_factor", float),
        "no-pipeline-parallel": Leave("--pipeline-model-parallel-size says it"),
        "deepspeed-activation-checkpointing": Leave(
            "who recomputes, not what: --checkpoint-activations says it"
        ),
        "embed-layernorm": Leave("one norm beside those of all layers"),
        "zero-stage": Use(
            "sharding", lambda value: one_of({0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"})(int(value))
        ),
        "overlap-grad-reduce": on("convention.overlap_grad_reduce"),
        "overlap-param-gather": on("convention.overlap_param_gather"),
        "fp8-param-gather": on("convention.fp8_param_gather"),
        "ddp-bucket-size": Use("convention.bucket_mib", _bucket_mib),
        "no-gradient-accumulation-fusion": on("convention.fused_wgrad", gives=False),
        "optimizer": Use("optimizer", {"sgd": "sgd-momentum", "muon": "muon", "dist_muon": "muon"}.get),
        "exp-avg-dtype": Use("optimizer", {"bf16": "adamw-bf16", "fp8": "adamw-8bit"}.get),
        "optimizer-cpu-offload": on("offload_optimizer", gives="cpu"),
        "cpu-offloading-num-layers": Use("offload_layers", whole),
        "recompute-activations": on("recompute", gives="selective"),
        "recompute-granularity": Use("recompute", words(selective="selective", full="full")),
        "recompute-modules": Use("recompute_modules", comma_list),
        "recompute-method": Use("form", words(uniform="uniform", block="block")),
        "recompute-num-layers": Use("recompute_num_layers", some),
        "checkpoint-activations": on("recompute", gives="full"),
        "use-flash-attn": on("flash_attention"),
        "attention-backend": Use(
            "flash_attention", words(flash=True, fused=True, auto=True, unfused=False, local=False)
        ),
        "moe-expert-capacity-factor": Use("capacity_factor", float),
        "moe-pad-expert-input-to-capacity": on("filled_experts"),
        "moe-token-dispatcher-type": Use(
            "convention.expert_dispatch", words(alltoall="copies", allgather="copies", flex="once")
        ),
        "activation-func-fp8-input-store": on("convention.fp8_activation_inputs"),
        "moe-router-fusion": on("convention.router_launches", gives=FUSED_ROUTER_LAUNCHES),
        "moe-enable-deepep": on("convention.expert_dispatch", gives="once"),
        "overlap-moe-expert-parallel-comm": on("schedule", gives="combined-1f1b"),
        "clip-grad": Use("convention.grad_norm", rules.above_zero),
        # The model.
        "num-layers": Use("model.n_layers", whole),
        "hidden-size": Use("model.hidden", whole),
        "ffn-hidden-size": Use("model.ffn_hidden", whole),
        "num-attention-heads": Use("model.n_heads", whole),
        "kv-channels": Use("model.head_dim", whole),
        "group-query-attention": on("grouped_query"),
        "num-query-groups": Use("model.n_kv_heads", whole),
        "max-position-embeddings": Use("positions", whole),
        "position-embedding-type": Use(
            "learned_positions",
            words(
                learned_absolute=True,
                **dict.fromkeys(("rope", "yarn", "mrope", "relative", "alibi", "none", "rotary"), False),
            ),
        ),
        "use-rotary-position-embeddings": on("learned_positions", gives=False),
        "no-position-embedding": Leave("with --position-embedding-type: that says it"),
        "swiglu": on("model.gated"),
        "normalization": Use("model.norm", words(LayerNorm="layernorm", RMSNorm="rmsnorm")),
        "untie-embeddings-and-output-weights": on("model.tied_embeddings", gives=False),
        "disable-bias-linear": on("biases", gives=False),
        "add-qkv-bias": on("model.qkv_bias"),
        "qk-layernorm": on("model.qk_norm"),
        "vocab-size": Use("model.vocab", whole),
        "padded-vocab-size": Use("padded_vocab", whole),
        "pad-vocab-size-to": Use("padded_vocab", whole),
        "make-vocab-size-divisible-by": Use("pad_vocab_to", whole),
        "tokenizer-type": Use(
            "vocabulary",
            lambda value: VOCABULARIES.get(value, Leave("its size is not known: --vocab-size says it")),
        ),
        "hidden-dropout": Use("model.dropout", rules.above_zero),
        "num-experts": Use("model.n_experts", lambda value: whole(value) if whole(value) > 1 else None),
        "moe-router-topk": Use("model.top_k", whole),
        "moe-layer-freq": Use("moe_layers", _moe_layers),
        "moe-ffn-hidden-size": Use("model.moe_ffn_hidden", whole),
        "moe-shared-expert-intermediate-size": Use("shared_expert_hidden", whole),
        "multi-latent-attention": on("latent_attention"),
        "q-lora-rank": Use("model.q_lora_rank", whole),
        "kv-lora-rank": Use("model.kv_lora_rank", whole),
        "qk-head-dim": Use("qk_head_dim", whole),
        "qk-pos-emb-head-dim": Use("model.rope_head_dim", whole),
        "v-head-dim": Use("model.v_head_dim", whole),
        "mtp-num-layers": Use("model.n_mtp", some),
        **IGNORED,
    }
)
"""What each argument means."""
