"""What people write in tables of training runs, and which setting each spelling means.

Every source has its own words: ``ZeRO-1``, ``distributed optimizer`` and ``zero1`` are one sharding. What has
no counterpart is refused with the words that have one. Notes quote recipes and modes that a run was started
with.
"""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

from foretrace.simulator.configs.megatron import FUSED_ROUTER_LAUNCHES
from foretrace.simulator.errors import TableError
from foretrace.simulator.job import RECOMPUTE_MODULES
from foretrace.simulator.workload.recipes import recipe_of

UNSTATED: Final = re.compile(
    r"\W*|n/?a|nan|null|unknown|tbd|not (?:stated|given|known|available|specified)|unspecified|see notes"
)
"""What tables write where a source does not say, in lower case."""

YES: Final = frozenset({"true", "yes", "on", "1", "1.0", "y", "t", "enabled"})
NO: Final = frozenset({"false", "no", "off", "0", "0.0", "n", "f", "disabled", "none"})

GATED: Final = re.compile(r"\w*glu(?:[ _-].*)?")
UNGATED: Final = re.compile(r"(?:quick|new|fast)?[ _-]?gelu\w*|silu|swish|(?:squared|square)?[ _-]?relu2?")
"""Activations by name, for a column that asks whether there is a gate."""

UNFUSED: Final = re.compile(r"eager|math|naive|native|vanilla|unfused|standard|torch|core|local")
"""Attention that writes its scores to memory; any other name is that of a fused kernel."""

SHARDINGS: Final = (
    (r"noshard", "ddp"),
    (r"fsdp|zero3|stage3|fullshard|fullyshard|hybridshard|hsdp|shardgradop|mics", "fsdp"),
    (r"zero2|stage2", "zero2"),
    (r"zero1|stage1|dist\w*opt", "zero1"),
    (r"(?:none|no|false|off|d?dp|replicated\w*|zero0|stage0|nosharding|dataparallel\w*)?(?:ddp)?", "ddp"),
)
"""What tables call a sharding, in lower case without what separates words; the first that is found counts."""

KEEPS_PARAMETERS: Final = re.compile(r"shardgradop|shardzero2|(?=.*fsdp|.*hsdp)(?=.*(?:zero|stage)2)")
"""FSDP that frees gathered parameters after backward only, in the same letters. Optimizer and gradients are
sharded, as in ZeRO 2; parameters too, from step to step (torch.distributed.fsdp ``SHARD_GRAD_OP``)."""

STAGES: Final = {"0": "ddp", "1": "zero1", "2": "zero2", "3": "fsdp"}
"""A stage of ZeRO alone."""

FEW_BITS: Final = re.compile(r"fp8|float8|fp4|float4|e4m3|e5m2|rowwise|tensorwise|\b8-?bit float")
RECIPES: Final = (
    (r"nvfp4|fp4|float4", "nvfp4"),
    (r"mx", "mxfp8"),
    (r"row-?wise", "rowwise"),
    (r"tensor-?wise", "tensorwise"),
    (r"\bds\b|delayed", "delayed"),
    (r"\bcs\b|current|dynamic", "current"),
    (r"\bsc\b|block|sub-?channel|deepseek|128x128", "blockwise"),
)
"""How products in few bits are quantised; cs, ds and sc are current, delayed and sub-channel
(NVIDIA-NeMo/Megatron-Bridge scripts/performance/utils/precision.py)."""

KEPT: Final = (
    (r"bf16|bfloat16", "bf16"),
    (r"fp16|float16|\bhalf\b", "fp16"),
    (r"fp32|float32|\bsingle\b", "fp32"),
)
"""Precision of what is kept and sent, by how it is written."""


class Precision(NamedTuple):
    """What a table's word for precision means.

    Attributes:
        kept: of parameters in compute, activations and their communication.
        few_bits: products of layers run in 8 bits or fewer.
        recipe: how they are quantised; empty: as the framework does.
    """

    kept: str
    few_bits: bool
    recipe: str


def stated(text: str) -> str:
    """Return *text* as it is, nothing if it says that nothing is stated.

    >>> stated("see notes"), stated("N/A"), stated("none")
    ('', '', 'none')
    """
    return "" if UNSTATED.fullmatch(text.lower().strip()) else text


