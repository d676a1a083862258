"""Tables of published memory, and of runs that failed, in the columns of ``foretrace validate``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from foretrace.simulator import table as product_table
from foretrace.simulator.errors import TableError
from foretrace.simulator.job import Job
from foretrace.simulator.memory.remedies import NOT_POSSIBLE
from foretrace.simulator.validate.runs import (
    FIGURES,
    FitValidation,
    Verdict,
    scored_memory,
    verdict,
)
from foretrace.simulator.validate.scores import Failed, Scored, Validation
from measured.jobs import columns_of, job_of, with_shapes
from measured.judge import errors
from measured.machines import Machines
from measured.table import Row, read_table

LAYOUT: Final = ("world_size", "tp", "pp", "dp", "micro_batch", "seq_len", "hardware", "model")

SHAPE: Final = ("layers", "hidden", "ffn_hidden", "vocab")
LIKE: Final = (
    *("arch", "heads", "kv_heads", "head_dim", "gated", "tied_emb", "flash_attention", "framework"),
    *("hardware", "model", "precision", "sp", "recompute"),
)
"""Columns that a failed run takes from a completed run of the same shape where its own table lacks them."""

UNSURE: Final = "not verified"
"""In notes: it is not known what ran, so that the row is scored, but says nothing of how far off we are."""


def validate_memory(table: Path, steps: Path | None, folder: Path) -> tuple[Validation, list[dict[str, Any]]]:
    """Return the peak memory of every figure in *table*, in GB, and the rows as ``foretrace validate`` reads.

    Args:
        table: CSV or Parquet, with ``peak_<kind>_gb``.
        steps: the table of steps that ``step_id`` refers to and that shapes of models come from; by default
            ``steps.csv`` beside *table*.
        folder: where files of machines are written.

    Raises:
        TableError: a table cannot be read.
    """
    machines = Machines(folder)
    rows = completed(read_table(table, ("model", "tp", "pp", "dp", "kind")), table, steps)
    scored: list[tuple[Scored, str, str, Sequence[float]]] = []
    failed: list[Failed] = []
    unsure: set[str] = set()
    written: list[dict[str, Any]] = []
    for row in rows:
        family = " ".join(row.text(name) for name in ("source_group", "model", "hardware", "precision"))
        try:
            cells = {**memory_columns(row, machines), "family": family}
            found = scored_memory(product_table.Row(cells, row.number))
        except NOT_POSSIBLE as error:
            failed.append(Failed(id=row.id, family=family, reason=str(error)))
            continue
        written.append(cells)
        where = row.text("source_group"), found[0][1].cluster.device.name, ()
        scored += [(one, *where) for one, _ in found]
        unsure |= {one.id for one, _ in found if UNSURE in row.text("notes")}
    validation = Validation(
        kind="memory",
        table=str(table),
        unit="GB",
        rows=[one for one, *_ in scored],
        failures=failed,
        extra={"errors": errors(one for one in scored if one[0].id not in unsure)},
    )
    return validation, written


def completed(rows: Sequence[Row], table: Path, steps: Path | None) -> list[Row]:
    """Return *rows* with the shapes of their models, from *steps* or ``steps.csv`` beside *table*."""
    path = steps or table.parent / "steps.csv"
    if steps is None and not path.is_file():
        return list(rows)
    return with_shapes(rows, read_table(path, ("id", "model")))


def memory_columns(row: Row, machines: Machines) -> dict[str, Any]:
    """Return *row* in the columns of ``foretrace validate memory``.

    Raises:
        TableError: the row does not say enough, or something the simulator does not have.
        SimulationError, TopologyError, TraceError: its layout, batch or model is not possible.
    """
    figures = {name: row.text(name) for kind in FIGURES if row.text(name := f"peak_{kind}_gb")}
    if not figures:
        raise TableError("no figure")
    for name in LAYOUT:
        if not row.text(name):
            raise TableError(f"{name} is not given")
    rank = row.text("rank")
    return {
        **_columns(row, machines),
        "id": row.id,
        "rank": rank if rank.isdecimal() else "",
        **figures,
    }


def _columns(row: Row, machines: Machines) -> dict[str, Any]:
    return {name: str(cell) for name, cell in columns_of(job_with_stages(row), machines).items()}


def job_with_stages(row: Row) -> Job:
    """Return the job of *row*, with the virtual stages that it has. Raises as ``job_of``."""
    job, virtual_stages = job_of(row), row.integer("virtual_pp", 1)
    if job.layout.pp == 1 or virtual_stages < 2:
        return job
    return replace(job, schedule="interleaved-1f1b", virtual_stages=virtual_stages)


def validate_fit(
    table: Path, ran: Path | None, steps: Path | None, folder: Path
) -> tuple[FitValidation, list[dict[str, Any]]]:
    """Return verdicts on the failed runs in *table* and on the completed runs in *ran*, and the rows.

    Args:
        table: failed runs: ``layers, hidden, ffn_hidden, vocab, seq_len, gpus, tp, pp, dp, zero, micro_batch,
            grad_acc``; what it does not say comes from a completed run of the same shape. Rows with a
            throughput ran, whatever the table calls them.
        ran: completed runs, with the columns of a table of memory; by default ``memory.csv`` beside *table*.
        steps: the table of steps; by default ``steps.csv`` beside *table*.
        folder: where files of machines are written.

    Raises:
        TableError: a table cannot be read.
    """
    machines = Machines(folder)
    failed_rows = read_table(table, ("layers", "hidden", "tp", "pp", "dp", "micro_batch"))
    beside = ran or table.parent / "memory.csv"
    ran_rows = completed(read_table(beside, ("tp", "pp", "dp")), beside, steps) if beside.is_file() else []
    like = _by_shape(ran_rows)
    verdicts: list[Verdict] = []
    failures: list[Failed] = []
    written: list[dict[str, Any]] = []
    for row, did_run in [*_failed(failed_rows, like), *((row, True) for row in ran_rows)]:
        try:
            if not row.text("tp") or not row.text("hardware"):
                raise TableError("layout or hardware is not given")
            cells = {**_columns(row, machines), "id": row.id, "completed": str(did_run)}
            verdicts.append(verdict(product_table.Row(cells, row.number), ran=did_run))
            written.append(cells)
        except NOT_POSSIBLE as error:
            family = "completed" if did_run else "failed"
            failures.append(Failed(id=row.id, family=family, reason=str(error)))
    return FitValidation(table=str(table), verdicts=verdicts, failures=failures), written


def _by_shape(rows: Iterable[Row]) -> Mapping[tuple[str, ...], Row]:
    found: dict[tuple[str, ...], Row] = {}
    for row in rows:
        found.setdefault(_shape(row), row)
    return found


def _shape(row: Row) -> tuple[str, ...]:
    """Return the shape of the model of *row*, and whether it has tensor parallelism: ``sp`` needs it."""
    return *(row.text(name) for name in SHAPE), str(row.integer("tp", 1) > 1)


def _failed(rows: Iterable[Row], like: Mapping[tuple[str, ...], Row]) -> Iterator[tuple[Row, bool]]:
    """Yield each row of failed runs as the row of a job, and whether it ran after all."""
    for row in rows:
        batch = row.integer("grad_acc", 1) * row.integer("micro_batch", 1) * row.integer("dp", 1)
        sharding = {"0": "none", "1": "zero1", "2": "zero2", "3": "zero3"}.get(row.text("zero"), "none")
        full = row.over(Row({"global_batch": batch, "sharding": sharding}, row.number))
        twin = like.get(_shape(row))
        yield full.over(twin.only(LIKE)) if twin else full, bool(row.text("tokens_per_s_per_gpu"))
