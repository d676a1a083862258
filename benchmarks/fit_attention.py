"""Fits how a fused attention kernel runs on a device to measured ones, and prints its table of constants.

    python benchmarks/fit_attention.py kernels.csv [more.csv ...] --device a100-80gb --name flash2
        --rows A100-SXM-80GB:FlashAttention-2 A100-PCIe-80GB:TE/FA@a100-pcie

Each ``--rows`` is hardware:implementation, with @device where the hardware is another device of that chip.
30 % of the rows are held out. A weak prior keeps constants that the rows do not show near what other kernels
have. A direction that no row measures is printed as the other one at 0.76 of its efficiency. What is known of
the kernel and not fitted is kept as the device's own kernel of that name has it: queries of a row of tiles,
steps of wide heads, scores per second. ``--only forward`` leaves out the other direction.

``--tail`` gives the tails, forward and backward, where all rows have as many tokens: the longest row of tiles
is then the same share of all work, and a tail cannot be told from a lower rate. It belongs to a kernel,
whatever runs it, and is at most 1: no order of work takes longer than an even share of it and the longest
part (Graham 1969, "Bounds on Multiprocessing Timing Anomalies").
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np
from fitting import Floats, minimize, split
from measured.kernels import columns
from measured.table import read_table

from foretrace.simulator.compute.benched import Bench, attention_ops
from foretrace.simulator.table import Row
from foretrace.simulator.workload.ops import Op
from foretrace.topologies.catalog import load_device
from foretrace.topologies.device import Device
from foretrace.topologies.kernel import AttentionKernel, AttentionPass

PRIOR = (0.75, 30.0, 0.7, 0.7e-6, 5e-6)
"""Efficiency, score width, tail, overhead and latency that a kernel has where rows do not show them."""

PRIOR_WEIGHT = 0.004
BACKWARD_SHARE = 0.76
"""Efficiency of a backward over that of its forward: flash2 on A100 has 0.81, cuDNN on B200 0.70."""


LONGEST_TAIL = 1.0
"""Tail of the worst order of work."""


def one_pass(x: Floats, known: AttentionPass, tail: float | None) -> AttentionPass:
    """Return the constants that the logarithms *x* stand for, with what is *known* of the kernel.

    A given *tail* is kept; none is longer than ``LONGEST_TAIL``.
    """
    efficiency, width, fitted, overhead, latency = (float(value) for value in np.exp(x))
    return replace(
        known,
        efficiency=min(efficiency, 1.0),
        score_width=width,
        tail=min(fitted, LONGEST_TAIL) if tail is None else tail,
        tile_overhead_s=overhead,
        latency_s=latency,
    )


def kernel_of(x: Floats, known: AttentionKernel, tails: Sequence[float] = ()) -> AttentionKernel:
    """Return forward and backward from ten logarithms, with their *tails* if those are given."""
    ahead, back = tails or (None, None)
    return AttentionKernel(
        forward=one_pass(x[:5], known.forward, ahead), backward=one_pass(x[5:], known.backward, back)
    )


def toml(name: str, kernel: AttentionKernel, source: str) -> str:
    """Return the tables of a device's TOML file."""
    lines = [f"[attention.kernels.{name}]", f'source = "{source}"']
    for direction in ("forward", "backward"):
        one = getattr(kernel, direction)
        lines += [
            f"[attention.kernels.{name}.{direction}]",
            f"efficiency = {one.efficiency:.3f}",
            f"score_width = {one.score_width:.1f}",
            f"tail = {one.tail:.2f}",
            f'overhead = "{one.tile_overhead_s * 1e6:.2f} us"',
            f'latency = "{one.latency_s * 1e6:.1f} us"',
            *(f"{name} = {value:g}" for name, value in _known(one).items()),
        ]
    return "\n".join(lines)


