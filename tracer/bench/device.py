"""Turns timed kernels into a device: the figures of a catalogue file, with how each was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from foretrace.tracer.bench.kernels import Bench, Kernel, line


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFigures:
    """Figures of a device, in the terms of a machine file."""

    name: str  # name of the device
    kind: str  # ``"gpu"`` or ``"cpu"``
    memory_bytes: int  # size of its memory
    memory_bytes_per_s: float  # bandwidth of its memory
    launch_s: float  # time of the host per operation
    peaks: Mapping[str, float]  # FLOP/s of the fastest product by dtype
    # constants of matrix products, of element-wise operations, and efficiency of attention over the peak,
    # its masked half not counted
    gemm_efficiency: float
    gemm_latency_s: float
    gemm_memory_fraction: float
    memory_fraction: float
    memory_latency_s: float
    attention_forward: float
    attention_backward: float
    # by figure, the key of its source: ``memory``, ``bandwidth``, ``launch``, ``peak``, ``gemm``,
    # ``gemm_memory``, ``memory_bound``, ``latency``, ``attention``, and ``clock`` if it is known
    sources: Mapping[str, str]
    sustained_clock: float = 1.0  # rate under lasting load over that in a burst; written if it has a source


def device_toml(d: DeviceFigures, table: str = "") -> str:
    """Return the tables of a device, below *table* if one is given (``"device"`` in a machine file)."""
    prefix, source = f"{table}." if table else "", d.sources
    head = f"[{table}]\n" if table else ""
    peaks = "\n".join(
        f'{dtype} = {{ value = "{rate / 1e9:.2f} GFLOP/s", source = "{source["peak"]}" }}'
        for dtype, rate in d.peaks.items()
    )
    clock = (
        f'sustained_clock_fraction = {{ value = {d.sustained_clock:.4f}, source = "{source["clock"]}" }}\n'
        if "clock" in source
        else ""
    )
    return f"""\
{head}name = "{d.name}"
kind = "{d.kind}"
memory = {{ value = "{d.memory_bytes / 1e9:.3f} GB", source = "{source["memory"]}" }}
memory_bandwidth = {{ value = "{d.memory_bytes_per_s / 1e9:.3f} GB/s", source = "{source["bandwidth"]}" }}
launch = {{ value = "{d.launch_s * 1e6:.2f} us", source = "{source["launch"]}" }}
{clock}
[{prefix}peak]
{peaks}

[{prefix}gemm]
efficiency = {{ value = {d.gemm_efficiency:.4f}, source = "{source["gemm"]}" }}
latency = {{ value = "{d.gemm_latency_s * 1e6:.2f} us", source = "{source["gemm"]}" }}
memory_fraction = {{ value = {d.gemm_memory_fraction:.4f}, source = "{source["gemm_memory"]}" }}

[{prefix}memory_bound]
fraction = {{ value = {d.memory_fraction:.4f}, source = "{source["memory_bound"]}" }}
latency = {{ value = "{d.memory_latency_s * 1e6:.2f} us", source = "{source["latency"]}" }}

[{prefix}attention]
efficiency_forward = {{ value = {d.attention_forward:.4f}, source = "{source["attention"]}" }}
efficiency_backward = {{ value = {d.attention_backward:.4f}, source = "{source["attention"]}" }}
"""


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