def yes_or_no(text: str, column: str) -> bool | None:
    """Return whether *text* says yes; None if it states nothing.

    Raises:
        TableError: it says something else.

    >>> yes_or_no("On", "sp"), yes_or_no("no", "sp"), yes_or_no("swiglu", "gated"), yes_or_no("-", "sp")
    (True, False, True, None)
    """
    word = stated(text).lower().strip()
    if not word:
        return None
    first = word if word in YES | NO else re.split(r"[ ,;(]", word)[0]
    if first in YES or (column == "gated" and GATED.fullmatch(word)):
        return True
    if first in NO or (column == "gated" and UNGATED.fullmatch(word)):
        return False
    raise TableError(f"{column}={text!r}: true or false")


def fused_attention(text: str) -> bool | None:
    """Return whether *text* speaks of a fused attention kernel; None if it states nothing.

    >>> fused_attention("FA2"), fused_attention("eager"), fused_attention("false"), fused_attention("")
    (True, False, False, None)
    """
    word = stated(text).lower().strip()
    if not word:
        return None
    if word in YES | NO:
        return word in YES
    return not UNFUSED.fullmatch(word)


def has_dropout(notes: str, *, default: bool) -> bool:
    """Return whether *notes* say that dropout is on or off, *default* if neither.

    >>> has_dropout("defaults 0.1: dropout ON", default=False), has_dropout("", default=False)
    (True, False)
    """
    found = re.search(r"dropout (on|off)\b", notes.lower())
    return found[1] == "on" if found else default


def attention_kernel(text: str) -> str:
    """Return the attention kernel that *text* names, as devices list it; nothing if it names none.

    >>> attention_kernel("FlashAttention-3"), attention_kernel("cuDNN"), attention_kernel("true")
    ('flash3', 'cudnn', '')
    """
    word = text.lower()
    if found := re.search(r"\b(?:fa|flash[ _-]?(?:attn|attention)?)[ _-]?v?([1-4])\b", word):
        return f"flash{found[1]}"
    return next((name for name in ("cudnn", "triton") if name in word), "")


def precision_of(text: str) -> Precision:
    """Return what *text* says about precision; bf16 if it states nothing.

    Raises:
        TableError: it names none that is simulated.

    >>> precision_of("BF16-mixed"), precision_of("FP8_CS").recipe, precision_of("float8 rowwise").recipe
    (Precision(kept='bf16', few_bits=False, recipe=''), 'current', 'rowwise')
    """
    word = re.sub(r"[_ +/]", "-", stated(text).lower().strip()) or "bf16"
    kept = next((name for form, name in KEPT if re.search(form, word)), "")
    if FEW_BITS.search(word) and "mxfp4" not in word:
        named = next((name for form, name in RECIPES if re.search(form, word)), "")
        return Precision(kept or "bf16", few_bits=True, recipe=recipe_of(word) or named)
    if not kept:
        raise TableError(
            f"precision {text!r}: one of bf16, fp16, fp32, fp8 (and -delayed, -current, -blockwise, "
            "-tensorwise, -rowwise), mxfp8, nvfp4"
        )
    return Precision(kept, few_bits=False, recipe="")


def sharding_of(text: str) -> str:
    """Return the sharding that *text* names, of ``simulator.job.SHARDINGS``; ``ddp`` if it states nothing.

    Raises:
        TableError: it names none.

    >>> sharding_of("ZeRO-1 (group 8)"), sharding_of("FULL_SHARD"), sharding_of("3"), sharding_of("none(DDP)")
    ('zero1', 'fsdp', 'fsdp', 'ddp')
    """
    word = _letters(text)
    if word in STAGES:
        return STAGES[word]
    for form, name in SHARDINGS:
        if (re.fullmatch if form == SHARDINGS[-1][0] else re.search)(form, word):
            return name
    raise TableError(f"sharding {text!r}: one of none, ddp, zero1, zero2, zero3, fsdp, hsdp")


