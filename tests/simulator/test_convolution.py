"""Times of convolutions by groups, and of what prepares operands for tensor cores."""

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from foretrace.simulator.compute.gemm import CONVOLUTION, DIRECT_SHARE
from foretrace.simulator.compute.timing import ComputeModel
from foretrace.simulator.rehearsed.works import priced
from foretrace.simulator.workload.ops import Op
from foretrace.topologies.catalog import load_device
from foretrace.traces.rehearsal import CONVERSION, WORKS

ROWS, CHANNELS, TAPS = 64 * 56 * 56, 256, 9
MEASURED_FP16 = {"rtx-3090": 75.7e12, "rtx-4090": 167e12, "rtx-5090": 231e12}
"""FLOP/s of large products, medians (zzc0721/torch-performance-test-data 0785868, database.md)."""

MEASURED_FP32 = {"rtx-3090": 24.8e12, "rtx-4090": 54.7e12, "rtx-5090": 68.5e12}


def convolution(groups: int, dtype: str = "fp16") -> Op:
    """Return a convolution of as many channels as it has."""
    wide = CHANNELS // groups
    return Op(
        name="aten.convolution",
        kind="gemm",
        flops=2 * ROWS * CHANNELS * wide * TAPS,
        bytes_moved=2 * 2 * ROWS * CHANNELS,
        m=ROWS,
        n=wide,
        k=wide * TAPS,
        batch=groups,
        dtype=dtype,
        kernel=CONVOLUTION,
    )


@pytest.mark.parametrize("device", ["rtx-3090", "a100-80gb", "v100-32gb", "h100-sxm"])
def test_a_depthwise_convolution_runs_on_plain_cores_or_waits_for_memory(device: str) -> None:
    """``max(flops / (share P), bytes / (f BW))`` and a start."""
    found = load_device(device)
    compute, op = ComputeModel(found, "fp16"), convolution(CHANNELS)
    by_cores = op.flops / (DIRECT_SHARE * found.gemm_fp32_share * found.peak("fp32"))
    by_memory = op.bytes_moved / (found.memory_bound_fraction * found.memory_bytes_per_s)
    assert compute.op_s(op) == pytest.approx(max(by_cores, by_memory) + found.gemm_latency_s)


def test_wide_groups_run_as_products_and_are_never_slower_than_without_tensor_cores() -> None:
    device = load_device("rtx-3090")
    compute = ComputeModel(device, "fp16")
    for groups in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        op = convolution(groups)
        direct = op.flops / (DIRECT_SHARE * device.gemm_fp32_share * device.peak("fp32"))
        bytes_s = op.bytes_moved / (device.memory_bound_fraction * device.memory_bytes_per_s)
        assert compute.op_s(op) <= max(direct, bytes_s) + device.gemm_latency_s + 1e-12
    wide = convolution(2)
    assert compute.op_s(wide) == pytest.approx(compute.op_s(replace(wide, kernel="")))
    # the waste of tiles that are wider than a group: as many outputs, fewer FLOPs, more time for each
    rates = [convolution(groups).flops / compute.op_s(convolution(groups)) for groups in (1, 4, 16, 64)]
    assert rates == sorted(rates, reverse=True)


def test_narrow_groups_are_multiplied_several_at_once() -> None:
    """No longer than as fewer, wider groups that hold zeros beside their own channels."""
    compute = ComputeModel(load_device("rtx-3090"), "fp16")
    narrow = convolution(64)  # 4 channels each
    for joined in (2, 4, 8):
        wide = replace(narrow, n=4 * joined, k=4 * joined * TAPS, batch=64 // joined, kernel="")
        assert compute.op_s(narrow) <= compute.op_s(wide) + 1e-12
    eight = replace(narrow, n=32, k=32 * TAPS, batch=8, kernel="")
    assert compute.op_s(narrow) == pytest.approx(compute.op_s(eight))


def _row(dtype: str) -> dict[str, Any]:
    empty = {field.name: 0 for field in WORKS}
    texts = {"name": CONVERSION, "kind": "memory", "shapes": "", "dtype": dtype, "along": "", "rows": []}
    rest = {
        "aligned": True,
        "causal": False,
        "is_known": True,
        "kernels": 2,
        "batch": 1,
        "bytes_moved": 10**9,
    }
    return {**empty, **texts, **rest}


@pytest.mark.parametrize(
    ("device", "dtype", "converts"),
    [
        ("v100-32gb", "fp16", True),
        ("v100-32gb", "tf32", False),
        ("a100-80gb", "tf32", True),
        ("rtx-3090", "tf32", True),
        ("p100", "fp16", False),
    ],
)
def test_operands_are_converted_only_where_there_are_tensor_cores_for_them(
    device: str, dtype: str, *, converts: bool
) -> None:
    """At the rate of memory, and not at all on a GPU that computes the type on plain cores."""
    found = load_device(device)
    costs = priced(pa.Table.from_pylist([_row(dtype)], schema=WORKS), ComputeModel(found, "fp32"))
    rate = found.memory_bound_fraction * found.memory_bytes_per_s
    wanted = 1e9 / rate + 2 * found.memory_bound_latency_s if converts else 0.0
    assert costs.seconds[0] == pytest.approx(wanted)
    assert (costs.kernels[0], costs.bytes_moved[0]) == ((2, 10**9) if converts else (0, 0))


@pytest.mark.parametrize(("dtype", "measured"), [("fp16", MEASURED_FP16), ("fp32", MEASURED_FP32)])
def test_large_products_of_geforce_cards_run_as_fast_as_they_are_measured(
    dtype: str, measured: dict[str, float]
) -> None:
    width = {"fp16": 2, "fp32": 4}[dtype]
    for name, rate in measured.items():
        compute = ComputeModel(load_device(name), dtype, training=False)
        ops = [
            Op("x", "gemm", 2 * n**3, 3 * n * n * width, n, n, n, dtype) for n in (2048, 4096, 8192, 10240)
        ]
        assert max(op.flops / compute.op_s(op) for op in ops) == pytest.approx(rate, rel=0.03), name