def _known(one: AttentionPass) -> dict[str, float]:
    """What of a pass a file says only where it is not the usual."""
    usual = {"queries": 128, "wide_step": 0, "narrowest": 0, "lasting_clock": 0, "scores_per_s": 0}
    keys = {"scores_per_s": "scores_per_second"}
    return {keys.get(n, n): getattr(one, n) for n, value in usual.items() if getattr(one, n) != value}


class Measured(NamedTuple):
    """A measured row: its device, operations, the load it was measured under, and seconds."""

    device: Device
    ops: list[Op]
    load: str
    seconds: float


def rows_of(table: str, specs: list[str], device: Device) -> list[Measured]:
    """Return every row that one of *specs* names."""
    found = []
    for spec in specs:
        hardware, _, rest = spec.partition(":")
        implementation, _, other = rest.partition("@")
        on = load_device(other) if other else device
        for row in read_table(table, ("hardware", "kernel", "impl")):
            if (row.text("hardware"), row.text("impl"), row.text("kernel")) == (
                *(hardware, implementation, "attention"),
            ):
                cells = columns(row, on)
                ops = [replace(op, kernel="fit") for op in attention_ops(Row(cells, row.number), "bf16")]
                found.append(Measured(on, ops, cells["load"], cells["time_us"] / 1e6))
    return found


def predictor(rows: list[Measured]) -> Callable[[AttentionKernel], Floats]:
    """Return the log errors of *rows* as a function of the kernel."""
    devices = {row.device.name: row.device for row in rows}.values()

    def errors(kernel: AttentionKernel) -> Floats:
        benches = {
            device.name: Bench(replace(device, attention_kernels={"fit": kernel})) for device in devices
        }
        return np.log([benches[row.device.name].seen_s(row.ops, row.load) / row.seconds for row in rows])

    return errors


def main() -> None:
    """Fit one kernel on one device and print what its file needs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tables", nargs="+")
    parser.add_argument("--device", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--rows", nargs="+", required=True)
    parser.add_argument("--tail", nargs=2, type=float, default=())
    parser.add_argument("--only", choices=("forward", "backward"))
    given: Any = parser.parse_args()
    device = load_device(given.device)
    rows = [row for table in given.tables for row in rows_of(table, given.rows, device)]
    if given.only:
        kind = {"forward": "attention", "backward": "attention_backward"}[given.only]
        rows = [row for row in rows if {op.kind for op in row.ops} == {kind}]
    unknown = AttentionPass(efficiency=1.0, score_width=0.0, tail=0.0, tile_overhead_s=0.0, latency_s=0.0)
    known = device.attention_kernels.get(given.name, AttentionKernel(forward=unknown, backward=unknown))
    seen = split(len(rows))
    fitted = predictor([row for row, keep in zip(rows, seen, strict=True) if keep])
    prior = np.log([*PRIOR, PRIOR[0] * BACKWARD_SHARE, *PRIOR[1:]])

    def loss(x: Floats) -> float:
        errors = np.abs(fitted(kernel_of(x, known, given.tail)))
        too_fast = max(float(x[0]), float(x[5]), 0.0)
        return float(errors.mean() + PRIOR_WEIGHT * np.abs(x - prior).mean() + too_fast)

    best = minimize(loss, list(prior), n_steps=1200)[0]
    kernel = kernel_of(best, known, given.tail)
    if not any(op.kind == "attention_backward" for row in rows for op in row.ops):
        forward = kernel.forward
        back = {f.name: getattr(forward, f.name) for f in fields(AttentionPass)}
        back["efficiency"] *= BACKWARD_SHARE
        kernel = AttentionKernel(forward=forward, backward=replace(known.backward, **back))
    held = predictor([row for row, keep in zip(rows, seen, strict=True) if not keep])(kernel)
    print(toml(given.name, kernel, given.name))
    print(f"# held out: {len(held)} of {len(rows)} rows, median {np.median(np.abs(held)):.3f}")


if __name__ == "__main__":
    main()
