"""Writes what was measured of a device as the TOML text that the catalogue's files have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFigures:
    """Figures of a device, in the terms of a machine file.

    Attributes:
        name: name of the device.
        kind: ``"gpu"`` or ``"cpu"``.
        memory_bytes: size of its memory.
        memory_bytes_per_s: bandwidth of its memory.
        launch_s: time of the host per operation.
        peaks: FLOP/s of the fastest product by dtype.
        gemm_efficiency, gemm_latency_s, gemm_memory_fraction: constants of matrix products.
        memory_fraction, memory_latency_s: constants of element-wise operations.
        attention_forward, attention_backward: efficiency over the peak, masked half not counted.
        sources: by figure, the key of its source: ``memory``, ``bandwidth``, ``launch``, ``peak``, ``gemm``,
            ``gemm_memory``, ``memory_bound``, ``latency``, ``attention``, and ``clock`` if it is known.
        sustained_clock: rate under lasting load over that in a burst; written if it has a source.
    """

    name: str
    kind: str
    memory_bytes: int
    memory_bytes_per_s: float
    launch_s: float
    peaks: Mapping[str, float]
    gemm_efficiency: float
    gemm_latency_s: float
    gemm_memory_fraction: float
    memory_fraction: float
    memory_latency_s: float
    attention_forward: float
    attention_backward: float
    sources: Mapping[str, str]
    sustained_clock: float = 1.0


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
