"""Tables of training runs: a row is the settings of a job, by their names, and what was measured of it.

Columns are the keys of a ``run.toml``: settings by name (``model``, ``cluster``, ``tp``), fields of a model
as ``model.hidden``, conventions of a framework as ``framework.host_work``. The function that makes the job of
``foretrace simulate`` makes that of a row.
"""

from __future__ import annotations

import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from foretrace.door import counted
from foretrace.simulator.compute.timing import ComputeModel
from foretrace.simulator.config import job_from
from foretrace.simulator.engine import require_numba
from foretrace.simulator.errors import SimulationError, TableError
from foretrace.simulator.framework import OVERRIDABLE, Framework
from foretrace.simulator.intervals import layout_class
from foretrace.simulator.job import Job
from foretrace.simulator.memory.ranks import RankMemory, rank_memories
from foretrace.simulator.memory.remedies import NOT_POSSIBLE
from foretrace.simulator.memory.states import reserved_bytes
from foretrace.simulator.models.model import Model
from foretrace.simulator.models.sources import SHAPE_FIELDS
from foretrace.simulator.network.advice import across
from foretrace.simulator.network.cost import Network, network_of, placed
from foretrace.simulator.recorded.calibration import LINKS, OTHERS, PARTS
from foretrace.simulator.recorded.one_time import Curve, curve_of
from foretrace.simulator.settings import CONVENTIONS, KINDS, SHAPE
from foretrace.simulator.simulate import simulate
from foretrace.simulator.table import LISTED, Row, read_table, require
from foretrace.simulator.validate.scores import Failed, Scored, Validation, reasons, spreads
from foretrace.simulator.variation import Variation
from foretrace.topologies.catalog import load_cluster
from foretrace.topologies.cluster import Cluster
from foretrace.topologies.device import Device
from foretrace.topologies.errors import TopologyError
from foretrace.topologies.units import format_time
from foretrace.traces.private import Processes
from foretrace.traces.report.format import format_share

FIGURES: Final = ("allocated", "reserved", "nvidia_smi", "unspecified")
"""What a figure counts: tensors; and the allocator's slack; and context and libraries; or not said."""

STATED: Final = ("allocated", "reserved")

MEASURED: Final[Mapping[str, str]] = {
    "id": "what the row is called",
    "family": "rows that say the same thing, and count once; by default those of one model and machine",
    "counts": "false: predicted, but not in the score",
    "assumed": "settings that were not stated, in words",
    "notes": "anything; not read",
    "step_time_s": "time of a step",
    "completed": "true: the run completed; false: it failed",
    "rank": "the rank whose memory it is; by default the fullest",
    **{f"peak_{name}_gb": f"peak memory, {name.replace('_', ' ')}, in GB" for name in FIGURES},
}
"""Columns beside settings, and what is in them."""

_KINDS: Final[Mapping[str, Mapping[str, type]]] = {
    "": {name: kind for name, kind in KINDS.items() if name not in (CONVENTIONS, SHAPE)},
    "model": {
        field.name: {"int": int, "bool": bool, "str": str}[str(field.type)]
        for field in fields(Model)
        if field.name in SHAPE_FIELDS and field.name != "tower"  # a table of its own, which no cell holds
    },
    "framework": {one.name: type(one.default) for one in fields(Framework) if one.name in OVERRIDABLE},
}
"""Columns by the table of a ``run.toml`` that they stand in, and the type of their cells."""

FAR_BELOW: Final = 0.5
"""Predicted share of a device's memory below which a run has hardly failed for lack of memory."""

ALONE: Final = 100
"""Rows up to which starting other processes takes longer than they save."""

AT_ONCE: Final = 40
"""Most rows that a process is given at once."""


