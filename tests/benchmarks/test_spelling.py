"""How tables spell settings: every spelling means one setting, and what means none is refused in a line."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured.spelling import (
    attention_kernel,
    conventions_of,
    conventions_then,
    fused_attention,
    is_hybrid,
    precision_of,
    recomputed,
    schedule_named,
    sharding_of,
    stated,
    yes_or_no,
)
from measured.table import Row

from foretrace.simulator.errors import TableError
from foretrace.simulator.job import PRECISIONS, RECOMPUTE_MODULES
from foretrace.simulator.schedules import SCHEDULES
from foretrace.simulator.sharding import SHARDINGS
from foretrace.simulator.workload.recipes import RECIPES

WORDS = st.text(alphabet="abcdefglmnoprstuzx0123456789 -_()/+.,", max_size=24)


@pytest.mark.parametrize(
    ("meant", "spellings"),
    [
        ("ddp", "none None DDP dp no_sharding NO_SHARD ZeRO-0 replicated 0 none(DDP) off"),
        ("zero1", "zero1 ZeRO-1 zero_1 ZeRO1 distributed_optimizer dist-opt distopt 1 zero1(group8) stage1"),
        ("zero2", "zero2 ZeRO-2 zero_stage_2 2"),
        (
            "fsdp",
            "fsdp FSDP2 FULL_SHARD SHARD_GRAD_OP HYBRID_SHARD hsdp ZeRO-3 stage3 3 megatron-fsdp zero2-fsdp",
        ),
    ],
)
def test_a_sharding_is_the_same_however_it_is_written(meant: str, spellings: str) -> None:
    assert {sharding_of(word) for word in spellings.split()} == {meant}


@pytest.mark.parametrize(
    ("keeps", "spellings"),
    [
        (True, "SHARD_GRAD_OP ShardGradOp shard-grad-op ShardingStrategy.SHARD_GRAD_OP fsdp(shard_grad_op)"),
        (True, "HYBRID_SHARD_ZERO2 _HYBRID_SHARD_ZERO2 zero2-fsdp FSDP(ZeRO-2) fsdp-stage2 hsdp-zero2"),
        (False, "FULL_SHARD fsdp FSDP2 fsdp2(zero3) zero3-fsdp HYBRID_SHARD hsdp zero3 zero2 2 ddp none"),
    ],
)
def test_fsdp_that_keeps_its_parameters_does_so_however_it_is_written(keeps: bool, spellings: str) -> None:
    """Such a spelling is fully sharded, and says that nothing is gathered a second time for backward."""
    for word in spellings.split():
        said = dict(conventions_of("", word))
        assert said.get("reshard_after_forward") == (False if keeps else None), word
        assert not keeps or sharding_of(word) == "fsdp", word


@pytest.mark.parametrize(
    ("meant", "spellings"),
    [
        (("bf16", False, ""), ["bf16", "BF16", "bfloat16", "bf16-mixed", "BF16 mixed", "", "not stated"]),
        (("fp16", False, ""), ["fp16", "FP16 (amp)", "float16", "half"]),
        (("fp32", False, ""), ["fp32", "float32"]),
        (("bf16", True, ""), ["fp8", "FP8", "float8", "bf16+fp8", "fp8 hybrid"]),
        (("bf16", True, "current"), ["FP8-CS", "fp8_current_scaling", "fp8 dynamic"]),
        (("bf16", True, "delayed"), ["fp8-delayed", "FP8_DS"]),
        (("bf16", True, "blockwise"), ["fp8-blockwise", "fp8 sub-channel", "fp8-sc"]),
        (("bf16", True, "rowwise"), ["fp8-rowwise", "float8 rowwise", "rowwise_gw_hp"]),
        (("bf16", True, "mxfp8"), ["mxfp8", "MXFP8", "fp8_mx"]),
        (("bf16", True, "nvfp4"), ["nvfp4", "NVFP4", "fp4"]),
    ],
)
def test_a_precision_is_the_same_however_it_is_written(
    meant: tuple[object, ...], spellings: list[str]
) -> None:
    assert {tuple(precision_of(word)) for word in spellings} == {meant}


@pytest.mark.parametrize(
    ("meant", "spellings"),
    [
        ({"recompute": "none"}, ["", "none", "None", "off", "no", "0", "everything_saveable"]),
        (
            {"recompute": "full"},
            ["full", "Full (uniform, 1)", "yes", "gradient checkpointing", "every layer", "nothing_saveable"],
        ),
        (
            {"recompute": "full", "recompute_every": 2},
            ["every 2nd layer", "1/2", "selective (every 2nd layer)"],
        ),
        (
            {"recompute": "full", "recompute_layers": 5},
            ["5 layers/stage", "block 5", "full (block, 5 layers)"],
        ),
        ({"recompute": "selective"}, ["selective", "Selective (op)", "SAC", "op"]),
        (
            {"recompute": "selective", "recompute_modules": "core_attn"},
            ["core_attn", "selective (attention)"],
        ),
        (
            {"recompute": "selective", "recompute_modules": "core_attn,layernorm"},
            ["minimal", "checkpoint_dots"],
        ),
    ],
)
def test_recomputation_is_the_same_however_it_is_written(meant: object, spellings: list[str]) -> None:
    for word in spellings:
        assert recomputed(word) == meant, word


def test_modules_that_notes_list_count_before_those_of_the_word() -> None:
    notes = 'recipe {"recompute_modules": ["mla_up_proj", "mlp"]}'
    assert recomputed("selective", notes)["recompute_modules"] == "mla_up_proj,mlp"
    assert "recompute_modules" not in recomputed("full", notes)


@pytest.mark.parametrize(
    ("meant", "word"),
    [
        ("interleaved-1f1b", "1F1B-interleaved"),
        ("interleaved-1f1b", "Interleaved1F1B"),
        ("1f1b", "PipeDream-Flush"),
        ("gpipe", "GPipe"),
        ("zb-v", "ZBVZeroBubble"),
        ("v-half", "V-Half"),
        ("v-min", "zbv-min"),
        ("zb-h1", "zero bubble"),
        ("interleaved-zb", "InterleavedZeroBubble"),
        ("dualpipe-v", "DualPipeV"),
        ("", "none"),
        ("", "not stated"),
    ],
)
def test_a_schedule_is_known_by_the_names_that_frameworks_give_it(meant: str, word: str) -> None:
    assert schedule_named(word) == meant
    assert not meant or meant in SCHEDULES


@given(WORDS)
def test_a_word_means_a_setting_that_jobs_have_or_is_refused(word: str) -> None:
    for reader, allowed in (
        (sharding_of, SHARDINGS),
        (lambda text: precision_of(text).kept, PRECISIONS),
        (lambda text: precision_of(text).recipe, ("", *RECIPES)),
        (schedule_named, ("", *SCHEDULES)),
        (lambda text: recomputed(text)["recompute"], ("none", "selective", "full")),
    ):
        try:
            found, refused = reader(word), ""
        except TableError as error:
            found, refused = None, str(error)
        assert found in allowed or (repr(word) in refused and "\n" not in refused)


@given(WORDS)
def test_modules_are_parts_of_a_layer(word: str) -> None:
    try:
        found = recomputed(word).get("recompute_modules", "")
    except TableError:
        return
    assert set(found.split(",")) - {""} <= set(RECOMPUTE_MODULES)


@given(st.sampled_from(["true", "YES", "On", "1", "n/a", "off", "No", "false (default)", "none"]))
def test_yes_and_no_are_told_apart_and_nothing_is_neither(word: str) -> None:
    said = yes_or_no(word, "sp")
    assert (said is None) == (stated(word) == "")
    assert Row({"sp": word}, 1).flag("sp", default=True) is (said is not False)


def test_what_is_neither_yes_nor_no_is_refused_with_its_column() -> None:
    with pytest.raises(TableError, match=r"tied_emb='maybe'"):
        Row({"tied_emb": "maybe"}, 1).flag("tied_emb", default=True)
    assert Row({"gated": "SwiGLU"}, 1).flag("gated", default=False) is True
    assert Row({"gated": "squared_relu"}, 1).flag("gated", default=True) is False


@pytest.mark.parametrize(
    ("word", "fused", "kernel"),
    [
        ("FA2", True, "flash2"),
        ("FlashAttention-3", True, "flash3"),
        ("flash_attn 2", True, "flash2"),
        ("cuDNN", True, "cudnn"),
        ("sdpa", True, ""),
        ("eager", False, ""),
        ("false", False, ""),
        ("", None, ""),
    ],
)
def test_attention_is_told_by_its_kernel(word: str, fused: bool | None, kernel: str) -> None:
    assert fused_attention(word) is fused
    assert attention_kernel(word) == kernel


def test_groups_inside_nodes_are_hybrid_where_that_is_all_that_is_said() -> None:
    assert [is_hybrid(word) for word in ("HSDP", "HYBRID_SHARD", "fsdp", "fsdp/hsdp")] == [
        True,
        True,
        False,
        False,
    ]


def test_numbers_are_read_as_people_write_them() -> None:
    row = Row({"a": "8,192", "b": "n/a", "c": "none", "d": math.nan, "e": "1,2"}, 1)
    assert row.integer("a") == 8192
    assert [row.integer(name, 7) for name in "bcd"] == [7, 7, 7]
    with pytest.raises(TableError, match="c is not given"):
        row.integer("c")
    with pytest.raises(TableError, match="e='1,2'"):
        row.integer("e")


def test_a_release_named_after_its_month_is_as_old_as_that_month() -> None:
    for framework, before, after in (("megatron", "22.11", "24.05"), ("torchtitan", "v25.02", "25.12")):
        assert conventions_then(framework, before)
        assert not conventions_then(framework, after)
    assert conventions_then("megatron", "2022/23") == conventions_then("megatron", "2022-06")
    assert conventions_then("megatron", "r7") == ()
