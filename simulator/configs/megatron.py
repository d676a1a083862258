"""What Megatron-LM does where its arguments say nothing, and the model that they describe."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from foretrace.simulator.configs.deepspeed import shares_states
from foretrace.simulator.configs.megatron_layout import stage_counts
from foretrace.simulator.configs.rules import MODEL, Assumed, Leave, Read, Reading, switch, whole
from foretrace.simulator.errors import ConfigError
from foretrace.simulator.framework import load_framework
from foretrace.simulator.models.hf_llama import pattern
from foretrace.simulator.models.model import Model
from foretrace.simulator.models.sizes import MOST_LAYERS
from foretrace.simulator.models.sources import load_model, other_names
from foretrace.simulator.nearest import near_multiples

VOCABULARIES: Final[Mapping[str, int]] = MappingProxyType(
    {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000, "BertWordPieceLowerCase": 30522}
)
"""Tokens of tokenizers whose size is the same everywhere."""


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


def _vocabulary_of(tokenizer: Any) -> Any:
    return VOCABULARIES.get(tokenizer, Leave("its size is not known: --vocab-size says it"))


READERS: Final[Mapping[str, Read]] = MappingProxyType(
    {
        "bucket_mib": _bucket_mib,
        "comma_list": comma_list,
        "fused_router": switch(FUSED_ROUTER_LAUNCHES),
        "layout": stage_counts,
        "moe_layers": _moe_layers,
        "tokenizer": _vocabulary_of,
    }
)
"""Readers of its own, by heading of ``megatron.toml``."""

_NEEDED: Final = {"n_layers": "num-layers", "hidden": "hidden-size", "n_heads": "num-attention-heads"}

_OF_SHAPE: Final = (
    *("positions", "learned_positions", "biases", "grouped_query", "vocabulary", "padded_vocab"),
    *("shared_expert_hidden", "latent_attention", "qk_head_dim", "moe_layers"),
)
"""Facts that only the model needs."""

_OF_LATENT: Final = ("model.kv_lora_rank", "model.q_lora_rank", "model.rope_head_dim", "model.v_head_dim")


def finish(reading: Reading, given: Mapping[str, Any]) -> None:
    """Add Megatron-LM's defaults, and the fields of the model unless *given* names one."""
    facts = reading.facts
    reading.assume("framework", "megatron", "whose arguments these are")
    reading.assume("precision", "fp32", "neither --bf16 nor --fp16 is given")
    reading.assume("sequence_parallel", value=False, reason="off without --sequence-parallel")
    reading.assume(
        "sharding", "zero1" if facts.pop("distributed", False) else "ddp", "--use-distributed-optimizer"
    )
    if (facts["framework"], facts["sharding"], facts["precision"]) == ("megatron-deepspeed", "ddp", "bf16"):
        shares_states(reading)
    reading.assume("convention.overlap_grad_reduce", value=False, reason="off without --overlap-grad-reduce")
    if facts["sharding"] == "ddp":
        facts.pop("convention.overlap_param_gather", None)
    _recompute(reading)
    _capacity(reading)
    _stages(facts, reading.where)
    if facts.get("virtual_stages", 1) > 1 or "layers_per_virtual_stage" in facts:
        reading.assume("schedule", "interleaved-1f1b", "several stages per rank")
    # A model that is named goes before sizes, which would only contradict it.
    if given.get("model"):
        for name in [name for name in facts if name.startswith(MODEL)]:
            del facts[name]
    else:
        _model(reading)
    for name in (*_OF_SHAPE, "pad_vocab_to"):
        facts.pop(name, None)


def _recompute(reading: Reading) -> None:
    """Turn granularity, method and number of layers into ours: a block recomputes its first layers."""
    facts = reading.facts
    n_layers, method = facts.pop("recompute_num_layers", None), facts.pop("form", None)
    if facts.get("recompute") == "full" and method == "block" and n_layers:
        facts["recompute_layers"] = n_layers


def _capacity(reading: Reading) -> None:
    """Keep the capacity of experts if they are filled to it, or cut: else they compute what they are sent."""
    facts = reading.facts
    filled = facts.pop("filled_experts", False) or facts["framework"] == "megatron-deepspeed"
    if not filled and facts.get("capacity_factor", 0.0) >= 1:
        reading.ignore(
            ("capacity_factor",), "experts get equal shares here: none is cut, and none is filled up to it"
        )


def _stages(facts: dict[str, Any], where: str) -> None:
    """Turn switches for the ends of the model into one setting, and a list of stages into those of a rank.

    Raises:
        ConfigError: the stages that are listed do not go round the pipeline.
    """
    listed, pp = facts.get("layers_per_stage"), facts.get("pp", 1)
    if listed and len(listed) % pp:
        raise ConfigError(
            f"{where}: {len(listed)} stages of the layout do not go round pp={pp}; "
            f"{near_multiples(len(listed), pp)} stages would work"
        )
    if listed and len(listed) > pp:
        facts["virtual_stages"] = len(listed) // pp
    ends = facts.pop("counted_embedding", False), facts.pop("counted_head", False)
    if any(ends):
        facts["counted_ends"] = {(True, True): "both", (True, False): "embedding"}.get(ends, "head")


