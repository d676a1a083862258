"""Fits the clock that lasting load leaves of a device to a table of kernels measured one after another.

    python benchmarks/fit_clock.py kernels.csv --device b200-sxm --hardware B200-SXM-180GB

Products of at least 1,024 rows count. 30 % of them are held out; their error is printed before and after.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import numpy as np
from fitting import split

from simulator.compute.gemm import gemm_s
from simulator.validate.kernels import product_ops
from simulator.validate.table import read_table
from topologies.catalog import load_device


def main() -> None:
    """Print the clock fraction of one device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("table")
    parser.add_argument("--device", required=True)
    parser.add_argument("--hardware", required=True)
    given: Any = parser.parse_args()
    device = load_device(given.device)
    rows = [
        row
        for row in read_table(given.table, ("hardware", "kernel", "m", "n", "k", "time_us"))
        if row.text("hardware") == given.hardware
        and row.text("kernel") == "gemm"
        and row.integer("m") >= 1024
    ]
    seen = split(len(rows))
    ops = [product_ops(row, row.text("dtype"))[0] for row in rows]
    measured = np.array([row.number_in("time_us") for row in rows]) * 1e-6

    def errors(clock: float) -> np.ndarray[Any, np.dtype[np.float64]]:
        slower = replace(device, sustained_clock_fraction=clock)
        return np.abs(np.log([gemm_s(op, slower) for op in ops] / measured))

    clocks = np.linspace(0.6, 1.0, 41)
    found = float(min(clocks, key=lambda clock: float(np.median(errors(clock)[seen]))))
    print(f"sustained_clock_fraction = {found:.2f}")
    for name, clock in (("without", 1.0), ("with", found)):
        held = errors(clock)[~seen]
        print(f"# held out, {name}: {len(held)} products, median {np.median(held):.3f}")


if __name__ == "__main__":
    main()