def keeps_parameters(text: str) -> bool:
    """Return whether *text* names FSDP whose gathered parameters stay from forward to backward.

    >>> keeps_parameters("ShardingStrategy.SHARD_GRAD_OP"), keeps_parameters("FSDP (ZeRO-2)")
    (True, True)
    >>> keeps_parameters("ZeRO-2"), keeps_parameters("fsdp2(zero3)")
    (False, False)
    """
    return bool(KEEPS_PARAMETERS.search(_letters(text)))


def _letters(text: str) -> str:
    """Return letters and digits of *text* in lower case, nothing if it says that nothing is stated."""
    return re.sub(r"[^a-z0-9]", "", stated(text).lower())


def is_hybrid(text: str) -> bool:
    """Return whether *text* says that parameters are sharded inside groups, without saying how large.

    >>> is_hybrid("HYBRID_SHARD"), is_hybrid("HSDP"), is_hybrid("fsdp/hsdp")
    (True, True, False)
    """
    word = text.lower()
    return bool(re.search(r"hsdp|hybrid", word)) and not re.search(r"\bfsdp\b", word)


SCHEDULES: Final = (
    (r"combined|batch-level", "combined-1f1b"),
    (r"interleaved-?(?:zb|zero-?bubble)", "interleaved-zb"),
    (r"dual-?pipe-?v", "dualpipe-v"),
    (r"dual-?pipe", "dualpipe"),
    (r"\bv-?half|zbv-?half", "v-half"),
    (r"\bv-?min|zbv-?min", "v-min"),
    (r"zb-?v|zbv", "zb-v"),
    (r"zb-?h?2", "zb-h2"),
    (r"zb|zero-?bubble", "zb-h1"),
    (r"looped|\bbfs\b", "looped-bfs"),
    (r"interleav|virtual|\bvpp\b", "interleaved-1f1b"),
    (r"g-?pipe|fill-?drain|all-?f(?:orward)?-?all-?b", "gpipe"),
    (r"1f1b|pipedream|one-?f", "1f1b"),
)
"""Pipeline schedules by how people write them; the first that is found counts."""


def schedule_named(text: str) -> str:
    """Return the schedule that *text* names, a key of ``simulator.schedules.SCHEDULES``; nothing if none.

    Raises:
        TableError: it names another.

    >>> schedule_named("1f1b-interleaved"), schedule_named("GPipe"), schedule_named("none")
    ('interleaved-1f1b', 'gpipe', '')
    """
    word = re.sub(r"[_ ]", "-", stated(text).lower().strip())
    if not word or word in NO:
        return ""
    for form, name in SCHEDULES:
        if re.search(form, word):
            return name
    raise TableError(f"schedule {text!r}: one of gpipe, 1f1b, interleaved-1f1b, zb-h1, zb-v, dualpipe")


# What is computed again.

PER_STAGE: Final = re.compile(r"(\d+) layers? ?(?:/|per|a) ?stage|\bblock\D{0,12}(\d+)|(\d+) block")
"""So many layers of each stage, the method that Megatron-LM calls ``block``."""

EVERY: Final = re.compile(r"every (\d+)(?:nd|rd|th|st)? ?(?:layer|block)?|\b1 ?(?:/|of|in) ?(\d+)\b")
OTHER: Final = re.compile(r"every (?:other|second)(?: layer| block)?\b(?! \w)|alternate")
"""One layer out of so many."""

MODULES: Final = (
    ("core_attn", r"core|attention|attn"),
    ("layernorm", r"norm"),
    ("mla_up_proj", r"mla|up[ _]proj"),
    ("mlp", r"\bmlp\b|\bffn\b"),
    ("moe_act", r"moe[ _]act"),
    ("moe", r"\bmoe\b(?![ _]act)"),
    ("shared_experts", r"shared"),
)
"""Parts of a layer, of ``simulator.job.RECOMPUTE_MODULES``, by how people write them."""

