"""Products of matrices whose rows do not begin where tensor cores are fed from."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis.strategies import integers

from simulator.compute.gemm import UNALIGNED, UNALIGNED_FLOPS_PER_S
from simulator.compute.timing import ComputeModel
from simulator.workload.ops import Op, gemm
from topologies.catalog import load_cluster

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
