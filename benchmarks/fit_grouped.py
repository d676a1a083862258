"""Fits what grouped products take to measured ones: three constants of ``simulator.compute.gemm``.

    python benchmarks/fit_grouped.py kernels.csv

``TORCH_GROUPED_SHARE`` is the median rate of ``torch._grouped_mm`` over that of one product of as many rows;
``SPACING_S`` the median time per member where members are so small that their size does not matter;
``MEMBER_S`` what a member takes beside its share of one kernel, at the least error (mean and median, as in
fit_gemm.py). 30 % of the rows are held out.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
from fitting import Floats, split
from measured.kernels import measured_ops
from measured.machines import device_of
from measured.table import Row, read_table

from foretrace.simulator.compute.benched import REPEATED, Bench, model_of
from foretrace.simulator.compute.gemm import SPACING_S, gemm_s
from foretrace.simulator.workload.ops import Op

SMALL = 0.8
"""A member counts as small if alone it would take less than this share of ``SPACING_S``."""


def torch_share(row: Row) -> float:
    """Return the rate of a row of ``torch._grouped_mm`` over that of one product, quantising taken off."""
    model = model_of(device_of(row.text("hardware")), burst=False)
    ops, measured_us = measured_ops(row, model.device)
    products = [op for op in ops if op.kind == "gemm"]
    one_s = sum(gemm_s(replace(op, grouped=False), model.device) for op in products)
    return one_s / (measured_us / 1e6 - sum(model.op_s(op) for op in ops if op.kind != "gemm"))


def spacing_s(row: Row) -> float | None:
    """Return the time per member of a row of Transformer Engine, None unless its members are small."""
    device = device_of(row.text("hardware"))
    (op,), measured_us = measured_ops(row, device)
    alone_s = gemm_s(_member(op), device)
    return measured_us / 1e6 / op.batch if alone_s < SMALL * SPACING_S else None


def member_s(rows: list[Row]) -> None:
    """Print the ``MEMBER_S`` of least error over *rows*, and the error of those held out."""
    seen, tried_s = split(len(rows)), np.arange(0.0, 6.5e-6, 0.5e-6)

    def errors(seconds: float) -> Floats:
        with mock.patch("foretrace.simulator.compute.gemm.MEMBER_S", seconds):
            benches = {name: Bench(device_of(name)) for name in {row.text("hardware") for row in rows}}
            found = []
            for row in rows:
                bench = benches[row.text("hardware")]
                ops, measured_us = measured_ops(row, bench.device)
                found.append(abs(np.log(bench.seen_s(ops, REPEATED) * 1e6 / measured_us)))
        return np.array(found)

    def loss(seconds: float) -> float:
        found = errors(seconds)[seen]
        return float(found.mean() + np.median(found))

    fitted_s = min(tried_s, key=loss)
    print(f"MEMBER_S in us = {fitted_s * 1e6:.1f}  # of {seen.sum()} rows")
    held = errors(fitted_s)[~seen]
    print(f"# held out: {len(held)} rows, median {np.median(held):.3f}, mean {held.mean():.3f}")


def _member(op: Op) -> Op:
    return replace(op, batch=1, grouped=False, bytes_moved=op.bytes_moved // op.batch)


def report(name: str, values: Floats, *, unit: float = 1.0) -> None:
    """Print the median of the rows that are seen, and how far the others are from it."""
    seen = split(len(values))
    fitted = float(np.median(values[seen]))
    held = np.abs(np.log(values[~seen] / fitted))
    print(f"{name} = {fitted * unit:.2f}  # of {seen.sum()} rows")
    print(f"# held out: {len(held)} rows, median {np.median(held):.3f}")


def main() -> None:
    """Fit both and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("table")
    given: Any = parser.parse_args()
    rows = [row for row in read_table(given.table, ("kernel", "impl")) if "grouped" in row.text("kernel")]
    of_torch = [row for row in rows if "_grouped_mm" in row.text("impl")]
    of_members = [row for row in rows if row not in of_torch]
    others = [spacing for row in of_members if (spacing := spacing_s(row)) is not None]
    report("TORCH_GROUPED_SHARE", np.array([torch_share(row) for row in of_torch]))
    report("SPACING_S in us", np.array(others), unit=1e6)
    member_s(of_members)


if __name__ == "__main__":
    main()
