"""``foretrace validate kernels``: predicted against measured times of single kernels."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from foretrace.simulator.compute.attention import PRODUCTS
from foretrace.simulator.errors import SimulationError, TableError
from foretrace.simulator.models.model import Linear
from foretrace.simulator.validate.hardware import device_of
from foretrace.simulator.validate.loops import BURST, LASTING, Bench, load_of
from foretrace.simulator.validate.scores import Failed, Scored, Validation
from foretrace.simulator.validate.table import Row, read_table
from foretrace.simulator.workload.ops import DTYPE_BYTES, Op, gemm, memory, weight_gradient
from foretrace.topologies.device import Device
from foretrace.topologies.errors import TopologyError

DTYPES: Final = {
    "fp16/bf16": "bf16",
    "bf16/fp16": "bf16",
    "float16": "fp16",
    "bfloat16": "bf16",
    "": "bf16",
    **dict.fromkeys(("mxfp8", "fp8_e4m3", "e4m3", "float8"), "fp8"),
}
"""What tables call a dtype, where it is not our name."""

KERNELS: Final = {"FlashAttention": "flash1", "FlashAttention-2": "flash2", "FlashAttention-3": "flash3"}
"""Attention kernels by what tables call them; others are the device's own choice, or have their own name."""

PASSES: Final = {"fwd": ("forward",), "bwd": ("backward",), "fwd+bwd": ("forward", "backward")}


PASSES_OVER: Final[Mapping[str, tuple[int, int]]] = MappingProxyType(
    {"norm": (2, 3), "activation": (5, 5), "stream": (2, 2), "optimizer": (7, 7), "launch": (2, 2)}
)
"""Kernels bound by memory, and how often they go over ``m x n`` elements forward and backward.

A norm; ``silu(gate) * up`` in two kernels; ``x + 1`` in place; fused AdamW in fp32; a tiny operation.
"""


def validate_kernels(
    table: str | Path, *, device: str | None = None, burst: bool | None = None
) -> Validation:
    """Return what every row of *table* takes, predicted and measured, in microseconds.

    Two forms are read: columns ``hardware, kernel, dtype, direction, m, n, k, batch, seq, heads, kv_heads,
    head_dim, causal, impl, time_us, tflops``; or ``m, n, k, us``, bf16 products on one device.

    Args:
        table: a CSV or Parquet file.
        device: the device, where the table does not say; else the name of the file is asked.
        burst: whether the kernels were measured in short bursts, at a clock that lasting load does not allow,
            or else when that load had settled. By default as their notes begin (``burst``, ``sustained``, or
            neither: repeated from full clock on), and all in bursts if the table is of the second form.

    Raises:
        TableError: the table cannot be read, or has neither form.
    """
    path = Path(table)
    rows = read_table(path, ("m", "n", "k"))
    plain = not rows[0].text("time_us") and bool(rows[0].text("us"))
    scored, failed, benches = [], [], dict[str, Bench]()
    for row in rows:
        hardware = device or row.text("hardware", path.stem)
        family = _family(row, hardware)
        load = BURST if plain else load_of(row.text("notes"))
        if burst is not None:
            load = BURST if burst else LASTING
        try:
            bench = benches.get(hardware) or Bench(device_of(hardware))
            benches[hardware] = bench
            ops, measured_us = (
                (product_ops(row, "bf16"), row.above_zero("us")) if plain else measured_ops(row, bench.device)
            )
            scored.append(
                Scored(
                    id=row.id,
                    family=family,
                    group=row.text("kernel", "gemm"),
                    what=_what(row, hardware),
                    predicted=bench.seen_s(ops, load) * 1e6,
                    measured=measured_us,
                )
            )
        except (SimulationError, TopologyError) as error:
            failed.append(Failed(id=row.id, family=family, reason=str(error)))
    notes = [warning for bench in benches.values() for warning in bench.warnings]
    return Validation(kind="kernels", table=str(table), unit="us", rows=scored, failures=failed, notes=notes)


