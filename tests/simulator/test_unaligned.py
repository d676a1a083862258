"""Products of matrices whose rows do not begin where tensor cores are fed from."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis.strategies import integers, sampled_from
from tests.simulator.made_jobs import job

from foretrace.simulator.compute.gemm import UNALIGNED, UNALIGNED_FLOPS_PER_S
from foretrace.simulator.compute.timing import ComputeModel
from foretrace.simulator.idle import idle_conventions
from foretrace.simulator.job import Job
from foretrace.simulator.models.sources import load_model
from foretrace.simulator.workload.micro_batch import head_block, layer_blocks
from foretrace.simulator.workload.ops import Op, gemm
from foretrace.topologies.catalog import load_cluster
from foretrace.traces.layout import Layout

A100 = load_cluster("dgx-a100").device
PROCESSORS = 108


def _seconds(op: Op, kernel: str = "") -> float:
    return ComputeModel(A100, "bf16").op_s(replace(op, kernel=kernel))


@pytest.mark.parametrize(("dtype", "share"), [("bf16", 1.0), ("fp16", 1.0), ("tf32", 0.5)])
def test_a_large_one_is_as_fast_as_elements_are_loaded(dtype: str, share: float) -> None:
    """Two bytes an element at 0.7 TFLOP/s per processor, half of that for four bytes."""
    op = gemm("x", 8192, 50257, 768, dtype)
    rate = share * UNALIGNED_FLOPS_PER_S * PROCESSORS
    assert _seconds(op, UNALIGNED) == pytest.approx(op.flops / rate + A100.gemm_latency_s)


@given(m=integers(1, 5000), n=integers(1, 5000), k=integers(1, 5000))
def test_none_is_faster_for_it_and_plain_units_do_not_mind(m: int, n: int, k: int) -> None:
    assert _seconds(gemm("x", m, n, k, "bf16"), UNALIGNED) >= _seconds(gemm("x", m, n, k, "bf16"))
    assert _seconds(gemm("x", m, n, k, "fp32"), UNALIGNED) == _seconds(gemm("x", m, n, k, "fp32"))


@pytest.mark.parametrize(
    ("machine", "batch", "shape", "measured_us"),
    [
        ("dgx-h100", 96, (3137, 3137, 64), 1902),
        ("dgx-h100", 96, (3137, 64, 3137), 1699),
        ("dgx-h100", 16, (5185, 5185, 64), 1083),
        ("dgx-h100", 16, (5185, 64, 5185), 828),
        ("mi300x", 96, (3137, 3137, 64), 1212),
        ("mi300x", 96, (3137, 64, 3137), 810),
        ("mi300x", 16, (5185, 5185, 64), 337),
        ("mi300x", 16, (5185, 64, 5185), 459),
    ],
)
def test_a_batch_takes_about_what_it_took(
    machine: str, batch: int, shape: tuple[int, int, int], measured_us: float
) -> None:
    """Kernels of the traces that the rate is of."""
    op = replace(gemm("x", *shape, "bf16", batch=batch), kernel=UNALIGNED)
    found_s = ComputeModel(load_cluster(machine).device, "bf16").op_s(op)
    assert found_s == pytest.approx(measured_us / 1e6, rel=0.35)


def _odd(vocab: int = 50257, tp: int = 1, **settings: object) -> Job:
    model = replace(load_model("gpt2-xl"), vocab=vocab, n_heads=16, n_kv_heads=16, head_dim=96)
    return job(model, Layout(tp=tp), **{"framework": "torchtitan", **settings})


def _unaligned(some: Job) -> list[str]:
    """Names of the products that are unaligned."""
    blocks = [*layer_blocks(some, 0), head_block(some)]
    phases = [block.phases[name] for block in blocks for name in ("forward", "backward")]
    return [op.name for phase in phases for op in phase if isinstance(op, Op) and op.kernel == UNALIGNED]


@given(vocab=integers(30000, 60000), tp=sampled_from([1, 2, 4]), precision=sampled_from(["bf16", "fp16"]))
def test_an_odd_vocabulary_makes_all_products_of_the_output_matrix_unaligned(
    vocab: int, tp: int, precision: str
) -> None:
    """Nothing else: other widths are multiples of eight. What counts is a rank's share of the vocabulary."""
    share = -(-vocab // tp)
    found = _unaligned(_odd(vocab, tp, precision=precision))
    odd = ["head.logits", "head.logits.dgrad", "head.logits.wgrad"]
    assert found == (odd if share % 8 else [])


@pytest.mark.parametrize(
    "settings",
    [
        {"framework": "megatron"},
        {"framework": "jax"},
        {"conventions": (("pads_vocabulary", True),)},
        {"kernels": "fused"},
        {"precision": "fp32"},
    ],
)
def test_none_is_unaligned_that_is_padded_or_runs_on_plain_units(settings: dict[str, Any]) -> None:
    assert not _unaligned(_odd(**settings))


@pytest.mark.parametrize("ffn_hidden", range(6400, 6409))
def test_an_odd_width_inside_of_a_layer_is_unaligned_in_every_framework(ffn_hidden: int) -> None:
    model = replace(load_model("gpt2-xl"), ffn_hidden=ffn_hidden)
    found = _unaligned(job(model, framework="megatron"))
    assert {name.split(".")[0] for name in found} <= {"mlp"}
    assert len(found) == (6 if ffn_hidden % 8 else 0)  # two matrices, three products each


@pytest.mark.parametrize(("vocab", "words"), [(50257, ""), (50304, "aligned as they are")])
def test_padding_what_is_aligned_is_said_to_have_no_effect(vocab: int, words: str) -> None:
    (said,) = idle_conventions(_odd(vocab, conventions=(("pads_vocabulary", True),))) or [""]
    assert words in said
    assert bool(words) == bool(said)


def test_a_report_says_at_which_rate_unaligned_products_run() -> None:
    compute = ComputeModel(A100, "bf16")
    compute.op_s(replace(gemm("x", 8192, 50257, 768, "bf16"), kernel=UNALIGNED))
    assert "8192x50257x768): 75.6 TFLOP/s at most" in compute.notes[-1]


def test_a_report_says_nothing_of_a_rate_that_is_no_bound() -> None:
    """Products without tensor cores take elements one by one; beside them, those that mind are said."""
    compute = ComputeModel(A100, "bf16")
    compute.op_s(replace(gemm("x", 8192, 50257, 768, "fp32"), kernel=UNALIGNED))
    assert not any("at most" in note for note in compute.notes)
    compute.op_s(replace(gemm("x", 64, 50257, 768, "bf16"), kernel=UNALIGNED))
    assert "64x50257x768): 75.6 TFLOP/s at most" in compute.notes[-1]
