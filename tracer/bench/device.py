"""Describes what was measured: a device by its kernels, and this machine as a cluster of processes over gloo.

The results are texts of catalogue files, so that the simulator can use them without the tracer knowing it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Final

from foretrace.tracer.bench.kernels import Bench, Kernel, line
from foretrace.tracer.bench.world import PRODUCTS, SIZES_BYTES, started
from foretrace.traces.report.format import format_share


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
    moved = sum(one.gb_per_s * one.time_us for one in spread)
    taken = sum(one.time_us for one in spread)
    launch_s = next(one.time_us for one in bursts if one.kernel == "launch") / 1e6
    return DeviceFigures(
        name=measured.hardware.lower().replace(" ", "-"),
        kind="gpu" if measured.device == "cuda" else "cpu",
        memory_bytes=measured.memory_bytes,
        memory_bytes_per_s=bandwidth,
        launch_s=launch_s,
        peaks={products[0].dtype: peak},
        gemm_efficiency=1 / max(1.0, slope * peak),  # on a busy machine the line may even fall
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


def _attention(kernels: Sequence[Kernel], direction: str) -> float:
    """Return the rate of attention over the longest sequence."""
    found = [one for one in kernels if one.kernel == "attention" and one.direction == direction]
    return _flops_per_s(max(found, key=lambda one: one.seq))


GEMM_MEMORY_FRACTION: Final = 0.8
"""Share of memory bandwidth that a product reaches, taken where it was not measured."""

SOURCES: Final = {
    **dict.fromkeys(("peak", "gemm"), "gemm"),
    **dict.fromkeys(("launch", "latency"), "operation"),
    "memory": "machine",
    "bandwidth": "bandwidth",
    "gemm_memory": "assumed",
    "memory_bound": "adamw",
    "attention": "attention",
}
"""By figure of a process, the key of its source."""

SAID_OF_PROCESS: Final = (
    *("gemm_efficiency", "gemm_latency_s", "memory_bytes_per_s", "memory_fraction"),
    *("attention_forward", "attention_backward"),
)
"""Figures of a process that have one name here and in what `Measured.describe` returns."""

TIME_SLICE: Final = "0.75 ms"
"""Wait of a message for a receiver without a core, where no more processes than cores were measured. Four
processes on two cores of an AMD EPYC waited 0.4 to 1.4 ms per step of a ring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured."""

    n_processes: int  # processes that communicated
    cores: int  # processor cores that they may use
    memory_bytes: int  # memory of the machine
    torch: str  # version of torch
    process: DeviceFigures  # one process, while as many processes compute as there are cores
    # by operation and number of ranks, the time at each of ``SIZES_BYTES``
    times_s: Mapping[str, Mapping[int, Sequence[float]]]

    @property
    def best_bytes_per_s(self) -> float:
        """Highest rate at which one rank was seen to send, over all operations and sizes."""
        return max(
            _sent_bytes(kind, size, n) / time_s
            for kind, by_ranks in self.times_s.items()
            for n, times in by_ranks.items()
            for size, time_s in zip(SIZES_BYTES, times, strict=True)
        )

    def describe(self) -> dict[str, Any]:
        """Return every figure in plain JSON types."""
        c, found = self.process, asdict(self)
        del found["process"]
        compute = {name: getattr(c, name) for name in SAID_OF_PROCESS}
        compute |= {"peak_flops_per_s": c.peaks["fp32"], "operation_s": c.launch_s}
        times = {kind: {str(n): list(t) for n, t in rows.items()} for kind, rows in self.times_s.items()}
        return found | {"compute": compute, "times_s": times, "sizes_bytes": list(SIZES_BYTES)}

    def lines(self) -> list[str]:
        """Return what a person wants to know, in a few lines."""
        c = self.process
        element_wise = format_share(c.memory_fraction, ".0f")
        found = [
            f"{self.cores} cores, {self.memory_bytes / 1e9:.0f} GB, torch {self.torch}",
            f"one process: {c.peaks['fp32'] / 1e9:.0f} GFLOP/s, {c.launch_s * 1e6:.0f} µs an operation",
            f"memory: {c.memory_bytes_per_s / 1e9:.1f} GB/s, {element_wise} element-wise",
        ]
        for kind, rows in self.times_s.items():
            for n, times in rows.items():
                rate = _sent_bytes(kind, SIZES_BYTES[-1], n) / times[-1]
                found.append(
                    f"{kind} over {n}: {times[0] * 1e6:.0f} µs for {SIZES_BYTES[0] // 1024} KiB, "
                    f"{rate / 1e9:.2f} GB/s per rank for {SIZES_BYTES[-1] >> 20} MiB"
                )
        return found


def measure(n_processes: int) -> Measured:
    """Measure this machine with *n_processes* gloo processes.

    Raises RecordError: torch is not installed, or a process failed.
    """
    cores = len(os.sched_getaffinity(0))
    options = {"n_computing": min(cores, n_processes)}
    found = started("machine", "gloo", options, n_processes, env={"GLOO_SOCKET_IFNAME": "lo"})
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    figures = ("time_us", "tflops", "gb_per_s")
    kernels = [
        Kernel(**rows[0] | {name: median(row[name] for row in rows) for name in figures})
        for rows in zip(*found["kernels"], strict=True)
    ]
    process = device_of(
        Bench(
            hardware="cpu-core", device="cpu", torch=found["torch"], threads=1, memory_bytes=memory_bytes,
            kernels=kernels,
        )
    )  # fmt: skip
    times_s = {
        kind: {int(n): _rising(times) for n, times in rows.items()} for kind, rows in found["times_s"].items()
    }
    return Measured(
        n_processes=n_processes,
        cores=cores,
        memory_bytes=memory_bytes,
        torch=found["torch"],
        process=replace(process, gemm_memory_fraction=GEMM_MEMORY_FRACTION, sources=SOURCES),
        times_s=times_s,
    )


def _rising(times: Sequence[float]) -> list[float]:
    """Return *times* without falls: a time above the one of the next larger size is lowered to it."""
    return list(itertools.accumulate(reversed(times), min))[::-1]


def _sent_bytes(kind: str, size_bytes: int, n_ranks: int) -> float:
    """Return what one rank sends at the least: the whole size times the bus factor of nccl-tests."""
    if kind == "p2p":
        return size_bytes
    return size_bytes * (2 if kind == "all_reduce" else 1) * (n_ranks - 1) / n_ranks


def machine_toml(measured: Measured) -> str:
    """Return the machine file that ``foretrace simulate --cluster`` takes."""
    crowded = measured.n_processes > measured.cores
    time_slice, reason = ("0 us", "contained") if crowded else (TIME_SLICE, "crowded")
    return f"""\