def _family(row: Row, hardware: str) -> str:
    """Return source group, device, kernel, dtype, direction class, and for attention the implementation."""
    parts = [row.text("source_group"), hardware, row.text("kernel", "gemm"), row.text("dtype")]
    if row.text("kernel") == "attention":
        parts += [row.text("impl"), row.text("direction")]
    return " ".join(part for part in parts if part)


def _what(row: Row, hardware: str) -> str:
    if row.text("kernel") == "attention":
        mask = "causal" if row.flag("causal", default=False) else "full"
        names = ("batch", "seq", "heads", "kv_heads", "head_dim")
        shape = ", ".join(f"{name} {row.text(name)}" for name in names)
        return f"{hardware} {row.text('impl')} {row.text('direction')}: {shape}, {mask}"
    shape = "x".join(row.text(name) for name in ("m", "n", "k"))
    batch = row.text("batch", "1")
    of = f"{batch} of " if batch != "1" else ""
    return f"{hardware} {row.text('dtype')} {row.text('direction')}: {of}{shape}"


def measured_ops(row: Row, device: Device) -> tuple[list[Op], float]:
    """Return the operations of a row, and the microseconds they took, from its time or its TFLOP/s."""
    kind, dtype = row.text("kernel"), DTYPES.get(row.text("dtype"), row.text("dtype"))
    device.peak(dtype)
    counted: float | None = None
    if "attention" in kind:
        ops, counted = attention_ops(row, dtype)
        ops = [replace(op, kernel=_kernel(row, device)) if op.kind in PRODUCTS else op for op in ops]
    elif "grouped" in kind:
        kernel = "torch" if "_grouped_mm" in row.text("impl") else "streams"
        ops = [replace(op, kernel=kernel) if op.grouped else op for op in _grouped(row, dtype)]
    elif "gemm" in kind:
        ops = product_ops(row, dtype)
    elif kind in PASSES_OVER:
        ops = [memory_op(row, dtype)]
    else:
        known = ", ".join(("gemm", "grouped_gemm", "attention", *PASSES_OVER))
        raise TableError(f"kernel {kind!r}: one of {known}")
    if row.text("time_us"):
        return ops, row.above_zero("time_us")
    flops = sum(op.flops for op in ops) if counted is None else counted
    return ops, flops / row.above_zero("tflops") / 1e6


def product_ops(row: Row, dtype: str) -> list[Op]:
    """Return the matrix product of *row*, which adds to sums if its notes say so."""
    m, n, k = (row.integer(name) for name in ("m", "n", "k"))
    batch, notes = row.integer("batch", 1), row.text("notes")
    if "accumulate=True" not in notes:
        return [gemm("product", m, n, k, dtype, batch=batch)]
    sum_dtype = "fp32" if "out=fp32" in notes else dtype
    return [weight_gradient("product", k, Linear("", n, m), dtype, sum_dtype=sum_dtype, batch=batch)]


def memory_op(row: Row, dtype: str) -> Op:
    """Return the operation of a *row* whose kernel is one of ``PASSES_OVER``."""
    kind, backward = row.text("kernel"), row.text("direction") == "bwd"
    n_elements = row.integer("m") * row.integer("n", 1)
    moved = PASSES_OVER[kind][backward] * n_elements * DTYPE_BYTES[dtype]
    return memory(kind, moved, dtype, count=2 if kind == "activation" or backward else 1)


def _grouped(row: Row, dtype: str) -> list[Op]:
    """The products of a grouped kernel with m rows per group; or, forward and backward together, m in all."""
    m, n, k = (row.integer(name) for name in ("m", "n", "k"))
    groups, direction = row.integer("batch", 1), row.text("direction")
    if direction == "fwd+bwd":
        m //= groups
    forward = gemm("grouped", m, n, k, dtype, batch=groups, grouped=True)
    dgrad = gemm("grouped.dgrad", m, k, n, dtype, batch=groups, grouped=True)
    wgrad = weight_gradient(
        "grouped.wgrad", m, Linear("", n, k), dtype, sum_dtype=dtype, batch=groups, grouped=True
    )
    if direction == "fwd+bwd":
        plain = gemm("grouped.wgrad", k, n, m, dtype, batch=groups, grouped=True)
        quantised = [_quantise(op, groups) for op in (forward, dgrad, plain)] if dtype == "fp8" else []
        return [forward, dgrad, plain, *quantised]
    if direction not in ("", "fwd", "bwd_grad_act", "bwd_grad_w"):
        raise TableError(f"direction {direction!r} of a grouped product")
    return [{"bwd_grad_w": wgrad, "bwd_grad_act": dgrad}.get(direction, forward)]