REMAT_POLICIES: Final = (
    (r"nothing_saveable|save_(?:qkv|out)_proj|qkv_proj_offloaded", {"recompute": "full"}),
    (r"everything_saveable", {"recompute": "none"}),
    (r"with_context_except_mlp", {"recompute": "selective", "recompute_modules": "layernorm,mlp"}),
    (r"save_dot\w*_except_mlp", {"recompute": "selective", "recompute_modules": "core_attn,layernorm,mlp"}),
    (r"minimal_(?:flash|with_context)", {"recompute": "selective", "recompute_modules": "layernorm"}),
    (
        r"minimal|save_dot|dots_saveable|checkpoint_dots|dots_with_no_batch_dims",
        {"recompute": "selective", "recompute_modules": "core_attn,layernorm"},
    ),
)
"""Policies of JAX, which name what is kept, and what is then computed again; the first that is found counts.

``minimal`` keeps results of products whose operands have no batch dimension: all but attention's own. Where
only a product or two of a layer are kept, all of it is nearest. Reference: AI-Hypercomputer/maxtext
``layers/decoders.py``, ``get_remat_policy``.
"""

ALL_AGAIN: Final = re.compile(
    r"full|all\b|uniform|whole|every ?layer|per[ _-]?layer"
    r"|(?:activation|gradient)[ _-]?(?:check ?point|recomp)"
)
SOME_AGAIN: Final = re.compile(r"selective|\bsac\b|(?:per|op)[ _-]?(?:op|level)|^ops?$")
NOT_AGAIN: Final = re.compile(r"none\b.*|no (?:recomp|ac|check|remat).*|without.*")


def recomputed(text: str, notes: str = "") -> dict[str, Any]:
    """Return what *text* says about recomputation: how, and of which layers; *notes* may list modules.

    Raises:
        TableError: it names nothing that is simulated.

    >>> recomputed("partial-full (5 layers/stage)"), recomputed("selective (every 2nd layer)")
    ({'recompute': 'full', 'recompute_layers': 5}, {'recompute': 'full', 'recompute_every': 2})
    >>> recomputed("Gradient checkpointing"), recomputed("off"), recomputed("moe_act")["recompute_modules"]
    ({'recompute': 'full'}, {'recompute': 'none'}, 'moe_act')
    """
    word = text.lower().strip()
    if not word or word in NO or NOT_AGAIN.fullmatch(word):
        return {"recompute": "none"}
    for form, settings in REMAT_POLICIES:
        if re.search(form, word):
            return dict(settings)
    found = _of_layers(word) or _of_modules(word, notes)
    if not found:
        raise TableError(f"recompute {text!r}: one of none, selective, full, or modules of a layer")
    return found


def _of_layers(word: str) -> dict[str, Any]:
    """Return the settings if *word* counts layers; nothing if it does not."""
    if found := PER_STAGE.search(word):
        return {"recompute": "full", "recompute_layers": int(next(filter(None, found.groups())))}
    if (found := EVERY.search(word)) or OTHER.search(word):
        every = int(found[1] or found[2]) if found else 2
        return {"recompute": "full", "recompute_every": every} if every > 1 else {"recompute": "full"}
    return {}


def _of_modules(word: str, notes: str) -> dict[str, Any]:
    """Return the settings if *word* says how much of every layer is meant; nothing if it does not."""
    named = ",".join(name for name, form in MODULES if re.search(form, word))
    if SOME_AGAIN.search(word):
        modules = _modules_noted(notes) or named
        return {"recompute": "selective", **({"recompute_modules": modules} if modules else {})}
    if word in YES or ALL_AGAIN.search(word):
        return {"recompute": "full"}
    return {"recompute": "selective", "recompute_modules": named} if named else {}


def _modules_noted(notes: str) -> str:
    """Return the modules that *notes*, which quote a recipe, list; commas between."""
    found = re.search(r'"recompute_modules": \[([^\]]*)\]', notes)
    return ",".join(name for name in RECOMPUTE_MODULES if f'"{name}"' in found[1]) if found else ""


# Overlap, recipes and modes.

ON: Final = True
OFF: Final = False

SAID: Final = (
    (r"no --overlap-grad-reduce", (("overlap_grad_reduce", OFF), ("overlap_param_gather", OFF))),
    (
        r"(?:dp )?grad/param (?:overlap|sync) on|overlap_grad_reduce=true",
        (("overlap_grad_reduce", ON), ("overlap_param_gather", ON)),
    ),
    (r"no tp overlap|tp overlap off|(?<!mc_)tp_comm_overlap=false", (("async_tp", OFF),)),
    (r"async tp|tp comm overlap.*? on|(?<!mc_)tp_comm_overlap=true", (("async_tp", ON),)),
    (r"bf16 grad sync", (("reduces_in_16_bit", ON),)),
    (r"overlap_param_gather=true", (("overlap_param_gather", ON),)),
)
"""What people write, in lower case, and the conventions it means; every pattern that is found counts."""

