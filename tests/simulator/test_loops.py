"""What a benchmark sees of a kernel: bursts, lasting load, and repetition from one to the other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis.strategies import floats, integers

from foretrace.simulator.compute.benched import BURST, LASTING, REPEATED, REPEATS, Bench
from foretrace.simulator.workload.ops import gemm
from foretrace.topologies.catalog import load_device


@given(side=integers(64, 8192), after_s=floats(0, 1))
def test_repeated_kernels_lie_between_burst_and_lasting_load(side: int, after_s: float) -> None:
    bench = Bench(replace(load_device("b200-sxm"), sustained_after_s=after_s))
    burst, repeated, lasting = (
        bench.seen_s([gemm("product", side, side, side, "bf16")], load) for load in (BURST, REPEATED, LASTING)
    )
    assert burst <= repeated * (1 + 1e-9)
    assert repeated <= lasting * (1 + 1e-9)


def test_half_of_the_loss_of_clock_is_there_after_that_much_load() -> None:
    device = load_device("b200-sxm")
    ops = [gemm("product", 8192, 8192, 8192, "bf16")]
    burst, lasting = (Bench(device).seen_s(ops, load) for load in (BURST, LASTING))
    half = Bench(replace(device, sustained_after_s=REPEATS * lasting)).seen_s(ops, REPEATED)
    assert half == pytest.approx((burst + lasting) / 2)


def test_a_device_whose_power_is_limited_at_once_knows_no_repetition() -> None:
    bench = Bench(load_device("h100-sxm"))
    ops = [gemm("product", 4096, 4096, 4096, "bf16")]
    assert bench.seen_s(ops, REPEATED) == bench.seen_s(ops, LASTING)