def _quantise(op: Op, groups: int) -> Op:
    """Both operands of a product, read in 16 bit and written in 8, as the row's time includes."""
    elements = (op.m * op.k + op.k * op.n) * groups
    return memory(f"{op.name}.quantise", 3 * elements, "fp8", count=2)


def attention_ops(row: Row, dtype: str) -> tuple[list[Op], float]:
    """Return the operations of an attention row, and the FLOPs that its TFLOP/s count.

    Figures of FlashAttention count what a causal mask keeps; a row that states an efficiency against the
    peak counts the whole matrix.
    """
    batch, seq, heads = (row.integer(name) for name in ("batch", "seq", "heads"))
    width, kv_heads = row.integer("head_dim"), row.integer("kv_heads", heads)
    notes, causal = row.text("notes"), row.flag("causal", default=False)
    cut = re.search(r"window (\d+)", notes)
    window = int(cut.group(1)) if cut else 0
    found = re.search(r"v_head_dim (\d+)", notes)
    v_width = int(found.group(1)) if found else width
    passes = PASSES.get(row.text("direction"))
    if passes is None:
        raise TableError(f"direction {row.text('direction')!r}: one of {', '.join(PASSES)}")
    matrix = 2 * batch * heads * seq * seq * (width + v_width)
    halved = "halved" in notes or "efficiency" not in notes
    counted = (matrix // 2 if causal and halved else matrix) * sum(
        {"forward": 1.0, "backward": 2.5}[one] for one in passes
    )
    if row.text("impl") == "PyTorch":
        shape = (batch * heads, seq, width)
        return list(_unfused(*shape, dtype, passes, causal=causal)), counted
    moved = batch * seq * (heads + kv_heads) * (width + v_width) * 2
    forward = Op(
        *("core", "attention", matrix // 2 if causal else matrix, moved, seq, seq, width, dtype),
        batch=batch * heads,
        v_dim=v_width,
        causal=causal,
        window=window if window < seq else 0,
    )
    backward = replace(
        forward, kind="attention_backward", flops=forward.flops * 5 // 2, bytes_moved=2 * moved
    )
    return [{"forward": forward, "backward": backward}[one] for one in passes], counted


def _kernel(row: Row, device: Device) -> str:
    """The kernel of the device that a row speaks of. Raises TableError if it was not measured there."""
    name = row.text("impl")
    kernel = KERNELS.get(name, name.lower() if name.lower() in device.attention_kernels else "")
    if name in KERNELS and kernel not in device.attention_kernels:
        raise TableError(f"{name} was not measured on {device.name}")
    return kernel


def _unfused(
    heads: int, seq: int, width: int, dtype: str, passes: tuple[str, ...], *, causal: bool
) -> Iterator[Op]:
    """Attention as PyTorch writes it without a fused kernel: products, and passes over every score.

    Softmax reads and writes the scores, in backward it reads its result and the gradient; dropout of nothing
    makes a copy and a byte of mask; a causal mask is read and written over, both ways. Reference:
    ``attention_pytorch`` in benchmarks/benchmark_flash_attention.py of Dao-AILab/flash-attention.
    """
    scores = heads * seq * seq * 2
    one = gemm("scores", seq, seq, width, dtype, batch=heads)
    for direction in passes:
        forward = direction == "forward"
        yield from [one] * (2 if forward else 4)
        yield memory("softmax", int(((3.5 if forward else 4.5) + 2 * causal) * scores), dtype, count=2)
