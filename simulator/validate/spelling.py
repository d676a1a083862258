"""How tables of training runs spell their settings, and which setting each spelling means.

Every source has its own words: ``ZeRO-1``, ``distributed optimizer`` and ``zero1`` are one sharding. What is
read here is spelling only, whoever wrote it. What has no counterpart is refused with the words that have one.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from foretrace.simulator.errors import TableError
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
