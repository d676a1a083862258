"""Tables of published kernels in the columns of ``foretrace validate kernels``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from foretrace.simulator import table as product_table
from foretrace.simulator.compute.benched import BURST, LASTING, PASSES, REPEATED, UNFUSED, kernel_ops
from foretrace.simulator.errors import SimulationError, TableError
from foretrace.simulator.validate.kernels import scored_kernels
from foretrace.simulator.validate.scores import Failed, Validation
from foretrace.simulator.workload.ops import Op
from foretrace.topologies.device import Device
from foretrace.topologies.errors import TopologyError
from measured.machines import device_of
from measured.table import Row, read_table

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


def validate_kernels(table: Path, device: str = "") -> tuple[Validation, list[dict[str, Any]]]:
    """Return what every row of *table* takes, predicted and measured, in microseconds, and the rows.

    Two forms are read: columns ``hardware, kernel, dtype, direction, m, n, k, batch, seq, heads, kv_heads,
    head_dim, causal, impl, time_us, tflops, notes``; or ``m, n, k, us``, bf16 products in short bursts on the
    device that the file is named after.

    Args:
        table: CSV or Parquet.
        device: the device, where the table does not say.

    Raises:
        TableError: the table cannot be read, or has neither form.
    """
    written, failed = translate(read_table(table, ("m", "n", "k")), device, table)
    rows = [product_table.Row(cells, at) for at, cells in enumerate(written, start=1)]
    found = scored_kernels(rows, str(table))
    validation = Validation(
        kind="kernels",
        table=str(table),
        unit="us",
        rows=found.rows,
        failures=[*failed, *found.failures],
        notes=found.notes,
    )
    return validation, written


def translate(rows: Sequence[Row], device: str, table: Path) -> tuple[list[dict[str, Any]], list[Failed]]:
    """Return *rows* of *table* in the columns of ``foretrace validate kernels``, and those that cannot be."""
    plain = not rows[0].text("time_us") and bool(rows[0].text("us"))
    found: list[dict[str, Any]] = []
    failed: list[Failed] = []
    for row in rows:
        hardware = device or row.text("hardware", table.stem)
        try:
            cells = plain_columns(row) if plain else columns(row, device_of(hardware))
            known = {"id": row.id, "family": _family(row, hardware), "hardware": device_of(hardware).name}
            found.append({name: str(cell) for name, cell in {**known, **cells}.items()})
        except (SimulationError, TopologyError) as error:
            failed.append(Failed(id=row.id, family=_family(row, hardware), reason=str(error)))
    return found, failed


def plain_columns(row: Row) -> dict[str, Any]:
    """Return a product in bf16 that was timed in short bursts."""
    sizes = {name: row.integer(name) for name in ("m", "n", "k")}
    return {"kernel": "gemm", "dtype": "bf16", **sizes, "load": BURST, "time_us": row.above_zero("us")}


def columns(row: Row, device: Device) -> dict[str, Any]:
    """Return *row*, measured on *device*, in the columns of ``foretrace validate kernels``.

    Raises:
        TableError: the row does not say enough, or something the simulator does not have.
        TopologyError: the device has no figure for its dtype.
    """
    kind, notes = row.text("kernel"), row.text("notes")
    name = next((name for name in ("attention", "grouped_gemm", "gemm") if name.split("_")[0] in kind), kind)
    sizes = ("m", "n", "k", "batch", "seq", "heads", "kv_heads", "head_dim")
    cells: dict[str, Any] = {
        "kernel": name,
        "dtype": DTYPES.get(row.text("dtype"), row.text("dtype")),
        "direction": row.text("direction"),
        **{name: row.integer(name) for name in sizes if row.text(name)},
        "causal": row.flag("causal", default=False),
        "impl": _impl(row, name, device),
        "load": load_of(notes),
    }
    if name == "gemm" and "accumulate=True" in notes:
        cells["sum_dtype"] = "fp32" if "out=fp32" in notes else cells["dtype"]
    for column, form in (("window", r"window (\d+)"), ("v_head_dim", r"v_head_dim (\d+)")):
        if name == "attention" and (found := re.search(form, notes)):
            cells[column] = int(found[1])
    return {**cells, "time_us": _time_us(row, cells, device)}


def measured_ops(row: Row, device: Device) -> tuple[list[Op], float]:
    """Return the operations of a row, and the microseconds they took. Raises as ``columns``."""
    cells = columns(row, device)
    return kernel_ops(product_table.Row(cells, row.number), device), cells["time_us"]


def load_of(notes: str) -> str:
    """Return which load the *notes* of a row begin with; a row that says nothing means repeated kernels."""
    return next((load for load in (BURST, LASTING) if notes.startswith(load)), REPEATED)


def _impl(row: Row, kernel: str, device: Device) -> str:
    """Return how the kernel is implemented, in our names; empty for the choice of the library."""
    name = row.text("impl")
    if kernel == "grouped_gemm":
        return "torch" if "_grouped_mm" in name else ""
    if kernel != "attention":
        return ""
    if name == "PyTorch":
        return UNFUSED
    return KERNELS.get(name, name.lower() if name.lower() in device.attention_kernels else "")


def _time_us(row: Row, cells: dict[str, Any], device: Device) -> float:
    """Return the time of *row*, or that of the FLOPs that its TFLOP/s count."""
    if row.text("time_us"):
        return row.above_zero("time_us")
    if cells["kernel"] == "attention":
        flops = attention_flops(row)
    else:
        flops = sum(op.flops for op in kernel_ops(product_table.Row(cells, row.number), device))
    return flops / row.above_zero("tflops") / 1e6


def attention_flops(row: Row) -> float:
    """Return the FLOPs that the TFLOP/s of an attention row count.

    Figures of FlashAttention count what a causal mask keeps; a row that states an efficiency against the
    peak counts the whole matrix.

    Raises:
        TableError: a size is missing, or the direction is none.
    """
    batch, seq, heads, width = (row.integer(name) for name in ("batch", "seq", "heads", "head_dim"))
    notes, passes = row.text("notes"), PASSES.get(row.text("direction"))
    if passes is None:
        raise TableError(f"direction {row.text('direction')!r}: one of {', '.join(PASSES)}")
    found = re.search(r"v_head_dim (\d+)", notes)
    matrix = 2 * batch * heads * seq * seq * (width + (int(found[1]) if found else width))
    halved = "halved" in notes or "efficiency" not in notes
    counted = matrix // 2 if row.flag("causal", default=False) and halved else matrix
    return counted * sum({"forward": 1.0, "backward": 2.5}[one] for one in passes)


def _family(row: Row, hardware: str) -> str:
    """Return source group, device, kernel, dtype, direction class, and for attention the implementation."""
    parts = [row.text("source_group"), hardware, row.text("kernel", "gemm"), row.text("dtype")]
    if row.text("kernel") == "attention":
        parts += [row.text("impl"), row.text("direction")]
    return " ".join(part for part in parts if part)
