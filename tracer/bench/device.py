"""Turns timed kernels into a device: the figures of a catalogue file, with how each was found."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from foretrace.tracer.bench.cases import Kernel
from foretrace.tracer.bench.kernels import Bench
from foretrace.tracer.device_file import DeviceFigures, device_toml
from foretrace.tracer.timing import line

ELEMENTWISE = ("norm", "activation", "optimizer")
"""Kernels whose share of bandwidth stands for element-wise work."""


def device_of(measured: Bench) -> DeviceFigures:
    """Return the figures of the device that *measured* is about.

    The peak is the fastest product, the bandwidth that of ``x + 1`` in place on an array that no cache holds:
    what a data sheet promises beyond that is not known here, and efficiencies are over what was reached.
    """
    bursts = [one for one in measured.kernels if one.load == "burst"]
    products = [one for one in bursts if one.kernel == "gemm"]
    peak = max(_flops_per_s(one) for one in products)
    slope, latency_s = line([(_flops_per_s(one) * one.time_us / 1e6, one.time_us / 1e6) for one in products])
    bandwidth = next(one.gb_per_s for one in bursts if one.kernel == "stream") * 1e9
    spread = [one for one in bursts if one.kernel in ELEMENTWISE]
    moved, taken = (sum(f(one) for one in spread) for f in (lambda o: o.gb_per_s * o.time_us, _time_us))
    launch_s = next(one.time_us for one in bursts if one.kernel == "launch") / 1e6
    return DeviceFigures(
        name=measured.hardware.lower().replace(" ", "-"),
        kind="gpu" if measured.device == "cuda" else "cpu",
        memory_bytes=measured.memory_bytes,
        memory_bytes_per_s=bandwidth,
        launch_s=launch_s,
        peaks={products[0].dtype: peak},
        gemm_efficiency=min(1.0, 1 / (slope * peak)),
        gemm_latency_s=latency_s,
        gemm_memory_fraction=min(1.0, max(max(one.gb_per_s for one in products) * 1e9 / bandwidth, 0.5)),
        memory_fraction=min(1.0, moved / taken * 1e9 / bandwidth),
        memory_latency_s=launch_s,
        attention_forward=min(1.0, _attention(bursts, "fwd") / peak),
        attention_backward=min(1.0, _attention(bursts, "bwd") / peak),
        sustained_clock=min(1.0, sustained_share(measured)),
        sources={
            **dict.fromkeys(("peak", "gemm", "gemm_memory"), "gemm"),
            **dict.fromkeys(("launch", "latency"), "launch"),
            "memory": "machine",
            "bandwidth": "stream",
            "memory_bound": "elementwise",
            "attention": "attention",
            "clock": "clock",
        },
    )


def sustained_share(measured: Bench) -> float:
    """Return the rate of products under lasting load over that in bursts; 1 if that was not measured."""
    by_shape: dict[tuple[object, ...], dict[str, float]] = {}
    for one in measured.kernels:
        if one.kernel == "gemm":
            key = (one.direction, one.m, one.n, one.k)
            by_shape.setdefault(key, {})[one.load] = one.time_us
    shares = [times["burst"] / times["sustained"] for times in by_shape.values() if "sustained" in times]
    return median(shares) if shares else 1.0


def to_toml(measured: Bench) -> str:
    """Return the file of the device, for ``base`` or ``device`` of a machine file."""
    on = f"torch {measured.torch}" + (f", {measured.threads} threads" if measured.device == "cpu" else "")
    return f"""\
# Written by `foretrace bench kernels` on {measured.hardware}, {on}.
{device_toml(device_of(measured))}
[sources]
machine = "what {measured.hardware} says of itself"
gemm = "line through products in three layouts, in bursts; the peak is the fastest of them"
stream = "x + 1 in place on an array that no cache holds, both ways counted"
elementwise = "norm, gated activation and AdamW over that bandwidth"
launch = "a tiny operation, one of many in a row, without a framework around it"
attention = "scaled_dot_product_attention, causal, the longest sequence"
clock = "products under lasting load over the same in bursts, median"
"""


def _flops_per_s(one: Kernel) -> float:
    return one.tflops * 1e12


def _time_us(one: Kernel) -> float:
    return one.time_us


def _attention(kernels: Sequence[Kernel], direction: str) -> float:
    """Return the rate of attention over the longest sequence."""
    found = [one for one in kernels if one.kernel == "attention" and one.direction == direction]
    return _flops_per_s(max(found, key=lambda one: one.seq))
