"""``foretrace validate kernels``: predicted against measured times of single kernels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from foretrace.simulator.compute.benched import Bench, kernel_ops, load_of
from foretrace.simulator.errors import SimulationError
from foretrace.simulator.table import Row, read_table
from foretrace.simulator.validate.scores import Failed, Scored, Validation
from foretrace.topologies.catalog import device_named
from foretrace.topologies.errors import TopologyError


def validate_kernels(table: str | Path, *, device: str = "") -> Validation:
    """Return what every row of *table* takes, predicted and measured, in microseconds.

    *table*: a CSV or Parquet file with the columns that ``foretrace bench kernels`` writes. *device*: the
    device, in place of the ``hardware`` of the rows. Raises TableError if the table cannot be read, or a
    column is missing.
    """
    needed = ("kernel", "dtype", "load", "time_us", *(() if device else ("hardware",)))
    return scored_kernels(read_table(table, needed), str(table), device=device)


def scored_kernels(rows: Sequence[Row], table: str, *, device: str = "") -> Validation:
    """Return what ``validate_kernels`` does, of *rows* that were read from *table*."""
    scored: list[Scored] = []
    failed: list[Failed] = []
    benches: dict[str, Bench] = {}
    for row in rows:
        hardware = device or row.text("hardware")
        try:
            bench = benches.get(hardware) or benches.setdefault(hardware, Bench(device_named(hardware)))
            scored.append(
                Scored(
                    id=row.id,
                    family=_family(row, hardware),
                    group=row.text("kernel"),
                    what=_what(row, hardware),
                    predicted=bench.seen_s(kernel_ops(row, bench.device), load_of(row)) * 1e6,
                    measured=row.above_zero("time_us"),
                )
            )
        except (SimulationError, TopologyError) as error:
            failed.append(Failed(id=row.id, family=_family(row, hardware), reason=str(error)))
    notes = [warning for bench in benches.values() for warning in bench.warnings]
    return Validation(kind="kernels", table=table, unit="us", rows=scored, failures=failed, notes=notes)


def _family(row: Row, hardware: str) -> str:
    """Return the ``family`` of *row*, or device, kernel, dtype, and for attention how it runs."""
    if family := row.text("family"):
        return family
    parts = [hardware, row.text("kernel"), row.text("dtype")]
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