WHOLE_STEP: Final = r"moe routing.*recipe v0\.6\.\d+:\w*_fp8mx_"
"""Recipes for experts in MXFP8 that are one CUDA graph, exchange tokens once and beside other computing.

Since 0.6 Megatron-Bridge says so in functions that its recipes call, not in their lists of settings:
``_enable_hybridep_full_iteration_mxfp8`` and ``_apply_gpt_oss_120b_full_iter_fp8mx_configs``
(NVIDIA-NeMo/Megatron-Bridge, src/megatron/bridge/perf_recipes).
"""

FILLED: Final = r"(?:\bnemo\b.* (?:mixtral|grok)|\btoken-?drop\b)"
"""Runs whose experts are filled to a capacity factor of 1 by scripts, which also graph them on Blackwell.

NeMo's ``MegatronTokenDropCallback`` in scripts/performance/llm/pretrain_grok1_314b.py @ 7a8f1cc7 and, at
v2.3.0, nemo/collections/llm/recipes/mixtral_8x7b.py; ``cuda_graphs`` in recommended_model_configs of v2.3.0,
and in grok1/launch.sh of NVIDIA/dgxc-benchmarking @ 68eaf7e1. ``apply_moe_token_drop`` of Megatron-Bridge,
scripts/performance/run_script.py and configs/qwen3 at v0.1.0.
"""

NOTED: Final = (
    (WHOLE_STEP, (("expert_dispatch", "once"), ("graphed", ("step",)), ("fused_experts", ON))),
    (
        r'"moe_flex_dispatcher_backend": "(?:hybridep|deepep)"|(?:\+|with) deepep',
        (("expert_dispatch", "once"),),
    ),
    (
        r'"cuda_graph_impl": "(?:full_iteration"|local", "cuda_graph_scope": "full_it)',
        (("graphed", ("step",)), ("fused_experts", ON)),
    ),
    (rf"{FILLED}.*\bg?b[23]00\b", (("graphed", ("attention", "mlp")),)),
    (r"mixedprecision mode default", (("reduces_in_16_bit", OFF),)),
    (r"\bin recipes/", (("router_launches", 21),)),
    (r"\bin model_configs/benchmarking/", (("router_launches", FUSED_ROUTER_LAUNCHES),)),
)
"""The same for notes, which quote the recipe or the mode that a run was started with, and for frameworks.

A step that is one CUDA graph has no host that looks at the tokens of experts, so that grouped products are
those of Transformer Engine's fuser: every such recipe in MXFP8 sets ``use_transformer_engine_op_fuser``.
Recipes of Megatron-Bridge for training set moe_router_fusion to False, those for performance to True, and so
do all files of yanring/Megatron-MoE-ModelZoo model_configs/benchmarking @ e8650517 (--moe-router-fusion).
Composer's ``DEFAULT`` reduces gradients in fp32, ``PURE`` in 16 bit (composer/trainer/mosaic_fsdp_utils.py).
"""

SCOPE: Final = re.compile(
    r'"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": (\[[^\]]*\]|"\w+")|cuda graphs of ([\w ]+)'
)
"""Modules that are CUDA graphs, as recipes list them or in words."""

SCOPES: Final = {
    "attn": "attention",
    "mlp": "mlp",
    "moe_router": "router",
    "moe_preprocess": "dispatch",
}
"""What a module is called in ``cuda_graph_scope``, and in ``simulator.framework.GRAPHED``."""

PAIRED: Final = re.compile(rf'"moe_a2a_overlap": true|overlap-moe-expert-parallel-comm|{WHOLE_STEP}')
"""Exchanges of experts run beside the computing of another micro-batch."""

EXPERT_TP: Final = re.compile(r"expert(?: tp|_tensor_parallel_size\"?:) (\d+)")
"""Ranks that every expert is cut over."""

