"""Times of operations: closed forms, and laws that hold on any device."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis.strategies import builds, floats, integers, lists, sampled_from

from foretrace.simulator.compute.timing import COSTS, ComputeModel
from foretrace.simulator.workload.ops import Comm, Op, gemm, memory
from foretrace.topologies.catalog import load_device
from foretrace.topologies.device import Device
from foretrace.topologies.errors import CatalogError

DEVICE = Device(
    name="round numbers",
    kind="gpu",
    memory_bytes=10**11,
    memory_bytes_per_s=1e12,
    peak_flops_per_s={"bf16": 1e15, "fp32": 1e14},
    gemm_efficiency=0.8,
    gemm_latency_s=4e-6,
    gemm_memory_fraction=0.5,
    memory_bound_fraction=0.8,
    memory_bound_latency_s=3e-6,
    attention_efficiency_forward=0.5,
    attention_efficiency_backward=0.4,
    launch_s=5e-6,
    sustained_clock_fraction=0.9,
    sources={"launch": "made up"},
)

ops = builds(
    Op,
    sampled_from(["a", "b"]),
    sampled_from(sorted(COSTS)),
    integers(0, 10**13),
    integers(0, 10**10),
    count=integers(1, 8),
)
MAY_GROW = ("memory_bytes_per_s", "gemm_efficiency", "sustained_clock_fraction", "memory_bound_fraction")


def model(**changes: object) -> ComputeModel:
    return ComputeModel(replace(DEVICE, **changes), "bf16")  # type: ignore[arg-type]


def test_a_large_product_is_bound_by_flops() -> None:
    """2 x 8192^3 / (0.8 x 1e15 x 0.9) + 4 us."""
    assert model().op_s(gemm("x", 8192, 8192, 8192, "bf16")) == pytest.approx(2 * 8192**3 / 7.2e14 + 4e-6)


def test_a_thin_product_is_bound_by_memory() -> None:
    """(8192^2 + 2 x 8192) x 2 bytes / (0.5 x 1e12) + 4 us."""
    seconds = model().op_s(gemm("x", 1, 8192, 8192, "bf16"))
    assert seconds == pytest.approx((8192**2 + 2 * 8192) * 2 / 5e11 + 4e-6)


def test_a_product_in_fp32_uses_its_own_peak_at_full_clock() -> None:
    """Plain units draw less power than tensor cores, for which the clock is lowered to 0.9."""
    op = gemm("x", 8192, 8192, 8192, "fp32")
    assert model().op_s(op) == pytest.approx(2 * 8192**3 / (0.8 * 1e14) + 4e-6)


@pytest.mark.parametrize(("kind", "efficiency"), [("attention", 0.5), ("attention_backward", 0.4)])
def test_attention_has_an_efficiency_of_its_own(kind: str, efficiency: float) -> None:
    seconds = model().op_s(Op("core", kind, 10**12, 10**6))
    assert seconds == pytest.approx(1e12 / (efficiency * 1e15 * 0.9) + 4e-6)


def test_a_memory_bound_operation_pays_for_each_kernel() -> None:
    assert model().op_s(memory("x", 8 * 10**9, "bf16", count=2)) == pytest.approx(8e9 / 8e11 + 6e-6)


@given(times=floats(0.01, 100))
def test_bandwidth_rises_with_size_and_half_of_it_is_reached_at_the_latency_times_it(times: float) -> None:
    """b / (b + b_half) of 0.8 TB/s, where b_half = 3 us at 0.8 TB/s = 2.4 MB; kernels share nothing."""
    half = 2_400_000
    size = round(times * half)
    seconds = model().op_s(memory("copy", size, "bf16"))
    assert size / seconds == pytest.approx(0.8e12 * size / (size + half))
    assert model().op_s(memory("copies", 2 * size, "bf16", count=2)) == pytest.approx(2 * seconds)


def test_small_kernels_wait_for_the_host() -> None:
    """Ten empty kernels take ten launches; one long kernel hides its launch."""
    compute = model(memory_bound_latency_s=0.0)
    assert compute.duration_ns([memory("x", 0, "bf16")] * 10) == 50_000
    assert compute.duration_ns([memory("x", 8 * 10**9, "bf16")]) == 10_000_000


def test_communications_take_no_compute_time() -> None:
    alone = [gemm("x", 512, 512, 512, "bf16")]
    assert model().duration_ns([*alone, Comm("all_reduce", "tp", 10**9)]) == model().duration_ns(alone)


@given(some=lists(ops, max_size=6))
def test_a_sequence_takes_at_least_its_parts_and_its_launches(some: list[Op]) -> None:
    compute = model()
    duration_s = compute.duration_ns(some) / 1e9
    busy_s = sum(compute.op_s(op) for op in some)
    launches_s = sum(op.count for op in some) * 5e-6
    assert duration_s == pytest.approx(max(busy_s, launches_s), abs=1e-9)


@given(op=ops, field=sampled_from(MAY_GROW), factor=floats(0.1, 1.0))
def test_a_slower_device_is_never_faster(op: Op, field: str, factor: float) -> None:
    slower = model(**{field: getattr(DEVICE, field) * factor})
    assert slower.op_s(op) >= model().op_s(op)


@given(op=ops, flops=integers(0, 10**12), moved=integers(0, 10**9))
def test_more_work_never_takes_less_time(op: Op, flops: int, moved: int) -> None:
    more = replace(op, flops=op.flops + flops, bytes_moved=op.bytes_moved + moved)
    assert model().op_s(more) >= model().op_s(op)


@given(op=ops)
def test_a_processor_uses_the_same_formulas(op: Op) -> None:
    assert model(kind="cpu").op_s(op) == model().op_s(op)


def test_a_precision_that_the_device_lacks_is_refused_at_once() -> None:
    with pytest.raises(CatalogError, match="fp16"):
        ComputeModel(DEVICE, "fp16")


def test_notes_say_constants_sources_and_what_was_not_covered() -> None:
    compute = model()
    compute.op_s(gemm("x", 8192, 8192, 8192, "bf16"))
    covered = compute.notes
    assert any("0.80 of" in note and "round numbers" in note for note in covered)
    assert any("(made up)" in note for note in covered)
    assert not any("outside" in note for note in covered)
    compute.op_s(gemm("x", 8192, 80, 8192, "bf16"))
    assert "8192x80x8192" in compute.notes[-1]


def test_notes_name_the_attention_kernel_that_ran_not_the_one_of_the_device() -> None:
    device = load_device("h100-sxm")
    model = ComputeModel(device, "bf16")
    assert any(note.startswith(f"attention: {device.attention_kernel},") for note in model.notes)
    core = Op("core", "attention", 2**30, 2**20, 4096, 4096, 128, "bf16", batch=8, kernel="cudnn")
    model.op_s(core)
    (note,) = (note for note in model.notes if note.startswith("attention"))
    assert note.startswith("attention: cudnn,")


@pytest.mark.parametrize(("training", "clock"), [(True, 0.9 * 0.8), (False, 0.9)])
def test_a_device_has_a_clock_of_its_own_while_it_trains(training: bool, clock: float) -> None:
    device = replace(DEVICE, training_clock_fraction=0.8)
    seconds = ComputeModel(device, "bf16", training=training).op_s(gemm("x", 8192, 8192, 8192, "bf16"))
    assert seconds == pytest.approx(2 * 8192**3 / (0.8 * 1e15 * clock) + 4e-6)


@pytest.mark.parametrize("fed", [0.6, 0.9, 1.0])
def test_of_operands_that_arrive_late_and_a_clock_that_is_low_the_lower_counts(fed: float) -> None:
    """The peak is 4e15, the clock 0.9: processors that wait for operands need less power."""
    device = replace(DEVICE, peak_flops_per_s={"bf16": 1e15, "fp4": 4e15}, gemm_fp4_share=fed)
    op = gemm("x", 8192, 8192, 8192, "bf16")
    seconds = ComputeModel(device, "bf16").op_s(replace(op, dtype="fp4", bytes_moved=0))
    assert seconds == pytest.approx(op.flops / (0.8 * 4e15 * min(fed, 0.9)) + 4e-6)
