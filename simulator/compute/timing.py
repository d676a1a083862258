"""How long operations take on a device: products, attention, memory, and the host that launches them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import isfinite
from types import MappingProxyType
from typing import Final

from foretrace.simulator.compute.attention import PRODUCTS, attention_s, latency_of
from foretrace.simulator.compute.gemm import CONVOLUTION, UNALIGNED, gemm_s, unaligned_rate
from foretrace.simulator.program import to_ns
from foretrace.simulator.workload.ops import Comm, Op
from foretrace.topologies.device import Device
from foretrace.topologies.units import format_bandwidth, format_flops, format_time

FITTED_SIDE: Final = 256
"""Shortest side of the products that the three constants of a device without tiles were fitted on."""


def memory_s(op: Op, device: Device) -> float:
    """Return the time of an operation bound by memory: ``bytes / (fraction BW) + addressing + n t0``."""
    busy_s = op.bytes_moved / (device.memory_bound_fraction * device.memory_bytes_per_s)
    return busy_s + _addressing_s(op, device) + op.count * device.memory_bound_latency_s


def _addressing_s(op: Op, device: Device) -> float:
    """Return by how much kernels that address each element outlast their bytes."""
    if not op.addressed or device.gemm_tiles is None:
        return 0.0
    # What a kernel needs for addresses runs beside its loads, so that only what takes longer than they do
    # counts.
    per_byte = 1 / (device.memory_bound_fraction * device.memory_bytes_per_s)
    per_element = 1e-9 / (device.addressed_per_ns * device.gemm_tiles.processors)
    return sum(max(one.n_elements * per_element - one.bytes_moved * per_byte, 0.0) for one in op.addressed)


COPY_START_S: Final = 2e-6
"""Seconds of a copy over the link to the host, however small.

Copies of at most 4 KiB to the host in traces of V100, A100 and H100: medians of 14 files
1 to 2.8 µs, those of H100 2.2 to 2.8; to the device 1 to 7.
"""


def link_s(size_bytes: float, device: Device) -> float:
    """Return the time of a copy of *size_bytes* between *device* and pinned memory of its host."""
    return COPY_START_S + size_bytes / device.host_bytes_per_s


COSTS: Final[Mapping[str, Callable[[Op, Device], float]]] = MappingProxyType(
    {"gemm": gemm_s, "attention": attention_s, "attention_backward": attention_s, "memory": memory_s}
)
"""Cost of each kind of operation."""


def fixed_s(op: Op, device: Device) -> float:
    """Return the part of the time of *op* that does not depend on its size."""
    if op.kind in PRODUCTS:
        return op.count * latency_of(op, device)
    return op.count * (device.memory_bound_latency_s if op.kind == "memory" else device.gemm_latency_s)


def factor_of(op: Op) -> str:
    """Return the calibration factor that applies to *op*, a key of ``Device.factors``.

    An optimizer passes over memory that is already allocated, once and in order; copies of gathered
    parameters write to newly allocated memory; operations of a layer find much of their data in a cache.
    """
    if op.kernel == CONVOLUTION:
        return "convolutions"
    if op.kind != "memory":
        return "products" if op.kind == "gemm" else "attention"
    return {"optimizer": "optimizer", "copy": "copies"}.get(op.name.partition(".")[0], "memory")


def calibrated_s(op: Op, seconds: float, device: Device) -> float:
    """Return the time of *op* on a calibrated device, given the time by its figures."""
    factor = device.factors.get(factor_of(op), 1.0)
    fixed = fixed_s(op, device)
    # Fixed parts are calibrated by a factor of their own, which is in the device's latencies already.
    return fixed + factor * (seconds - fixed) if factor != 1.0 else seconds


LAUNCHING: Final = "host: "
"""How the note begins that says what the host's time to launch is taken to be."""


@lru_cache(maxsize=256)
def in_training(device: Device) -> Device:
    """Return *device* with the clock that it sustains in training."""
    clock = device.sustained_clock_fraction * device.training_clock_fraction
    # The share of training is used up here, so that nobody applies it twice.
    return replace(device, sustained_clock_fraction=clock, training_clock_fraction=1.0)


BARE_PER_OPERATION: Final = 8 / 60
"""Time of the host for an operator that stands alone, over that of an operation of a model with the framework
around it, 60 us: 5 us for a call from Python without a gradient (pytorch/pytorch issue 41383), 3 us for the
launch (meta-pytorch/tritonbench pull request 1017)."""