def read_runs(table: str | Path, measured: Iterable[str] = ()) -> list[Row]:
    """Return the rows of a table of runs.

    *table*: CSV or Parquet. Raises TableError if it cannot be read, a column is missing, or one is no setting
    and no measurement.
    """
    path = Path(table)
    rows = read_table(path, ())
    for column in rows[0].columns:
        if column not in MEASURED and _kind(column) is None:
            known = [
                *MEASURED,
                *(f"{table}.{name}".lstrip(".") for table in _KINDS for name in _KINDS[table]),
            ]
            near = get_close_matches(column, known, n=1)
            raise TableError(
                f"{path}: column {column!r} is no setting of a job and no measurement"
                + (f"; did you mean {near[0]}?" if near else "")
                + LISTED
            )
    # After unknown columns: that one is misspelt says more than that it is missing.
    require(rows[0], ("model", "cluster", "global_batch", *measured), path)
    return [row.beside(path.parent, ("model", "cluster", "schedule", "placement")) for row in rows]


def _kind(column: str) -> type | None:
    """Return the type of the cells of *column*; None if it is no setting."""
    table, _, name = column.rpartition(".")
    return _KINDS.get(table, {}).get(name)


def settings_of(row: Row) -> dict[str, Any]:
    """Return the settings of *row*, for ``simulator.config.job_from``; those of empty cells are left out.

    Raises TableError if a cell has the wrong type.
    """
    found: dict[str, Any] = {}
    for column in row.columns:
        kind = _kind(column)
        if kind is None or not row.text(column):
            continue
        table, _, name = column.rpartition(".")
        inside = found.setdefault({"model": SHAPE, "framework": CONVENTIONS}[table], {}) if table else found
        inside[name] = _value(row, column, kind)
    return found


def _value(row: Row, column: str, kind: type) -> object:
    if kind is int:
        return row.integer(column)
    if kind is float:
        return row.number_in(column)
    if kind is bool:
        return row.flag(column, default=False)
    words = row.text(column)
    # layers_per_stage is read by job_from, which says what is wrong with it
    return tuple(words.split(",")) if kind is tuple and "." in column else words


def job_of(row: Row) -> Job:
    """Return the job of *row*.

    Raises SimulationError, TopologyError, TraceError if it is not possible, or not described by the row.
    """
    return job_from(settings_of(row))


def family_of(row: Row) -> str:
    """Return the rows with which *row* counts once."""
    return row.text("family") or " · ".join(row.text(name, "?") for name in ("model", "cluster"))


def _what(job: Job) -> str:
    degrees = " ".join(f"{axis}{degree}" for axis, degree in job.layout.degrees.items() if degree > 1)
    return f"{job.model.name} {degrees} {job.sharding} mbs {job.micro_batch}"