def _model(reading: Reading) -> None:
    """Complete the fields of the model.

    Raises:
        ConfigError: an argument that describes the model is missing.
    """
    facts, where = reading.facts, reading.where
    for name, argument in _NEEDED.items():
        if MODEL + name not in facts:
            raise ConfigError(
                f"{where}: --{argument} is missing, and no --model is given: which model is it?"
            )
    hidden, heads = facts["model.hidden"], facts["model.n_heads"]
    gated = facts.get("model.gated", False)
    # Groups without the switch mean nothing: then there are as many as heads.
    if not facts.get("grouped_query"):
        facts["model.n_kv_heads"] = heads
    reading.assume("model.gated", value=False, reason="no --swiglu")
    # Megatron-LM keeps as many parameters as without a gate, in whole multiples of 64.
    ffn_hidden = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
    reading.assume("model.ffn_hidden", ffn_hidden, "no --ffn-hidden-size")
    reading.assume("model.n_kv_heads", heads, "no --num-query-groups")
    reading.assume("model.norm", "layernorm", "--normalization is LayerNorm unless given")
    reading.assume("model.tied_embeddings", value=True, reason="no --untie-embeddings-and-output-weights")
    reading.assume("model.dropout", value=True, reason="--hidden-dropout is 0.1 unless given")
    if facts.get("learned_positions", True):
        reading.assume("model.max_positions", facts.get("positions", 0), "positions are learned unless given")
    for name in ("qkv_bias", "proj_bias", "mlp_bias"):
        reading.assume(f"model.{name}", facts.get("biases", True), "--disable-bias-linear")
    complete_experts(facts)
    complete_latent(reading)
    _sparse_layers(facts, where)
    # At least one: no heads are refused later, with a message.
    reading.assume("model.head_dim", hidden // max(heads, 1), "no --kv-channels")
    _vocabulary(reading)


def complete_experts(facts: dict[str, Any]) -> None:
    """Complete a mixture of experts: without a width of their own experts are as wide as a dense MLP."""
    if not facts.get("model.n_experts"):
        return
    facts.setdefault("model.moe_ffn_hidden", facts["model.ffn_hidden"])
    facts.setdefault("model.top_k", 2)  # arguments.py, --moe-router-topk
    shared = facts.get("shared_expert_hidden", 0)
    if shared:
        facts["model.n_shared_experts"] = max(shared // facts["model.moe_ffn_hidden"], 1)


def _sparse_layers(facts: dict[str, Any], where: str) -> None:
    """Say which layers have experts: those behind the first dense ones, or those of a pattern.

    Raises:
        ConfigError: more or fewer layers are listed than there are.
    """
    n, listed = facts["model.n_layers"], facts.get("moe_layers", 1)
    if not facts.get("model.n_experts") or listed == 1:
        return
    # transformer_block.py: layers are counted from 0, and every so many begins with the first one.
    routed = listed if isinstance(listed, list) else [int(i % listed == 0) for i in range(n)]
    if len(routed) != n:
        raise ConfigError(f"{where}: --moe-layer-freq lists {len(routed)} layers of {n}")
    if routed == sorted(routed):
        facts["model.n_dense_layers"] = routed.count(0)
        return
    mixer = "latent" if facts.get("latent_attention") else "attention"
    facts["model.pattern"] = pattern([f"{mixer}+{'moe' if one else 'mlp'}" for one in routed])


def complete_latent(reading: Reading) -> None:
    """Complete latent attention; defaults as in megatron/training/arguments.py, its group mla.

    Where it is off, its sizes may still be given, and mean nothing.
    """
    facts = reading.facts
    if not facts.get("latent_attention"):
        reading.ignore(_OF_LATENT, "attention is not latent")
        return
    facts.setdefault("model.kv_lora_rank", 32)
    facts.setdefault("model.rope_head_dim", 64)
    facts.setdefault("model.v_head_dim", 128)
    facts["model.head_dim"] = facts.get("qk_head_dim", 128) + facts["model.rope_head_dim"]


def _vocabulary(reading: Reading) -> None:
    """Pad the vocabulary as Megatron-LM does: to a multiple of 128 on every tensor-parallel rank."""
    facts = reading.facts
    size = facts.get("model.vocab", facts.get("vocabulary"))
    given = {one.key for one in reading.used} | {one.key for one in reading.ignored}
    if size is None and "merge-file" in given and "tokenizer-type" not in given:
        size = VOCABULARIES["GPT2BPETokenizer"]
        reading.assumed.append(Assumed("vocabulary", size, "--merge-file without --tokenizer-type: GPT-2's"))
    if size is None and (named := _of_tokenizer(reading)):
        size = named.vocab
        reading.assumed.append(Assumed("vocabulary", size, f"its tokenizer is that of {named.name}"))
    if (padded := facts.get("padded_vocab")) is None:
        if size is None:
            raise ConfigError(
                f"{reading.where}: vocab-size is missing, and its tokenizer is not read: add it (128256 for "
                "Llama 3), or --model names a preset"
            )
        # For each tensor-parallel rank, so that all have as many rows.
        multiple = facts.get("pad_vocab_to", 128) * facts.get("tp", 1)
        padded = -(-size // multiple) * multiple
    facts["model.vocab"] = padded


def _of_tokenizer(reading: Reading) -> Model | None:
    """Return the preset whose tokenizer the file names by an id of the hub; None if there is none."""
    said = {one.key: one.value for one in reading.used} | {one.key: one.value for one in reading.ignored}
    names = (said.get(key) for key in ("tokenizer-model", "tokenizer-name-or-path"))
    return next((load_model(str(name)) for name in names if name in other_names()), None)
