"""Fits how matrix products run on a device to a table of measured ones, and prints its ``[tiles]``.

    python benchmarks/fit_gemm.py gemm.parquet --device h100-sxm [--kernels kernels.csv --hardware NAME]

The table has the columns m, n, k and us: bf16 products measured in short bursts. Thin products (m <= 64) of a
second table pin the share of memory bandwidth, which thick ones do not show. 30 % of the rows are held out;
the errors that are printed are theirs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from fitting import Floats, log_error, minimize, split
from measured.table import read_table

from foretrace.simulator.compute.gemm import Rates, tiled_s
from foretrace.topologies.catalog import load_device
from foretrace.topologies.device import Device
from foretrace.topologies.kernel import GemmTiles

TILES = {
    8: "256x128 128x256 128x128 256x64 64x256 128x64 64x128 64x64 128x32 64x32 32x64 16x64",
    9: "256x128 128x256 128x128 128x192 192x128 256x64 64x256 128x64 64x128 64x64 64x32 64x16",
    10: "256x256 256x128 128x256 128x192 256x192 128x128 128x64 64x128 64x64 128x32 64x32",
}
"""Tiles that CUTLASS builds for Ampere and Ada, Hopper and Blackwell, by major compute capability."""

MACHINES = {
    "a100-80gb": (8, 108),
    "h100-sxm": (9, 132),
    "h200-sxm": (9, 132),
    "b200-sxm": (10, 148),
    "gb200": (10, 152),
    "l40s": (8, 142),
}
"""Compute capability and streaming multiprocessors of each device (NVIDIA data sheets)."""

STARTS = ((0.85, 12, 1e-6, 0.8, 0.1, 1e-3, 3e-6), (0.82, 7, 0.8e-6, 0.7, 0.28, 1.2e-3, 2e-6))
THIN_WEIGHT = 0.2
SEEN = 900
"""Rows of the larger table that each evaluation looks at."""


def tiles_of(x: Floats, shapes: tuple[tuple[int, int], ...], processors: int) -> tuple[GemmTiles, float]:
    """Return the tiles, and the latency, that the fitted numbers *x* stand for."""
    efficiency, side, overhead, fraction, throttle, throttle_s, latency = np.exp(x[:7])
    tiles = GemmTiles(
        processors=processors,
        tiles=shapes,
        efficiency=min(float(efficiency), 1.0),
        operand_side=float(side),
        tile_overhead_s=float(overhead),
        memory_fraction=min(float(fraction), 0.92),
        wave_overlap=float(1 / (1 + np.exp(-x[7]))),
        blend=float(1 + np.exp(x[8])),
        throttle=float(throttle),
        throttle_s=float(throttle_s),
    )
    return tiles, float(latency)


def predictor(device: Device, table: Floats) -> Callable[[GemmTiles, float], Floats]:
    """Return the times of the products in *table* (m, n, k, seconds) as a function of the tiles."""
    m, n, k = table[:3]
    moved = 2 * (m * k + k * n + m * n)

    def predict(tiles: GemmTiles, latency_s: float) -> Floats:
        on = Rates(tiles, peak=device.peak("bf16"), bandwidth=device.memory_bytes_per_s, clock=1.0)
        found = tiled_s(on, table[:3], moved=moved)
        return found + latency_s

    return predict


def fit(device: Device, rows: Floats, thin: Floats | None) -> tuple[GemmTiles, float, Floats]:
    """Return tiles, latency, and the log errors of the held-out rows."""
    generation, processors = MACHINES[device.name]
    sides = [tile.split("x") for tile in TILES[generation].split()]
    shapes = tuple((int(a), int(b)) for a, b in sides)
    seen = split(rows.shape[1])
    chosen = rows[
        :, np.random.default_rng(1).choice(np.flatnonzero(seen), min(SEEN, seen.sum()), replace=False)
    ]
    predict = predictor(device, chosen)
    predict_thin = None if thin is None else predictor(device, thin)

    def loss(x: Floats) -> float:
        tiles, latency_s = tiles_of(x, shapes, processors)
        errors = np.abs(log_error(predict(tiles, latency_s), chosen[3]))
        found = 0.5 * errors.mean() + 0.5 * np.median(errors)
        if predict_thin is not None and thin is not None:
            worse = np.abs(log_error(predict_thin(tiles, latency_s), thin[3])).mean()
            found = (1 - THIN_WEIGHT) * found + THIN_WEIGHT * worse
        return float(found)

    fits = [minimize(loss, [*np.log(start), 0.0, 1.0]) for start in STARTS]
    best = min(fits, key=lambda found: found[1])[0]
    tiles, latency_s = tiles_of(best, shapes, processors)
    held = rows[:, ~seen]
    return tiles, latency_s, log_error(predictor(device, held)(tiles, latency_s), held[3])


def toml(tiles: GemmTiles, latency_s: float) -> str:
    """Return the tables of a device's TOML file."""
    shapes = ", ".join(f"[{a}, {b}]" for a, b in tiles.tiles)
    return f"""[tiles]
source = "tiles"
processors = {tiles.processors}
shapes = [{shapes}]
efficiency = {tiles.efficiency:.3f}
operand_side = {tiles.operand_side:.1f}
overhead = "{tiles.tile_overhead_s * 1e6:.2f} us"
memory_fraction = {tiles.memory_fraction:.3f}
wave_overlap = {tiles.wave_overlap:.2f}
blend = {tiles.blend:.1f}
throttle = {tiles.throttle:.3f}
throttle_time = "{tiles.throttle_s * 1e3:.2f} ms"
# [gemm] latency = "{latency_s * 1e6:.2f} us\""""


def columns(path: str, names: tuple[str, ...], keep: dict[str, str]) -> Floats:
    """Return numeric columns of the rows whose cells agree with *keep*; shape ``(n_columns, n_rows)``."""
    rows = [
        row for row in read_table(path, names) if all(row.text(key) == want for key, want in keep.items())
    ]
    return np.array([[row.number_in(name) for row in rows] for name in names])


def main() -> None:
    """Fit one device and print what its file needs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("table")
    parser.add_argument("--device", required=True, choices=sorted(MACHINES))
    parser.add_argument("--kernels")
    parser.add_argument("--hardware")
    given: Any = parser.parse_args()
    device = replace(load_device(given.device), gemm_tiles=None)
    rows = columns(given.table, ("m", "n", "k", "us"), {})
    rows[3] *= 1e-6
    thin = None
    if given.kernels:
        keep = {"hardware": given.hardware, "kernel": "gemm", "direction": "fwd"}
        thin = columns(given.kernels, ("m", "n", "k", "time_us"), keep)
        thin = thin[:, thin[0] <= 64]
        thin = thin[:, split(thin.shape[1])] * np.array([[1], [1], [1], [1e-6]])
    tiles, latency_s, errors = fit(device, rows, thin)
    print(toml(tiles, latency_s))
    held = np.abs(errors)
    print(f"# held out: {len(held)} products, median {np.median(held):.3f}, mean {held.mean():.3f}")


if __name__ == "__main__":
    main()
