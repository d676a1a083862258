"""Runs every row of a table of steps, on several processes; rows of one machine stay together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, fields
from multiprocessing import get_context
from typing import Final

from foretrace.simulator.compute.timing import ComputeModel
from foretrace.simulator.errors import SimulationError
from foretrace.simulator.job import Job
from foretrace.simulator.validate.curve import Curve, curve_of
from foretrace.simulator.validate.scores import Failed, Scored
from foretrace.simulator.validate.steps_job import StepJob, parallel_class, size_class, step_job
from foretrace.simulator.validate.table import Row
from foretrace.topologies.errors import TopologyError
from foretrace.traces.errors import TraceError

ALONE: Final = 100
"""Rows up to which starting other processes takes longer than they save."""

AT_ONCE: Final = 40
"""Most rows that a process is given at once."""

OF_LAYOUT: Final = (
    *("virtual_pp", "sp", "sharding", "shard_group", "micro_batch", "recompute", "framework"),
    *("flash_attention",),
)
"""Columns of a layout beside its degrees."""

_LAYOUT: Final = ("pp", "dp", "cp", "tp", "ep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A row that was simulated.

    Attributes:
        scored: predicted and measured time of the step, in s.
        level: how completely the row is described, its ``spec_level``.
        stress: flagged by its table as outside of what layouts are meant for.
        slow: flagged by its table as measured while something unknown held it up.
        device: the GPU, in the words of the catalogue.
        size: class of the number of GPUs.
        machine: hardware and interconnect, as the table has them.
        cluster: that, whose it is, and the software and precision that ran on it.
        release: when it was measured or of which version, as the table has it.
        choice: what a person who looks for a layout cannot change: model, machine, GPUs and batch.
        layout: what they can change; runs that agree in it too are repetitions.
        assumed: settings that the row does not give, in words.
        curve: the time over how slow communication is.
    """

    scored: Scored
    level: str
    stress: bool
    slow: bool
    device: str
    size: str
    machine: str
    cluster: tuple[str, ...]
    release: str
    choice: tuple[str, ...]
    layout: tuple[str, ...]
    assumed: tuple[str, ...]
    curve: Curve


def run_rows(
    rows: Sequence[Row], workers: int, tell: Callable[[int], None] = lambda _: None
) -> list[Step | Failed]:
    """Return what became of each of *rows*, in their order.

    Args:
        rows: rows of a table of steps.
        workers: processes to use; one of them for a small table.
        tell: told how many more rows are done.
    """
    found: dict[int, Step | Failed] = {}
    parts = _parts(rows)
    for done in _alone(parts) if workers < 2 or len(rows) <= ALONE else _together(parts, workers):
        found.update(done)
        tell(len(done))
    return [found[row.number] for row in rows]


def _alone(parts: Sequence[Sequence[Row]]) -> Iterator[dict[int, Step | Failed]]:
    return (_run_part(part) for part in parts)


def _together(parts: Sequence[Sequence[Row]], workers: int) -> Iterator[dict[int, Step | Failed]]:
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(_run_part, part) for part in parts]):
            yield future.result()


def _parts(rows: Sequence[Row]) -> list[list[Row]]:
    """Return *rows* by machine, those of large machines first, in parts of at most ``AT_ONCE``."""
    found: dict[tuple[int, str], list[Row]] = defaultdict(list)
    for row in rows:
        n_gpus = row.text("world_size", "0")
        machine = f"{row.text('hardware')}; {row.text('interconnect')}"
        found[int(n_gpus) if n_gpus.isdecimal() else 0, machine].append(row)
    return [
        same[at : at + AT_ONCE]
        for _, same in sorted(found.items(), key=lambda item: item[0], reverse=True)
        for at in range(0, len(same), AT_ONCE)
    ]


def _run_part(rows: Sequence[Row]) -> dict[int, Step | Failed]:
    """Return what became of *rows* of one machine, by number; the same job is simulated once."""
    curves: dict[Hashable, Curve | str] = {}
    computes: dict[tuple[str, str], ComputeModel] = {}
    found: dict[int, Step | Failed] = {}
    for row in rows:
        try:
            found[row.number] = _run_row(row, curves, computes)
        except (SimulationError, TopologyError, TraceError) as error:
            found[row.number] = Failed(id=row.id, family=_family(row), reason=str(error))
    return found


def _run_row(
    row: Row, curves: dict[Hashable, Curve | str], computes: dict[tuple[str, str], ComputeModel]
) -> Step:
    """Return *row*, simulated. Raises SimulationError, TopologyError or TraceError if it cannot be."""
    measured_s = row.above_zero("step_time_s")
    step = step_job(row)
    device, key = step.job.cluster.device, _key(step)
    compute = computes.setdefault((device.name, step.job.precision), ComputeModel(device, step.job.precision))
    if key not in curves:
        try:
            curves[key] = curve_of(step.job, step.network, compute)
        except SimulationError as error:
            curves[key] = str(error)
    curve = curves[key]
    if isinstance(curve, str):
        raise SimulationError(curve)
    return _step(row, step, curve.scaled(step.share), measured_s)


def _key(step: StepJob) -> Hashable:
    """Return what two jobs on the same machine have in common if they are the same."""
    own = (getattr(step.job, field.name) for field in fields(Job) if field.name != "cluster")
    return (id(step.network), step.job.cluster.device.name, *own)


def _family(row: Row) -> str:
    return " · ".join(row.text(name, "?") for name in ("source_group", "model", "hardware", "precision"))


def _step(row: Row, step: StepJob, curve: Curve, measured_s: float) -> Step:
    job, flags = step.job, row.text("check_flags")
    degrees = " ".join(f"{axis}{getattr(job.layout, axis)}" for axis in _LAYOUT)
    n_gpus = job.layout.world_size
    what = f"{job.model.name} {degrees} {job.sharding} mbs {job.micro_batch} x {job.n_microbatches}"
    machine = f"{row.text('hardware')}; {row.text('interconnect', 'not stated')}"
    choice = ("source_group", "model", "layers", "hardware", "interconnect", "world_size", "global_batch")
    return Step(
        scored=Scored(
            id=row.id,
            family=_family(row),
            group=parallel_class(row),
            what=f"{what}, {n_gpus} {job.cluster.device.name}",
            predicted=curve.at(),
            measured=measured_s,
        ),
        level=row.text("spec_level", "A"),
        stress="stress" in flags,
        slow="slow mode" in flags,
        device=job.cluster.device.name,
        size=size_class(row),
        machine=machine,
        cluster=(row.text("source_group"), machine, row.text("framework"), row.text("precision")),
        release=row.text("date"),
        choice=tuple(row.text(name) for name in (*choice, "seq_len", "precision", "task")),
        layout=tuple(row.text(name) for name in (*_LAYOUT, *OF_LAYOUT)),
        assumed=step.assumed,
        curve=curve,
    )
