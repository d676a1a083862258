"""``foretrace validate memory`` and ``validate fit``: what a rank needs, and whether it fits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from foretrace.simulator.builder.stages import stage_layers
from foretrace.simulator.errors import SimulationError, TableError
from foretrace.simulator.intervals import layout_class
from foretrace.simulator.job import Job
from foretrace.simulator.memory.stage import StageMemory, stage_memory
from foretrace.simulator.validate.errors import errors
from foretrace.simulator.validate.job import job_of, with_shapes
from foretrace.simulator.validate.scores import Failed, Scored, Validation
from foretrace.simulator.validate.table import Row, read_table
from foretrace.topologies.errors import TopologyError
from foretrace.traces.errors import TraceError

KINDS: Final = ("allocated", "reserved", "nvidia_smi", "unspecified")
"""What a figure counts: tensors; and the allocator's slack; and context and libraries; or not said."""

STATED: Final = ("allocated", "reserved")
LAYOUT: Final = ("world_size", "tp", "pp", "dp", "micro_batch", "seq_len", "hardware", "model")


def validate_memory(table: str | Path, *, steps: str | Path | None = None) -> Validation:
    """Return the peak memory of every figure in *table*, predicted and measured, in GB.

    A row with two figures (allocated and reserved) counts as two. Columns are those of the rows' own layout
    and ``peak_<kind>_gb``; shapes of models come from the table of steps.

    Args:
        table: CSV or Parquet.
        steps: the table of steps that ``step_id`` refers to; by default ``steps.csv`` beside *table*.

    Raises:
        TableError: a table cannot be read.
    """
    rows = completed(read_table(table, ("model", "tp", "pp", "dp", "kind")), table, steps)
    scored: list[tuple[Scored, tuple[str, str]]] = []
    failed: list[Failed] = []
    for row in rows:
        kinds = [kind for kind in KINDS if row.text(f"peak_{kind}_gb")]
        family = " ".join(row.text(name) for name in ("source_group", "model", "hardware", "precision"))
        try:
            if not kinds:
                raise TableError("no figure")
            for name in LAYOUT:
                if not row.text(name):
                    raise TableError(f"{name} is not given")
            stages = stage_memories(job_of(row), row.integer("virtual_pp", 1))
            memory = _of_rank(stages, row)
        except (SimulationError, TopologyError, TraceError) as error:
            failed.append(Failed(id=row.id, family=family, reason=str(error)))
            continue
        job = memory[0]
        of = (layout_class(job), job.cluster.device.name)
        scored += [(_scored(row, family, kind, memory), of) for kind in kinds]
    return Validation(
        kind="memory",
        table=str(table),
        unit="GB",
        rows=[one for one, _ in scored],
        failures=failed,
        extra={"errors": errors(scored)},
    )


def completed(rows: Sequence[Row], table: str | Path, steps: str | Path | None) -> list[Row]:
    """Return *rows* with the shapes of their models, from *steps* or ``steps.csv`` beside *table*."""
    path = Path(steps) if steps is not None else Path(table).parent / "steps.csv"
    if steps is None and not path.is_file():
        return list(rows)
    return with_shapes(rows, read_table(path, ("id", "model")))


def figure_bytes(job: Job, memory: StageMemory, kind: str) -> int:
    """Return the peak as *kind* counts it.

    ``allocated`` is what tensors take; ``reserved`` adds the slack of the caching allocator; ``nvidia_smi``
    adds context and libraries to that. A figure that is not stated is taken as reserved, the middle one.
    """
    allocated = memory.peak_bytes - memory.items["reserved"]
    if kind == "allocated":
        return allocated
    reserved = allocated * (1 + job.profile.allocator_slack)
    limit = job.cluster.device.memory_bytes - memory.items["reserved"]
    reserved = max(allocated, min(reserved, limit))  # the allocator frees its slack before it fails
    return round(reserved) + (memory.items["reserved"] if kind == "nvidia_smi" else 0)


def stage_memories(job: Job, virtual_stages: int = 1) -> list[tuple[Job, StageMemory]]:
    """Return the memory of each pipeline rank of *job* under 1F1B, interleaved if there are virtual stages.

    Interleaved, rank *r* of *p* has ``2 (p - r - 1) + (v - 1) p + 1`` of its *v* stages' micro-batches in
    flight (Megatron-LM, ``forward_backward_pipelining_with_interleaving``), each 1/v of its layers.
    """
    pp, n_microbatches = job.layout.pp, job.n_microbatches
    layers = stage_layers(job, job.layout.pp)
    found = []
    for rank in range(pp):
        held = min(pp - rank, n_microbatches)
        if virtual_stages > 1 and pp > 1:
            chunks = min(2 * (pp - rank - 1) + (virtual_stages - 1) * pp + 1, n_microbatches * virtual_stages)
            held = -(-chunks // virtual_stages)
        memory = stage_memory(job, layers[rank], rank, held, first=rank == 0, last=rank == pp - 1)
        found.append((job, memory))
    return found


def _of_rank(stages: Sequence[tuple[Job, StageMemory]], row: Row) -> tuple[Job, StageMemory]:
    """The memory of the rank that the row speaks of, or of the fullest."""
    rank = row.text("rank", "max")
    if not rank.isdecimal():
        return max(stages, key=lambda stage: stage[1].peak_bytes)
    job = stages[0][0]
    return stages[job.layout.coord(int(rank)).pp]


def _scored(row: Row, family: str, kind: str, found: tuple[Job, StageMemory]) -> Scored:
    job, memory = found
    layout = " ".join(f"{axis}{degree}" for axis, degree in job.layout.degrees.items() if degree > 1)
    rank = row.text("rank", "max")
    return Scored(
        id=f"{row.id}" + (f" rank {rank}" if rank.isdecimal() else ""),
        family=f"{family} {kind}",
        group="stated" if kind in STATED else kind,
        what=f"{job.model.name} {layout} {job.sharding} mbs {job.micro_batch} x {job.seq_len}, {kind}",
        predicted=figure_bytes(job, memory, kind) / 1e9,
        measured=row.above_zero(f"peak_{kind}_gb"),
    )