# Times of steps.


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A row that was simulated.

    Attributes:
        scored: predicted and measured time of the step, in s.
        assumed: settings that were not stated, in words.
        curve: the time at each of the ratios that were asked for.
    """

    scored: Scored
    counts: bool
    device: str
    assumed: tuple[str, ...]
    curve: Curve


def validate_steps(
    table: str | Path, *, workers: int | None = None, tell: Callable[[int, int], None] = lambda *_: None
) -> Validation:
    """Return the step time of every row of *table*, predicted and measured, in s.

    The rows of the validation, and so its score, are those that count. The others are scored beside it, in
    ``extra``. Rows that cannot be simulated are failures.

    *table*: CSV or Parquet, with the columns that docs/accuracy.md lists. *workers*: processes; as many as
    there are processors if left out. *tell*: told how many rows more are done, and of how many. Raises
    TableError if the table cannot be read, or a column is missing or unknown. Raises EngineError if numba is
    not installed.
    """
    require_numba("validating steps")
    rows = read_runs(table, ("step_time_s",))
    found = run_rows(rows, workers or os.cpu_count() or 1, lambda done: tell(done, len(rows)))
    steps = [one for one in found if isinstance(one, Step)]
    rest = [one.scored for one in steps if not one.counts]
    return Validation(
        kind="steps",
        table=str(table),
        unit="s",
        rows=[one.scored for one in steps if one.counts],
        failures=[one for one in found if isinstance(one, Failed)],
        extra={
            "rest_rows": len(rest),
            "rest_score": fmean(one.median_error for one in spreads(rest, "family")) if rest else None,
            "assumed": dict(Counter(words for step in steps for words in step.assumed).most_common()),
        },
    )


def run_rows(
    rows: Sequence[Row],
    workers: int,
    tell: Callable[[int], None] = lambda _: None,
    ratios: Sequence[float] = (1.0,),
) -> list[Step | Failed]:
    """Return what became of each of *rows*, in their order.

    *workers*: processes to use; one of them for a small table. *ratios*: factors on the time of every
    transfer at which a step is timed; 1 is one of them.
    """
    found: dict[int, Step | Failed] = {}
    parts = _parts(rows)
    alone = workers < 2 or len(rows) <= ALONE
    for done in _alone(parts, ratios) if alone else _together(parts, workers, ratios):
        found.update(done)
        tell(len(done))
    # In the order of the table, whoever was done first.
    return [found[row.number] for row in rows]


Done = dict[int, Step | Failed]
"""What became of rows, by number."""


def _alone(parts: Sequence[Sequence[Row]], ratios: Sequence[float]) -> Iterator[Done]:
    return (_run_part(part, ratios) for part in parts)


def _together(parts: Sequence[Sequence[Row]], workers: int, ratios: Sequence[float]) -> Iterator[Done]:
    with Processes(workers) as pool:
        for future in as_completed([pool.submit(_run_part, part, ratios) for part in parts]):
            yield future.result()


def _parts(rows: Sequence[Row]) -> list[list[Row]]:
    """Return *rows* by machine, those of large machines first, in parts of at most ``AT_ONCE``."""
    found: dict[tuple[int, str], list[Row]] = defaultdict(list)
    for row in rows:
        found[counted(row.text("gpus", "0")), row.text("cluster")].append(row)
    # Large machines first, so that the longest parts are not begun last.
    return [
        same[at : at + AT_ONCE]
        for _, same in sorted(found.items(), key=lambda item: item[0], reverse=True)
        for at in range(0, len(same), AT_ONCE)
    ]


def _run_part(rows: Sequence[Row], ratios: Sequence[float]) -> Done:
    """Return what became of *rows* of one machine; the same job is simulated once."""
    known: dict[Job, Curve | str] = {}
    computes: dict[tuple[Device, str], ComputeModel] = {}
    found: Done = {}
    for row in rows:
        try:
            found[row.number] = _run_row(row, ratios, computes, known)
        except NOT_POSSIBLE as error:
            found[row.number] = Failed(id=row.id, family=family_of(row), reason=str(error))
    return found


@cache
def _network(cluster: Cluster, n_ranks: int, settings: tuple[tuple[str, Any], ...]) -> Network:
    """Return a network, which remembers what it has answered."""
    return network_of(cluster, n_ranks, **dict(settings))


def _run_row(
    row: Row,
    ratios: Sequence[float],
    computes: dict[tuple[Device, str], ComputeModel],
    known: dict[Job, Curve | str],
) -> Step:
    """Return *row*, simulated. Raises SimulationError, TopologyError or TraceError if it cannot be."""
    measured_s = row.above_zero("step_time_s")
    job = job_of(row)
    # Tables repeat settings with other measurements: the same job is run once.
    if job not in known:
        try:
            known[job] = _curve(job, computes, ratios)
        except SimulationError as error:
            # A text says why not.
            known[job] = str(error)
    curve = known[job]
    if isinstance(curve, str):
        raise SimulationError(curve)
    return Step(
        scored=Scored(
            id=row.id,
            family=family_of(row),
            group=layout_class(job),
            what=f"{_what(job)} x {job.n_microbatches}, {job.layout.world_size} {job.cluster.device.name}"
            + _across(job),
            # 1.0 is among the ratios: the step as predicted.
            predicted=curve.step_s[list(ratios).index(1.0)],
            measured=measured_s,
        ),
        counts=row.flag("counts", default=True),
        device=job.cluster.device.name,
        assumed=tuple(filter(None, row.text("assumed").split("; "))),
        curve=curve,
    )


def _across(job: Job) -> str:
    """Return which groups that communicate in every layer lie across nodes, in words; empty if none do."""
    network = _network(job.cluster, job.layout.world_size, tuple(placed(job).items()))
    axes = across(job.layout, network)
    return f", {', '.join(axes)} across nodes" if axes else ""


def _transferring(job: Job, ratio: float) -> Job:
    """Return *job* on its machine with every transfer taking *ratio* times as long."""
    factors = {f"{link}.{OTHERS}.{part}": ratio for link in LINKS for part in PARTS}
    return replace(job, cluster=replace(job.cluster, transfer_factors=factors))


def _curve(job: Job, computes: dict[tuple[Device, str], ComputeModel], ratios: Sequence[float]) -> Curve:
    """Return the time of a step of *job*, as ``simulate`` has it, at *ratios*.

    Only ``simulate`` knows of ranks that differ and of compute that communication slows.
    """
    slowed = job.overlap_slowdown or job.profile.dispatch_processors
    if job.cluster.others or slowed or job.n_steps > 1 or job.variation != Variation():
        slower = (_transferring(job, ratio) for ratio in ratios)
        return Curve(tuple(simulate(one).summary["step_time_s"] for one in slower))
    network = _network(job.cluster, job.layout.world_size, tuple(placed(job).items()))
    key = (job.cluster.device, job.precision)
    if key not in computes:
        computes[key] = ComputeModel(*key)
    return curve_of(job, network, computes[key], ratios)


# The measured run that is nearest to a job.


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest:
    """A measured run like a job.

    Attributes:
        table: where it is from.
        id, what: its name there, and what it is in a few words.
        measured_s, predicted_s: time of its step, and what is predicted of it.
        differs: in what it is another run than the job, in words, most of it first.
    """

    table: str
    id: str
    what: str
    measured_s: float
    predicted_s: float
    differs: tuple[str, ...]

    @property
    def words(self) -> str:
        """One sentence for people."""
        off = format_share(self.predicted_s / self.measured_s - 1, "+.1f")
        apart = f"; it differs in {', '.join(self.differs)}" if self.differs else ""
        return (
            f"nearest measured row of {self.table}: {self.id}, {self.what}: {format_time(self.measured_s)}, "
            f"predicted {format_time(self.predicted_s)} ({off}){apart}"
        )


def nearest(job: Job, table: str | Path) -> Nearest:
    """Return the row of *table* whose job is nearest to *job*, and what is predicted of it.

    Numbers are apart by the logarithm of their ratio, words by 1 if they differ, and another GPU is farther
    than all of that: our choice.

    Raises:
        TableError: the table cannot be read, or no row of it describes a run that is possible.
        EngineError: numba is not installed.
    """
    require_numba("predicting a measured row")
    own, best = _features(job), None
    rows = read_runs(table, ("step_time_s",))
    # Own GPU first: False sorts before True.
    for row in sorted(rows, key=lambda row: _device_of(row.text("cluster")) != own["GPU"]):
        if best is not None and not best[1]["GPU"] and _device_of(row.text("cluster")) != own["GPU"]:
            break  # whoever follows is of another GPU, and need not be built
        try:
            other, measured_s = job_of(row), row.above_zero("step_time_s")
        except NOT_POSSIBLE:
            continue
        apart = {name: _apart(value, _features(other)[name]) for name, value in own.items()}
        if best is None or _distance(apart) < _distance(best[1]):
            best = (row, apart, other, measured_s)
    if best is None:
        raise TableError(
            f"{table}: no row of it describes a run that is possible; foretrace validate steps says why"
        )
    row, apart, other, measured_s = best
    theirs = _features(other)
    return Nearest(
        table=str(table),
        id=row.id,
        what=f"{_what(other)}, {other.layout.world_size} {other.cluster.device.name}",
        measured_s=measured_s,
        predicted_s=float(simulate(other, only_figures=True, covers_unsaid=False).summary["step_time_s"]),
        differs=tuple(
            f"{name} {_shown(theirs[name])} for {_shown(own[name])}"
            for name in sorted(apart, key=lambda name: -apart[name])
            if apart[name]
        ),
    )


@cache
def _device_of(cluster: str) -> str:
    """Return the GPU of a machine; empty if there is no such machine."""
    try:
        return load_cluster(cluster).device.name
    except TopologyError:
        return ""


def _features(job: Job) -> dict[str, float | str]:
    """Return what says how much runs are alike."""
    return {
        "GPU": job.cluster.device.name,
        "active parameters": job.model.n_active_params,
        "GPUs": job.layout.world_size,
        **{name: degree for name, degree in job.layout.degrees.items() if name != "dp"},
        "seq_len": job.seq_len,
        "micro_batch": job.micro_batch,
        "micro-batches": job.n_microbatches,
        "precision": job.precision + (" with fp8" if job.fp8 else ""),
        "sharding": job.sharding,
        "recompute": job.recompute,
        "framework": job.framework,
    }


def _distance(apart: Mapping[str, float]) -> tuple[float, float]:
    return apart["GPU"], sum(apart.values())


def _apart(one: float | str, other: float | str) -> float:
    if isinstance(one, str) or isinstance(other, str):
        return float(one != other)
    # Below one nothing is nearer: 0 has no logarithm.
    return abs(math.log(max(one, 1) / max(other, 1)))


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value / 1e9:.3g}B" if value >= 1e9 else f"{value:g}"


# Memory.


def validate_memory(table: str | Path) -> Validation:
    """Return the peak memory of every figure in *table*, predicted and measured, in GB.

    A row with two figures (allocated and reserved) counts as two.

    *table*: CSV or Parquet, with the columns that docs/accuracy.md lists. Raises TableError if the table
    cannot be read, or a column is missing or unknown.
    """
    rows = read_runs(table)
    if not any(f"peak_{kind}_gb" in rows[0].columns for kind in FIGURES):
        raise TableError(f"{table}: no column of {', '.join(f'peak_{kind}_gb' for kind in FIGURES)}")
    scored: list[Scored] = []
    failed: list[Failed] = []
    for row in rows:
        try:
            scored += [one for one, _ in scored_memory(row)]
        except NOT_POSSIBLE as error:
            failed.append(Failed(id=row.id, family=family_of(row), reason=str(error)))
    return Validation(kind="memory", table=str(table), unit="GB", rows=scored, failures=failed)


def scored_memory(row: Row) -> list[tuple[Scored, Job]]:
    """Return each figure of *row*, predicted and measured, and its job.

    Raises SimulationError, TopologyError, TraceError if it cannot be predicted.
    """
    kinds = [kind for kind in FIGURES if row.text(f"peak_{kind}_gb")]
    if not kinds:
        raise TableError("no figure")
    job = job_of(row)
    rank = row.text("rank")
    ranks = rank_memories(job)
    memory = (
        # Memory is that of a stage: the rank says which.
        ranks[job.layout.coord(row.integer("rank")).pp]
        if rank
        else max(ranks, key=lambda one: one.peak_bytes)
    )
    return [
        (
            Scored(
                id=f"{row.id} rank {rank}" if rank else row.id,
                family=f"{family_of(row)} {kind}",
                group="stated" if kind in STATED else kind,
                what=f"{_what(job)} x {job.seq_len}, {kind}",
                predicted=figure_bytes(job, memory, kind) / 1e9,
                measured=row.above_zero(f"peak_{kind}_gb"),
            ),
            job,
        )
        for kind in kinds
    ]


def figure_bytes(job: Job, memory: RankMemory, kind: str) -> int:
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


# Runs that fit, and runs that failed.


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One run: how it ended, and what was predicted.

    *needed_bytes*: predicted peak of the fullest rank, context included, without allocator slack.
    *slack_bytes*: what the caching allocator usually keeps beside tensors.
    """

    id: str
    what: str
    ran: bool
    needed_bytes: int
    limit_bytes: int
    slack_bytes: int = 0

    @property
    def fits(self) -> bool:
        """Whether the prediction is that it fits."""
        return self.needed_bytes <= self.limit_bytes

    @property
    def is_tight(self) -> bool:
        """Whether it fits, but without what the allocator usually keeps beside tensors."""
        return self.fits and self.needed_bytes + self.slack_bytes > self.limit_bytes

    @property
    def is_far_below(self) -> bool:
        """Whether it needs less than half of the memory: if it failed, then hardly for lack of memory."""
        return self.needed_bytes < FAR_BELOW * self.limit_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FitValidation:
    """Verdicts on runs that completed and runs that failed."""

    table: str
    verdicts: Sequence[Verdict]
    failures: Sequence[Failed]

    @property
    def confusion(self) -> dict[str, dict[str, int]]:
        """Counts by how runs ended and by what was predicted.

        ``tight`` and ``under_half`` are part of ``fits``: without room for the allocator's slack, and with
        less than half of the memory needed.
        """
        return {
            name: {
                "fits": sum(one.fits for one in of),
                "tight": sum(one.is_tight for one in of),
                "under_half": sum(one.is_far_below for one in of),
                "does_not_fit": sum(not one.fits for one in of),
            }
            for name, ran in (("completed", True), ("failed", False))
            for of in ([one for one in self.verdicts if one.ran is ran],)
        }

    @property
    def score(self) -> float | None:
        """Mean of the shares of wrong verdicts on completed and on failed runs; None without both.

        The label of a failed run is weak: runs fail for other reasons than memory.
        """
        shares = []
        for name, wrong in (("completed", "does_not_fit"), ("failed", "fits")):
            counts = self.confusion[name]
            if not (total := counts["fits"] + counts["does_not_fit"]):
                return None
            shares.append(counts[wrong] / total)
        return sum(shares) / len(shares)

    def wrong(self, n: int) -> list[Verdict]:
        """Return the *n* completed runs that are furthest above the limit."""
        false = [one for one in self.verdicts if one.ran and not one.fits]
        return sorted(false, key=lambda one: -one.needed_bytes / one.limit_bytes)[:n]

    def document(self, n_worst: int) -> dict[str, Any]:
        """Return everything as plain JSON types: what ``--json`` prints."""
        return {
            "kind": "fit",
            "table": self.table,
            "score": self.score,
            "rows": len(self.verdicts) + len(self.failures),
            "predicted": len(self.verdicts),
            "failures": len(self.failures),
            "failure_reasons": reasons(self.failures),
            "confusion": self.confusion,
            "worst": [
                {
                    "id": one.id,
                    "what": one.what,
                    "needed_gb": one.needed_bytes / 1e9,
                    "limit_gb": one.limit_bytes / 1e9,
                }
                for one in self.wrong(n_worst)
            ],
        }