class ComputeModel:
    """Computes how long operations take on *device*, and keeps track of the assumptions used.

    The formulas are the same for a GPU and for a CPU in its place; the constants differ.

    *precision*: dtype of the job; the device must have a peak for it. *training*: use the clock of training,
    not that of one matrix product after another.

    Raises CatalogError if the device has no peak for *precision*.
    """

    def __init__(self, device: Device, precision: str, *, training: bool = True) -> None:
        device.peak(precision)
        self.device = in_training(device) if training else device
        self.precision = precision
        # Per model, not for all: the same operation costs something else on another device, or calibrated.
        self._seconds: dict[Op, float] = {}

    def op_s(self, op: Op) -> float:
        """Return the time of *op* on the device, in seconds, without that of launching it."""
        if op not in self._seconds:
            self._seconds[op] = calibrated_s(op, COSTS[op.kind](op, self.device), self.device)
        return self._seconds[op]

    def duration_ns(self, ops: Iterable[Op | Comm]) -> int:
        """Return how long the operations among *ops* take when issued one after another.

        The host launches operations while the device runs earlier ones, so the slower of the two decides:
        ``max(sum of op_s, number of operations * launch_s)``. Communications are not counted here.
        """
        alone = [op for op in ops if isinstance(op, Op)]
        busy_s = sum(self.op_s(op) for op in alone)
        return to_ns(max(busy_s, sum(op.n_launches for op in alone) * self.device.launch_s))

    @property
    def call_s(self) -> float:
        """Time of the host for an operator that stands alone, without a framework around it, in s."""
        # ``launch`` of a processor is measured on such operators.
        return self.device.launch_s * (1.0 if self.device.kind == "cpu" else BARE_PER_OPERATION)

    @property
    def notes(self) -> list[str]:
        """Assumptions behind the results so far, as sentences for a report."""
        found = [*_constants(self.device, self.precision, self._attention())]
        if self.device.assumed:
            found.append(f"warning: {self.device.name}: {self.device.assumed}")
        found += [f"calibrated: {name} x {factor:.3f}" for name, factor in self.device.factors.items()]
        small = sorted({(op.m, op.n, op.k) for op in self._seconds if _is_small(op)}, key=min)
        if small and self.device.gemm_tiles is None:
            found.append(
                f"GEMM shapes with a side below {FITTED_SIDE}, outside what the constants were fitted on: "
                f"{len(small)} (e.g. {'x'.join(map(str, small[0]))}): roofline used"
            )
        return found + self._unaligned()

    def _unaligned(self) -> list[str]:
        """Return a sentence on products whose rows tensor cores cannot be fed with, if there were any."""
        has_tiles = self.device.gemm_tiles is not None
        unaligned = [op for op in self._seconds if op.kernel == UNALIGNED and has_tiles]
        ops = [op for op in unaligned if isfinite(unaligned_rate(op, self.device))]
        if not ops:
            return []
        largest = max(ops, key=lambda op: op.flops)
        shape = "x".join(map(str, (largest.m, largest.n, largest.k)))
        rate = format_flops(unaligned_rate(largest, self.device))
        return [f"GEMM with rows that do not begin at multiples of 16 bytes (e.g. {shape}): {rate} at most"]

    def _attention(self) -> list[str]:
        """Return the kernels that the attention asked for so far runs in, or the device's own."""
        own = self.device.attention_kernel
        asked = {op.kernel or own for op in self._seconds if op.kind in PRODUCTS}
        return sorted(asked) or [own]


def _constants(device: Device, precision: str, attention: Sequence[str]) -> list[str]:
    """The constants behind each kind of operation, with their sources; *attention* names kernels."""
    peak, bandwidth = format_flops(device.peak(precision)), format_bandwidth(device.memory_bytes_per_s)
    scaled = {"launch": "launch", "memory_bound.fraction": "fixed"}
    lines = {
        **_gemm_lines(device, f"{peak} ({precision})", bandwidth),
        **_attention_lines(device, attention),
        "memory_bound.fraction": f"memory-bound: {device.memory_bound_fraction:.2f} of {bandwidth}, "
        f"+ {format_time(device.memory_bound_latency_s)} each",
        "launch": f"{LAUNCHING}{format_time(device.launch_s)} per operation",
        "training_clock_fraction": f"clock in training: {device.sustained_clock_fraction:.2f} of every peak",
    }
    found = []
    for name, line in lines.items():
        factor = device.factors.get(scaled.get(name, ""))
        said = [device.sources.get(name, ""), "" if factor is None else f"x {factor:.3f}, calibrated"]
        found.append(f"{line} ({'; '.join(filter(None, said))})" if any(said) else line)
    return found


def _gemm_lines(device: Device, peak: str, bandwidth: str) -> dict[str, str]:
    """What matrix products rest on: tiles where they are known, else an efficiency."""
    tiles, latency = device.gemm_tiles, format_time(device.gemm_latency_s)
    if tiles is None:
        shares = f"{device.gemm_efficiency:.2f} of {peak}, {device.gemm_memory_fraction:.2f} of {bandwidth}"
        return {"gemm.efficiency": f"GEMM on {device.name}: {shares}, + {latency}"}
    shares = f"{tiles.efficiency:.2f} of {peak}, {tiles.memory_fraction:.2f} of {bandwidth}"
    line = f"GEMM on {device.name}: tiles on {tiles.processors} processors, {shares}, + {latency}"
    return {"tiles.processors": line}


def _attention_lines(device: Device, names: Sequence[str]) -> dict[str, str]:
    """What attention in the kernels of *names* rests on: their constants where listed, else an efficiency."""
    kernels = {name: device.attention_kernels.get(name) for name in names}
    if device.gemm_tiles is None or None in kernels.values():
        ways = (device.attention_efficiency_forward, device.attention_efficiency_backward)
        line = "attention: {:.2f} forward and {:.2f} backward of that peak".format(*ways)
        return {"attention.efficiency_forward": line}
    return {
        f"attention.kernels.{name}": f"attention: {name}, {kernel.forward.efficiency:.2f} forward and "
        f"{kernel.backward.efficiency:.2f} backward of that peak, softmax beside it"
        for name, kernel in kernels.items()
        if kernel is not None
    }


def _is_small(op: Op) -> bool:
    return op.kind == "gemm" and min(op.m, op.n, op.k) < FITTED_SIDE
