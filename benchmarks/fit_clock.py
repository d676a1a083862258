"""Fits the clock that lasting load leaves of a device, and how soon, to kernels repeated without a pause.

    python benchmarks/fit_clock.py kernels.csv --device b200-sxm --hardware B200-SXM-180GB

Products of at least 1,024 rows count. 30 % of them are held out; their error is printed before and after.
With ``--after`` the load after which half of the loss is there is fitted too, else the device's own is kept.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import numpy as np
from fitting import split
from measured.kernels import measured_ops
from measured.table import read_table

from foretrace.simulator.compute.benched import REPEATED, Bench
from foretrace.topologies.catalog import load_device

AFTERS_S = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Loads that are tried, in seconds."""


def main() -> None:
    """Print the clock fraction of one device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("table")
    parser.add_argument("--device", required=True)
    parser.add_argument("--hardware", required=True)
    parser.add_argument("--after", action="store_true")
    given: Any = parser.parse_args()
    device = load_device(given.device)
    afters_s = AFTERS_S if given.after else (device.sustained_after_s,)
    rows = [
        row
        for row in read_table(given.table, ("hardware", "kernel", "m", "n", "k", "time_us"))
        if row.text("hardware") == given.hardware
        and row.text("kernel") == "gemm"
        and row.integer("m") >= 1024
    ]
    seen = split(len(rows))
    ops = [measured_ops(row, device)[0][0] for row in rows]
    measured = np.array([row.number_in("time_us") for row in rows]) * 1e-6

    def errors(clock: float, after_s: float) -> np.ndarray[Any, np.dtype[np.float64]]:
        bench = Bench(replace(device, sustained_clock_fraction=clock, sustained_after_s=after_s))
        return np.abs(np.log([bench.seen_s([op], REPEATED) for op in ops] / measured))

    tried = [(clock, after_s) for clock in np.linspace(0.6, 1.0, 41) for after_s in afters_s]
    clock, after_s = min(tried, key=lambda one: float(np.mean(errors(*one)[seen])))
    print(f'sustained_clock_fraction = {clock:.2f}\nsustained_after = "{after_s * 1e3:.0f} ms"')
    for name, one in (("without", (1.0, 0.0)), ("at once", (clock, 0.0)), ("with", (clock, after_s))):
        held = errors(*one)[~seen]
        print(
            f"# held out, {name}: {len(held)} products, median {np.median(held):.3f}, mean {held.mean():.3f}"
        )


if __name__ == "__main__":
    main()
