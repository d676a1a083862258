"""Matrix products in tiles: waves, splits, clocks and groups, and laws that hold for any device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis.strategies import integers, sampled_from, tuples

from foretrace.simulator.compute.gemm import SPACING_S, Rates, gemm_s, tiled_s
from foretrace.simulator.compute.timing import ComputeModel
from foretrace.simulator.models.model import Linear
from foretrace.simulator.workload.ops import gemm, weight_gradient
from foretrace.topologies.catalog import device_names, load_device
from foretrace.topologies.device import Device
from foretrace.topologies.errors import CatalogError
from foretrace.topologies.kernel import GemmTiles

TILES = GemmTiles(
    processors=100,
    tiles=((128, 128),),
    efficiency=0.8,
    operand_side=0.0,
    tile_overhead_s=0.0,
    memory_fraction=0.5,
    wave_overlap=0.0,
    blend=64.0,
    throttle=0.0,
    throttle_s=1e-3,
)
TILED = [name for name in device_names() if load_device(name).gemm_tiles is not None]
sides = integers(1, 20_000)


def device(tiles: GemmTiles = TILES, **changes: object) -> Device:
    found = replace(
        load_device("h100-sxm"), gemm_tiles=tiles, sustained_clock_fraction=1.0, gemm_latency_s=0.0
    )
    return replace(found, peak_flops_per_s={"bf16": 1e15}, memory_bytes_per_s=1e15, **changes)  # type: ignore[arg-type]


def one_wave_s(k: int) -> float:
    """A tile of 128 x 128 on one of 100 processors at 0.8 of a peak of 1e15."""
    return 2 * 128 * 128 * k / (0.8 * 1e15 / 100)


@pytest.mark.parametrize(("n_tiles", "waves"), [(100, 1), (101, 2), (200, 2), (1000, 10)])
def test_tiles_run_in_waves(n_tiles: int, waves: int) -> None:
    op = gemm("x", 128, 128 * n_tiles, 4096, "bf16")
    assert gemm_s(op, device()) == pytest.approx(waves * one_wave_s(4096), rel=1e-3)


def test_few_tiles_are_split_along_k() -> None:
    """One tile over 100 processors: sixteen ways, of 256 each."""
    assert gemm_s(gemm("x", 128, 128, 4096, "bf16"), device()) == pytest.approx(one_wave_s(256), rel=1e-2)


def test_a_lasting_load_runs_at_a_lower_clock() -> None:
    op = gemm("x", 8192, 8192, 8192, "bf16")
    assert gemm_s(op, device(sustained_clock_fraction=0.8)) == pytest.approx(gemm_s(op, device()) / 0.8)


def test_power_slows_a_long_product_more_than_a_short_one() -> None:
    hot = device(replace(TILES, throttle=0.3))
    short, long = (gemm("x", 128 * 100, 128, k, "bf16") for k in (128, 2**24))
    assert gemm_s(short, hot) / gemm_s(short, device()) == pytest.approx(1.0, abs=0.01)
    assert gemm_s(long, hot) / gemm_s(long, device()) == pytest.approx(1.3, abs=0.01)


def test_sums_in_fp32_cost_more_than_a_plain_output() -> None:
    linear = Linear("x", 4096, 4096)
    plain = weight_gradient("x", 4096, linear, "bf16", sum_dtype="bf16")
    sums = weight_gradient("x", 4096, linear, "bf16", sum_dtype="fp32")
    real = load_device("b200-sxm")
    assert gemm_s(sums, real) > gemm_s(plain, real) > gemm_s(gemm("x", 4096, 4096, 4096, "bf16"), real)


@given(
    name=sampled_from(TILED), shape=tuples(sides, sides, sides), more=integers(0, 5000), side=integers(0, 2)
)
def test_a_larger_product_is_never_faster(
    name: str, shape: tuple[int, int, int], more: int, side: int
) -> None:
    found = load_device(name)
    m, n, k = (size + more * (at == side) for at, size in enumerate(shape))
    small, large = gemm("x", *shape, "fp16"), gemm("x", m, n, k, "fp16")
    assert gemm_s(large, found) >= gemm_s(small, found) * (1 - 1e-9)


@given(name=sampled_from(TILED), m=sides, n=sides, k=sides)
def test_no_product_is_faster_than_the_peak_or_the_memory(name: str, m: int, n: int, k: int) -> None:
    found = load_device(name)
    op = gemm("x", m, n, k, "fp16")
    assert gemm_s(op, found) >= op.flops / found.peak("fp16")
    assert gemm_s(op, found) >= op.bytes_moved / found.memory_bytes_per_s


@given(m=integers(1, 4096), groups=integers(2, 64))
def test_a_grouped_product_takes_at_least_its_starts(m: int, groups: int) -> None:
    found = load_device("b200-sxm")
    grouped = gemm("x", m, 2048, 1024, "bf16", batch=groups, grouped=True)
    batched = gemm("x", m, 2048, 1024, "bf16", batch=groups)
    assert gemm_s(grouped, found) >= max(groups * SPACING_S, gemm_s(batched, found) * (1 - 1e-9))


def test_many_products_at_once_are_the_products_one_by_one() -> None:
    shapes = np.array([[100.0, 4096.0], [200.0, 4096.0], [300.0, 4096.0]])
    on = Rates(TILES, peak=1e15, bandwidth=1e15, clock=1.0)
    both = tiled_s(on, shapes, moved=np.array([1e6, 1e8]))
    for at, moved in enumerate((1e6, 1e8)):
        alone = tiled_s(on, shapes[:, at : at + 1], moved=np.array([moved]))
        assert alone[0] == both[at]


@pytest.mark.parametrize(
    ("name", "shape", "measured_us"),
    [
        ("a100-80gb", (4096, 12288, 4096), 1911.0),
        ("a100-80gb", (1, 4096, 4096), 25.0),
        ("h100-sxm", (4096, 22016, 4096), 987.0),
        ("a40", (4096, 12288, 4096), 3755.0),
    ],
)
def test_measured_products_are_met(name: str, shape: tuple[int, int, int], measured_us: float) -> None:
    """Rows of microsoft/vidur 7d47513 (MIT), within 12 %."""
    seconds = gemm_s(gemm("x", *shape, "fp16"), load_device(name))
    assert seconds * 1e6 == pytest.approx(measured_us, rel=0.12)


@pytest.mark.parametrize(("field", "value"), [("efficiency", 1.3), ("wave_overlap", 2.0), ("tiles", ())])
def test_impossible_tiles_are_refused(field: str, value: object) -> None:
    with pytest.raises(CatalogError, match="tiles"):
        replace(TILES, **{field: value})  # type: ignore[arg-type]


def test_a_device_of_a_class_says_that_it_was_not_measured() -> None:
    assert any("not measured on it" in note for note in ComputeModel(load_device("a6000"), "bf16").notes)
    assert not any("warning" in note for note in ComputeModel(load_device("a100-80gb"), "bf16").notes)


def test_heads_whose_rows_are_not_aligned_fall_off_the_tensor_cores() -> None:
    device = load_device("a100-80gb")
    aligned, not_aligned = (gemm("scores", 2048, 2048, width, "fp16", batch=12) for width in (152, 150))
    assert gemm_s(not_aligned, device) > 5 * gemm_s(aligned, device)
    alone = replace(not_aligned, batch=1)
    assert gemm_s(alone, device) < 2 * gemm_s(replace(aligned, batch=1), device)
