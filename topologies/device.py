"""One accelerator, or one processor that stands in for it: what it can do and what it costs to use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

from foretrace.door import own_table
from foretrace.topologies.errors import CatalogError
from foretrace.topologies.kernel import AttentionKernel, GemmTiles

KINDS: Final = ("gpu", "cpu")
DTYPES: Final = ("fp4", "fp8", "bf16", "fp16", "tf32", "fp32")

_FIGURES: Final = own_table("topologies/device.toml")

KEYS: Final[Mapping[str, str]] = MappingProxyType({name: said["key"] for name, said in _FIGURES.items()})
"""The figures of a device by field, and their keys in a file, in the order in which people read them."""

NOT_GIVEN: Final[Mapping[str, tuple[float, str]]] = MappingProxyType(
    {name: (said["not_given"], said["why"]) for name, said in _FIGURES.items() if "why" in said}
)
"""Figures of a device that a file may leave out, what they are then, and what that means."""

_FRACTIONS: Final = tuple(name for name, said in _FIGURES.items() if said.get("is_share"))
_LATENCIES: Final = ("gemm_latency_s", "memory_bound_latency_s", "launch_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What one GPU, or one CPU process, can do; every figure with its source in ``sources``.

    A matrix product takes ``max(2mnk / (e P c), bytes / (b BW)) + t0`` with ``e`` the ``gemm_efficiency``,
    ``P`` the peak of its dtype, ``c`` the ``sustained_clock_fraction``, ``b`` the ``gemm_memory_fraction``,
    ``BW`` the memory bandwidth and ``t0`` the ``gemm_latency_s``; an operation bound by memory takes
    ``bytes / (memory_bound_fraction BW) + memory_bound_latency_s``.

    Attributes:
        name: as in the catalogue.
        kind: ``"gpu"`` or ``"cpu"``.
        memory_bytes: size of its memory.
        memory_bytes_per_s: bandwidth of that memory.
        peak_flops_per_s: dense peak by dtype.
        gemm_efficiency: share of the peak that a large matrix product reaches in a short burst.
        gemm_latency_s: fixed part of a matrix product.
        gemm_memory_fraction: share of memory bandwidth that a matrix product reaches.
        gemm_split_share: rate of an 8-bit product that adds to a second accumulator now and then, over that
            of one that does not; 1 where sums are exact anyway.
        gemm_fp4_share: share of the 4-bit peak that products come as close to as they do to other peaks.
        gemm_fp32_share: the same of the fp32 peak, which the processors of GeForce count twice: half of their
            fp32 units share an issue port with integer arithmetic.
        memory_bound_fraction: share of memory bandwidth that an element-wise operation reaches.
        memory_bound_latency_s: fixed part of an element-wise operation.
        addressed_per_ns: elements per nanosecond and processor of such an operation that computes the address
            of each.
        attention_efficiency_forward: share of the bf16 peak, causal half of the FLOPs counted.
        attention_efficiency_backward: the same for the backward pass.
        launch_s: time of the host to launch one kernel or operation.
        sustained_clock_fraction: clock under lasting load over clock in a short burst; times every peak.
        sustained_after_s: load after which half of that loss of clock is there; 0 means at once.
        training_clock_fraction: clock while a model trains, with memory and links at work too, over that of
            one product after another.
        host_bytes_per_s: bandwidth of copies between it and pinned memory of its host, each way.
        compute_capability: NVIDIA's number of what its hardware can do, 9.0 of Hopper; 0 of others.
        power_limit_w: what its board draws at most, in a module its share; 0 where that is not known.
        reserved_bytes: memory that the framework's context and libraries take before the first tensor.
        gemm_tiles: how matrix products are cut into tiles; None where only the three constants are known.
        attention_kernels: fused attention kernels by name, where they were measured.
        attention_kernel: the one of them that training uses.
        assumed: what of this device was not measured on it but taken from its class, as a sentence.
        factors: how many times as long ``products``, ``attention``, ``memory``, ``copies``, ``optimizer`` run
            here as the figures say, out of a calibration; 1 where nothing is given. Those of ``fixed``,
            ``launch`` and ``link`` are in the figures already.
        sources: where each figure comes from, by its key in a file: one of ``KEYS``, or ``peak.<dtype>``.
    """

    name: str
    kind: str
    memory_bytes: int
    memory_bytes_per_s: float
    peak_flops_per_s: Mapping[str, float] = field(hash=False)
    gemm_efficiency: float
    gemm_latency_s: float
    gemm_memory_fraction: float
    memory_bound_fraction: float
    memory_bound_latency_s: float
    attention_efficiency_forward: float
    attention_efficiency_backward: float
    launch_s: float
    addressed_per_ns: float = 1.76
    sustained_clock_fraction: float = 1.0
    sustained_after_s: float = 0.0
    gemm_split_share: float = 1.0
    gemm_fp4_share: float = 1.0
    gemm_fp32_share: float = 1.0
    training_clock_fraction: float = 1.0
    reserved_bytes: int = 0
    host_bytes_per_s: float = 25e9
    compute_capability: float = 0.0
    power_limit_w: float = 0.0
    gemm_tiles: GemmTiles | None = field(default=None, repr=False)
    attention_kernels: Mapping[str, AttentionKernel] = field(default_factory=dict, hash=False, repr=False)
    attention_kernel: str = ""
    assumed: str = ""
    factors: Mapping[str, float] = field(default_factory=dict, hash=False)
    sources: Mapping[str, str] = field(default_factory=dict, hash=False, repr=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise CatalogError(f"device {self.name}: kind {self.kind!r} is not one of {', '.join(KINDS)}")
        if not self.peak_flops_per_s:
            raise CatalogError(f"device {self.name} has no peak; give at least one of {', '.join(DTYPES)}")
        positive = {"memory": self.memory_bytes, "memory_bandwidth": self.memory_bytes_per_s}
        positive |= {f"peak.{dtype}": peak for dtype, peak in self.peak_flops_per_s.items()}
        for name, value in positive.items():
            if value <= 0:
                raise CatalogError(f"device {self.name}: {name} = {value} must be above zero")
        for name in _FRACTIONS:
            if not 0 < (value := getattr(self, name)) <= 1:
                raise CatalogError(f"device {self.name}: {name} = {value} is a share, above 0 and at most 1")
        if not 0 <= self.reserved_bytes < self.memory_bytes:
            raise CatalogError(
                f"device {self.name}: reserved = {self.reserved_bytes} bytes of {self.memory_bytes}; "
                "give less than the memory"
            )

    def peak(self, dtype: str) -> float:
        """Return the dense peak of *dtype* in FLOP/s. Raises CatalogError if the device has none."""
        if dtype not in self.peak_flops_per_s:
            known = ", ".join(self.peak_flops_per_s)
            raise CatalogError(
                f"device {self.name} has no peak for {dtype!r}; it has {known}, to be given as the precision"
            )
        return self.peak_flops_per_s[dtype]

    def shared(self, share: float) -> Device:
        """Return the device as one of several users sees it, who each get *share* of its time.

        Rates shrink and fixed times grow by the same factor: a process that is on the processor half of the
        time does everything half as fast. Memory size is not touched.
        """
        rates = {dtype: peak * share for dtype, peak in self.peak_flops_per_s.items()}
        times = {name: getattr(self, name) / share for name in _LATENCIES}
        return replace(
            self, peak_flops_per_s=rates, memory_bytes_per_s=self.memory_bytes_per_s * share, **times
        )

    def describe(self) -> dict[str, Any]:
        """Return every figure as plain JSON types, and its source by the same name under ``sources``."""
        sources = {name: self.sources[key] for name, key in KEYS.items() if key in self.sources}
        if peaks := [source for key, source in self.sources.items() if key.startswith("peak.")]:
            sources["peak_flops_per_s"] = peaks[0]
        figures = {name: getattr(self, name) for name in KEYS}
        return {
            "name": self.name,
            "kind": self.kind,
            "peak_flops_per_s": dict(self.peak_flops_per_s),
            **figures,
            "sources": sources,
        }