CAPACITY: Final = re.compile(r"capacity factor:? (\d+(?:\.\d+)?)")
"""Tokens that every expert computes, over their even share."""

EMBEDDING_COUNTS: Final = re.compile(r"type:transformer\|embedding|embedding counted as a layer")
"""Embedding and tied head share of the pipeline as a layer each: DeepSpeed ``partition_method`` with a type
that both have (deepspeed/runtime/pipe/module.py, ``_partition_layers``)."""

QUANTISED: Final = re.compile(r"_fp8_(cs|ds|sc)_")
"""How a recipe's name says that products are quantised."""

SCALINGS: Final = {"cs": "current", "ds": "delayed", "sc": "blockwise"}
"""Current, delayed, sub-channel: NVIDIA-NeMo/Megatron-Bridge scripts/performance/utils/precision.py."""

P2P_ON: Final = re.compile(r"p2p overlap on")


FUSED: Final = re.compile(r"fused ((?:(?:norm|swiglu|rotary|cross entropy)(?:, | and )?)+)")
PARTS: Final = {"norm": "norm", "swiglu": "activation", "rotary": "rotary", "cross entropy": "loss"}
"""Words for what a run fused by hand, and which of ``simulator.framework.EAGER_PARTS`` that is."""


def fused_parts(notes: str) -> frozenset[str]:
    """Return what *notes* say is one kernel although the framework leaves it unfused.

    >>> sorted(fused_parts("fused norm, swiglu, rotary, cross entropy; network not stated"))
    ['activation', 'loss', 'norm', 'rotary']
    """
    found = FUSED.search(notes.lower())
    return frozenset(part for word, part in PARTS.items() if found and word in found[1])


def conventions_of(overlap: str, sharding: str, notes: str = "") -> tuple[tuple[str, object], ...]:
    """Return what *overlap*, *sharding* and *notes*, as a table has them, say about conventions.

    >>> conventions_of("DP grad/param overlap on, bf16 grad sync", "zero1")
    (('overlap_grad_reduce', True), ('overlap_param_gather', True), ('reduces_in_16_bit', True))
    >>> conventions_of("", "zero1", "MoE routing balanced; recipe v0.6.1:a_model_64gpu_gb300_fp8mx_config {}")
    (('expert_dispatch', 'once'), ('graphed', ('step',)), ('fused_experts', True))
    """
    found: dict[str, object] = {}
    for text, patterns in ((overlap.lower(), SAID), (notes.lower(), NOTED)):
        for pattern, settings in patterns:
            if re.search(pattern, text):
                found.update(settings)
    if (scope := SCOPE.search(notes.lower())) and "graphed" not in found:
        words = re.findall(r"\w+", scope[1] or scope[2])
        found["graphed"] = tuple(part for word, part in SCOPES.items() if word in words)
    if keeps_parameters(sharding):
        found["reshard_after_forward"] = OFF
    return tuple(found.items())


def p2p_of(overlap: str) -> bool | None:
    """Return whether *overlap* says that transfers between stages run beside products; None if nothing."""
    return True if P2P_ON.search(overlap.lower()) else None


def expert_tp_of(notes: str) -> int:
    """Return over how many ranks *notes* say that every expert is cut; 0 if they do not.

    >>> expert_tp_of("config table in README expert TP 1 | Grok1"), expert_tp_of("")
    (1, 0)
    """
    found = EXPERT_TP.search(notes.lower())
    return int(found.group(1)) if found else 0


def capacity_of(notes: str) -> float:
    """Return the capacity factor of experts that *notes* say or mean; 0, as many tokens as come, if none.

    >>> capacity_of("top-2, capacity factor 1.25 with padding"), capacity_of("dropless")
    (1.25, 0.0)
    >>> capacity_of("token-drop MoE (capacity)"), capacity_of("recompute not stated NeMo 25.04 mixtral-8x7b")
    (1.0, 1.0)
    """
    found = CAPACITY.search(notes.lower())
    return float(found[1]) if found else float(re.search(FILLED, notes.lower()) is not None)


