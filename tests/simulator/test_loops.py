"""What a benchmark sees of a kernel: bursts, lasting load, and repetition from one to the other."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis.strategies import floats, integers

from foretrace.simulator.validate.kernels import validate_kernels
from foretrace.simulator.validate.loops import BURST, LASTING, REPEATED, REPEATS, Bench, load_of
from foretrace.simulator.workload.ops import gemm
from foretrace.topologies.catalog import load_device

TABLES = Path(__file__).parents[2] / "benchmarks" / "tables"


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


@pytest.mark.parametrize(
    ("notes", "load"),
    [("burst: 100 runs", BURST), ("sustained for 2 s", LASTING), ("20 groups", REPEATED), ("", REPEATED)],
)
def test_notes_of_a_row_say_the_load(notes: str, load: str) -> None:
    assert load_of(notes) == load


def test_narrow_heads_on_gb300() -> None:
    """Eleven forward passes of cuDNN, ten with heads 64 wide, that exponentials limit."""
    found = validate_kernels(TABLES / "attention_gb300.csv")
    assert not found.failures
    ratios = sorted(row.predicted / row.measured for row in found.rows)
    assert ratios[len(ratios) // 2] == pytest.approx(1, abs=0.05)
    assert ratios == pytest.approx([1] * 11, abs=0.17)


def test_cudnn_as_nvidia_measures_it() -> None:
    """122 passes; those of B200, from which nothing was taken, are of a faster machine than its constants."""
    found = validate_kernels(TABLES / "attention_cudnn.csv")
    assert not found.failures
    assert len(found.rows) == 122
    errors: dict[str, list[float]] = {}
    for row in found.rows:
        errors.setdefault(row.family, []).append(abs(math.log(row.predicted / row.measured)))
    worst = {name: median(own) for name, own in errors.items() if "B200-SXM" not in name}
    assert len(worst) == 6
    assert max(worst.values()) < 0.05