# Written by `foretrace topology detect`. A device is one single-threaded process; they talk through gloo.
description = "this machine: CPU processes, gloo over loopback"
gpus_per_node = {measured.n_processes}
cores = {{ value = {measured.cores}, source = "machine" }}
time_slice = {{ value = "{time_slice}", source = "{reason}" }}

{device_toml(measured.process, "device")}
[intra]
kind = "loopback"
bandwidth = {{ value = "{measured.best_bytes_per_s / 1e9:.3f} GB/s", source = "best" }}
latency = {{ value = "{measured.times_s["p2p"][2][0] * 1e6:.1f} us", source = "gloo" }}

{_tables(measured)}
[sources]
machine = "{measured.cores} cores, torch {measured.torch}"
gemm = "line through {len(PRODUCTS)} products in float32, out of no cache, one thread per process"
bandwidth = "x + 1 in place on 64 MB, one thread per process"
adamw = "AdamW, norms, residuals and gates of a Llama of hidden size 256, over that bandwidth"
operation = "chain of tiny products and sums, forward and backward"
attention = "scaled_dot_product_attention, causal, 512 tokens, head dimension 32"
assumed = "not measured: products here are bound by arithmetic"
best = "highest rate seen in the times below"
gloo = "median of gloo between {measured.n_processes} processes"
crowded = "wait for a core when processes outnumber cores; measured on another machine"
contained = "the times below were measured with more processes than cores and contain that wait"
"""


def _tables(measured: Measured) -> str:
    sizes = ", ".join(f'"{size // 1024} KiB"' for size in SIZES_BYTES)
    lines = ["[intra.collectives]", f"sizes = [{sizes}]", ""]
    for kind, rows in measured.times_s.items():
        lines += [
            f"[intra.collectives.{kind}]",
            'source = "gloo"',
            "",
            f"[intra.collectives.{kind}.times_us]",
        ]
        lines += [f"{n} = [{', '.join(f'{t * 1e6:.1f}' for t in times)}]" for n, times in rows.items()]
        lines.append("")
    return "\n".join(lines)