def counted_ends_of(notes: str) -> str:
    """Return which ends of the model *notes* count as a layer, of ``simulator.builder.stage_layers.ENDS``.

    >>> counted_ends_of("pp-partition type:transformer|embedding"), counted_ends_of("")
    ('both', 'none')
    """
    return "both" if EMBEDDING_COUNTS.search(notes.lower()) else "none"


def scaling_of(notes: str) -> str:
    """Return the recipe of 8-bit products that *notes* name; empty if none.

    >>> scaling_of("recipe v0.5.0:QWEN3_30B_A3B_PRETRAIN_CONFIG_H100_FP8_CS_V1 {}"), scaling_of("")
    ('current', '')
    """
    found = QUANTISED.search(notes.lower())
    return SCALINGS[found.group(1)] if found else ""


def schedule_of(notes: str, virtual_stages: int) -> str:
    """Return the schedule of a run with *virtual_stages* per rank, combined if its *notes* say so.

    >>> schedule_of("", 2), schedule_of('{"moe_a2a_overlap": true}', 1)
    ('interleaved-1f1b', 'combined-1f1b')
    >>> schedule_of("MoE routing balanced; recipe v0.6.1:a_model_64gpu_gb300_fp8mx_config {}", 1)
    'combined-1f1b'
    """
    if PAIRED.search(notes.lower()):
        return "combined-1f1b"
    return "interleaved-1f1b" if virtual_stages > 1 else "1f1b"


# Conventions that a framework changed in a known month, for runs that were measured before it.

OF_TORCHTITAN: Final = ("rotary", "activation", "clamp", "loss", "projections", "heads")
"""What torchtitan's models run kernel by kernel without torch.compile, whatever the release of PyTorch."""

SINCE: Final = (
    # NVIDIA/Megatron-LM: megatron/core/distributed came in 2023, with --overlap-grad-reduce; before,
    # gradients of fp16 models were reduced after backward and in fp16 (model/distributed.py of v2.5)
    ("megatron", "2023", (("overlap_grad_reduce", False), ("reduces_in_16_bit", True))),
    # pytorch/torchtitan pull request 1033, merged 1 April 2025: torch.compile takes in the loss
    ("torchtitan", "2025-04", (("compiles_loss", False),)),
    # pytorch pull request 153666, in PyTorch 2.9 of October 2025: torch.rms_norm is one kernel
    ("torchtitan", "2025-10", (("eager", ("norm", *OF_TORCHTITAN)),)),
    # NVIDIA/NeMo nemo/collections/nlp/modules/common/megatron/megatron_init.py @ 8cfedd72: unset is tp
    # (configurations of NVIDIA/dgxc-benchmarking have no such key at v25.02, and state 1 from v25.05 on)
    ("nemo", "2025-05", (("expert_tp", "tp"),)),
    # NVIDIA-NeMo/Megatron-Bridge v0.2.0, scripts/performance/configs: moe_router_fusion
    ("nemo", "2025-09", (("router_launches", 21),)),
)
"""Framework, the year or month (ISO) in which a convention came, and what was there before it."""


def conventions_then(framework: str, date: str) -> tuple[tuple[str, object], ...]:
    """Return the conventions of *framework* that differed at *date*; none if it names no year.

    Args:
        framework: name of the profile.
        date: an ISO year, month or day, or a release that is named after its month (``24.05``).

    >>> [name for name, _ in conventions_then("torchtitan", "2024-12")]
    ['compiles_loss', 'eager']
    >>> [name for name, _ in conventions_then("torchtitan", "2025-06")]
    ['eager']
    """
    then = _month(date)
    return tuple(
        setting
        for name, month, before in SINCE
        if name == framework and then and then[: len(month)] < month
        for setting in before
    )


def _month(date: str) -> str:
    """Return the month or year of *date* as ISO has it; nothing if there is none.

    >>> _month("2022/23"), _month("2024-12..2025-02"), _month("v24.05.01"), _month("May 2024"), _month("r3")
    ('2022', '2024-12', '2024-05', '2024', '')
    """
    if found := re.search(r"\b(20\d\d)(?:-(\d\d))?", date):
        return "-".join(filter(None, found.groups()))
    found = re.fullmatch(r"v?(\d\d)\.(0[1-9]|1[0-2])(?:\.\d+)*", date)
    return f"20{found[1]}-{found[2]}" if found else ""