def validate_fit(table: str | Path) -> FitValidation:
    """Return whether each run of *table* fits into memory; its column ``completed`` says whether it ran.

    Raises TableError if the table cannot be read, or a column is missing or unknown.
    """
    verdicts: list[Verdict] = []
    failures: list[Failed] = []
    for row in read_runs(table, ("completed",)):
        ran = row.flag("completed", default=True)
        try:
            verdicts.append(verdict(row, ran=ran))
        except NOT_POSSIBLE as error:
            family = "completed" if ran else "failed"
            failures.append(Failed(id=row.id, family=family, reason=str(error)))
    return FitValidation(table=str(table), verdicts=verdicts, failures=failures)


def verdict(row: Row, *, ran: bool) -> Verdict:
    """Return whether the run of *row*, which *ran* or failed, fits.

    Raises SimulationError, TopologyError, TraceError if it cannot be predicted.
    """
    job = job_of(row)
    allocated = max(figure_bytes(job, memory, "allocated") for memory in rank_memories(job))
    return Verdict(
        id=row.id,
        what=_what(job),
        ran=ran,
        needed_bytes=allocated + reserved_bytes(job),
        limit_bytes=job.cluster.device.memory_bytes,
        slack_bytes=round(allocated * job.profile.allocator_slack),
    )
