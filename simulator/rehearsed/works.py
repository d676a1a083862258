"""From the operations of a rehearsal to those of the workload, and so to the compute model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import pyarrow as pa

from foretrace.simulator.builder.offload import HOST_ADAM_PARAMS_PER_S, STATE_BYTES
from foretrace.simulator.compute.gemm import CONVOLUTION, UNALIGNED
from foretrace.simulator.compute.timing import ComputeModel, link_s
from foretrace.simulator.engine.slowdown import MILLION
from foretrace.simulator.errors import JobError
from foretrace.simulator.program import Int64Array
from foretrace.simulator.workload.ops import DTYPE_BYTES, Addressed, Op
from foretrace.topologies.device import Device
from foretrace.traces.rehearsal import CONVERSION, HOST_KINDS, ON_HOST

ATTENTION_KERNEL: Final = "flash2"
"""Kernel that ``scaled_dot_product_attention`` takes first on a GPU, as in frameworks/torchtitan.toml."""

HOST_BYTES_PER_S: Final = HOST_ADAM_PARAMS_PER_S * (STATE_BYTES + DTYPE_BYTES["fp32"])
"""What the processors of a node read and write per second: an Adam in one pass over an fp32 parameter, its
moments and its gradient takes the time that it does in every simulation, one in several passes longer."""

PREFIXES: Final[Mapping[str, str]] = MappingProxyType(
    {"fsdp.": "copy.", "aten._fused_adam": "optimizer.", "aten._foreach_": "optimizer."}
)
"""Operators for which a calibration has a factor of its own (``compute.timing.factor_of``)."""


CONVOLUTIONS: Final = ("aten.convolution", "aten.convolution_backward")
"""Operators whose products may have groups of channels as members."""

TENSOR_CORES_SINCE: Final[Mapping[str, float]] = MappingProxyType({"fp16": 7.0, "bf16": 8.0, "tf32": 8.0})
"""Compute capability from which on a GPU of NVIDIA has tensor cores for a type (CUDA C++ Programming Guide,
"Compute Capabilities")."""

RECURRENT: Final = "aten._cudnn_rnn"
"""Recurrent layers over all their tokens: one operation, whose kernels cuDNN launches, two a token."""


@dataclass(frozen=True, slots=True)
class Priced:
    """What the distinct operations of a rank cost.

    Attributes:
        seconds: time of each on the device, without its launch.
        bound: share of that time which memory bandwidth decides, in parts per million.
        kernels: number of kernels that the host launches for it, each as an operation of its own.
        is_known: whether the cost is that of the operator, not of its operands alone.
        kinds: as in ``traces.rehearsal.WORKS``.
    """

    seconds: Sequence[float]
    bound: Sequence[int]
    kernels: Sequence[int]
    flops: Sequence[int]
    bytes_moved: Sequence[int]
    dtypes: Sequence[str]
    names: Sequence[str]
    is_known: Sequence[bool]
    kinds: Sequence[str]


def op_of(row: Mapping[str, Any], device: Device) -> Op:
    """Return a row of ``traces.rehearsal.WORKS`` as an operation of the workload.

    A matrix product in a type that no device has a peak of counts as one in fp32.
    """
    name = row["name"]
    prefix = next((new for old, new in PREFIXES.items() if name.startswith(old)), "")
    # Such as complex numbers and integers, for which no device has a peak.
    dtype = _type_on(device, row["dtype"]) if row["dtype"] in DTYPE_BYTES else "fp32"
    return Op(
        name=prefix + name,
        kind=row["kind"],
        flops=row["flops"],
        bytes_moved=row["bytes_moved"],
        m=row["m"],
        n=row["n"],
        k=row["k"],
        dtype=dtype,
        count=row["kernels"],
        batch=row["batch"],
        grouped="grouped" in name,
        v_dim=row["v_dim"],
        causal=row["causal"],
        kernel=_kernel(row, device),
        rows=tuple(row["rows"] or ()),
        along=row["along"] or "",
        addressed=_addressed(row),
    )


def _type_on(device: Device, dtype: str) -> str:
    """Return the type in which *device* computes what it is asked for in *dtype*: tf32 only if it has it."""
    return "fp32" if dtype == "tf32" and dtype not in device.peak_flops_per_s else dtype


def _kernel(row: Mapping[str, Any], device: Device) -> str:
    """Return how a product runs that is by groups or not aligned, or attention; empty for all else."""
    if row["name"] in CONVOLUTIONS:
        return CONVOLUTION
    if "grouped" in row["name"]:
        return "torch"
    if row["kind"].startswith("attention") and ATTENTION_KERNEL in device.attention_kernels:
        return ATTENTION_KERNEL
    # Element-wise work that does not lie alike is addressed (see below), not unaligned.
    return "" if row["aligned"] or row["kind"] == "memory" else UNALIGNED


def _addressed(row: Mapping[str, Any]) -> tuple[Addressed, ...]:
    """Return the kernel of element-wise work whose operands do not lie alike."""
    if row["aligned"] or row["kind"] != "memory":
        return ()
    return (Addressed(row["m"], row["bytes_moved"]),)


def priced(works: pa.Table, compute: ComputeModel, sharing: int = 1) -> Priced:
    """Return what each of *works* costs, where *sharing* ranks share the processors of a node."""
    rows = works.to_pylist()
    return Priced(
        seconds=[_seconds(row, compute, sharing) for row in rows],
        # All or nothing: single kernels are bound by memory or by arithmetic.
        bound=[MILLION if row["kind"] == "memory" else 0 for row in rows],
        kernels=[0 if _is_needless(row, compute.device) else _launched(row) for row in rows],
        flops=[row["flops"] for row in rows],
        bytes_moved=[0 if _is_needless(row, compute.device) else row["bytes_moved"] for row in rows],
        dtypes=[row["dtype"] for row in rows],
        names=[row["name"] for row in rows],
        is_known=[row["is_known"] for row in rows],
        kinds=[row["kind"] for row in rows],
    )


def _launched(row: Mapping[str, Any]) -> int:
    """Return the kernels of a row, or 1 where a library launches them without the framework in between."""
    return 1 if row["name"].startswith(RECURRENT) else int(row["kernels"])


def _is_needless(row: Mapping[str, Any], device: Device) -> bool:
    """Whether a work prepares operands for tensor cores that *device* does not have for their type."""
    return row["name"] == CONVERSION and device.compute_capability < TENSOR_CORES_SINCE[row["dtype"]]


def _seconds(row: Mapping[str, Any], compute: ComputeModel, sharing: int) -> float:
    size = float(row["bytes_moved"])
    if _is_needless(row, compute.device):
        return 0.0
    if row["kind"] == ON_HOST:
        # The processors of a node work for all its ranks at once.
        return size * sharing / HOST_BYTES_PER_S
    if row["kind"] in HOST_KINDS:
        return link_s(size, compute.device)
    return compute.op_s(op_of(row, compute.device))


def precision_of(works: Sequence[pa.Table], device: Device) -> str:
    """Return the type in which most floating-point operations of *works* are done.

    Raises JobError if some are in a type of which the device has no peak.
    """
    flops: dict[str, int] = {}
    for table in works:
        for row in table.select(["kind", "dtype", "flops", "is_known"]).to_pylist():
            is_counted = row["kind"] != "memory" and row["is_known"]
            if is_counted and row["dtype"] in DTYPE_BYTES:
                dtype = _type_on(device, row["dtype"])
                flops[dtype] = flops.get(dtype, 0) + row["flops"]
    if missing := [dtype for dtype in flops if dtype not in device.peak_flops_per_s]:
        instead = ", as it runs on a processor: --without-gpu" if device.kind == "cpu" else ""
        raise JobError(
            f"the script computes in {missing[0]}, for which {device.name} has no peak, only for "
            f"{', '.join(device.peak_flops_per_s)}: rehearse it in another type{instead}"
        )
    return max(flops, key=lambda dtype: flops[dtype], default="bf16")


def counts_of(events: pa.Table, n_works: int, what: int) -> Int64Array:
    """Return how often each operation is done; shape ``(n_works,)``."""
    rows = events["what"].to_numpy() == what
    return np.bincount(events["item"].to_numpy()[rows], minlength=n_works).astype(np.int64)
