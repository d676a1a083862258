"""Calibrates a machine on the operators of a trace, each of which was timed; one step is enough.

A factor is fitted for each class of operators. Half of the distinct operators of a class predict the other
half, and the other way round: the errors are those of the half that is predicted worse. What is kept is
fitted on all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from foretrace.simulator.compute.timing import COPY_START_S, ComputeModel, factor_of, fixed_s, link_s
from foretrace.simulator.errors import CalibrationError
from foretrace.simulator.network.cost import Network
from foretrace.simulator.program import Int64Array
from foretrace.simulator.recorded.calibrate import Calibrated, Error, check_device, known_device
from foretrace.simulator.recorded.calibration import Calibration, Factor, constants_of
from foretrace.simulator.recorded.least_squares import Floats, fit_factors
from foretrace.simulator.recorded.network import Communication, network_factors
from foretrace.simulator.rehearsed.run import OPERATIONS_PER_KERNEL, launched, simulate_rehearsal
from foretrace.simulator.rehearsed.works import op_of, precision_of
from foretrace.simulator.simulate import Simulation
from foretrace.topologies.cluster import Cluster
from foretrace.topologies.device import Device
from foretrace.topologies.placement import place
from foretrace.traces.columns import BoolArray, bounds, int64, is_one_of
from foretrace.traces.errors import RunError
from foretrace.traces.rehearsal import (
    COMMUNICATION,
    HOST_KINDS,
    ON_HOST,
    OP,
    RankTables,
    Rehearsal,
    read_measured,
    read_rank,
    read_rehearsal,
    rehearsal_folder,
)
from foretrace.traces.report.format import format_share
from foretrace.traces.run import Run

EXPECTED: Final[Mapping[str, float]] = {
    "products": 2.0, "convolutions": 4.0, "attention": 2.0, "memory": 2.0, "optimizer": 2.0, "fixed": 2.0,
}  # fmt: skip
"""By what factor each may be off, either way, before anything was measured; columns of the fit. A convention:
convolutions vary most, by the algorithm that a library picks."""

COLUMNS: Final = tuple(EXPECTED)

MISFIT: Final = 0.3
"""Relative error of a single operator, at most, that no factor explains: a convention."""

LEAST_SHAPES: Final = 2
"""Distinct operators that a class needs: one to fit on, one held back."""

LEAST_EXPLAINED: Final = 0.8
"""Share of the device's time that operators of known work must have for a machine to be told by
them: a convention. The others take what they took."""

LEAST_SIZED: Final = 0.1
"""Share of a class that must depend on sizes for its factor to be told by how long all of it took."""

OTHERS_SHAPES: Final = 0.5
"""Error of operators that were held back from which on a factor tells nothing of other shapes."""

NAMED: Final = ("products", "attention", "memory")
"""Classes that a training usually has: where they are missing it is said."""

PARTS: Final = 8
"""Parts of a trace that the host's time to launch is compared between."""

LEAST_COPY_BYTES: Final = 1 << 20
"""Smaller copies take as long as their start does."""

STEP: Final = "step"
HOST: Final = "copies to and from the host"
UNKNOWN: Final = "operators of unknown work"
COMMUNICATION_PART: Final = "communication"
UNTOLD: Final = "communication with ranks that the trace lacks"
LAUNCHING: Final = "host launches"
PAUSES: Final = "host pauses"
NOTHING: Final = "nothing runs"
"""Parts of a step beside the classes of operators. They overlap: the host launches while the device runs."""


class Timed(NamedTuple):
    """The operators of one rank: counted, priced and measured.

    Attributes:
        kinds: class of each distinct operator, a name of a factor, ``HOST`` or empty for one of unknown work.
        design: predicted seconds of one call by column; shape ``(n_works, n_columns)``.
        device_s: how long one call took, mean.
        kernels: kernels that the host launches for one.
    """

    kinds: list[str]
    design: Floats
    calls: Int64Array
    device_s: Floats
    kernels: Int64Array


def is_traced(path: str | Path) -> bool:
    """Whether the run at *path* is a trace that says what was issued, and when."""
    try:
        return "traced" in read_rehearsal(path).job
    except RunError:
        return False


def forward_only(path: str | Path) -> str:
    """Return a sentence about the trace at *path* if nothing marks a backward pass; empty if it has one."""
    if not is_traced(path):
        return ""
    tables = (read_rank(rehearsal_folder(path), rank) for rank in read_rehearsal(path).ranks)
    kinds = {kind for one in tables for kind in one.places["kind"].to_pylist()}
    if any(kind.startswith("backward") for kind in kinds):
        return ""
    return f"nothing in {path} marks a backward pass: what is simulated is a training step of its model"


def calibrate_traced(run: Run, cluster: Callable[[int], Cluster]) -> Calibrated:
    """Return the calibration of a machine on the operators of a trace.

    *run*: the trace, taken over with its operators. *cluster*: returns the machine, given the number of its
    GPUs that are needed. Raises CalibrationError if it is of another device, or too little of it is
    explained. Raises SimulationError, TopologyError if the machine does not fit it.
    """
    trace = Trace.read(run.path)
    machine = cluster(trace.rehearsal.world_size)
    check_device(run, machine)
    trace.check_explained()
    compute = trace.compute_on(machine)
    timed = [trace.timed(rank, compute) for rank in trace.rehearsal.ranks]
    factors, failed, said, held_back = _operators(timed)
    own = _impossible(factors, machine.device) | failed
    network = _network(run, trace, machine)
    calibration = Calibration(
        run=run.info.name or run.path,
        cluster=machine.name,
        device=machine.device.name,
        precision=compute.precision,
        constants=constants_of(machine),
        compute=factors | _launch(trace, timed, compute.device.launch_s) | _link(trace, timed, compute),
        network=network.factors,
        own=tuple(own),
        not_identified=(
            *(
                f"{name}: {why}, so that it holds for the shapes of this run only"
                for name, why in own.items()
            ),
            *said,
            *network.not_identified,
        ),
    )
    seen = trace.measured_parts(compute)
    before, after = (
        trace.predicted_parts(one) for one in (machine, calibration.applied(machine, like=calibration.run))
    )
    errors = tuple(
        Error(name=name, before_s=before[name], after_s=after[name], measured_s=seen[name])
        for name in seen
        if max(seen[name], after[name]) > 0
    )
    return Calibrated(
        calibration=calibration,
        fitted=tuple(range(trace.n_steps)),
        held_back=(),
        errors=errors,
        spread=0.0,
        left_out=(),
        warnings=tuple(run.warnings),
        operators=held_back,
    )


class Trace:
    """What a trace says was issued, and how long it took.

    *measured*: what it took, in the columns of ``traces.rehearsal.MEASURED``.
    """

    def __init__(
        self,
        path: str,
        rehearsal: Rehearsal,
        tables: Mapping[int, RankTables],
        measured: Mapping[int, pa.Table],
    ) -> None:
        self.path, self.rehearsal, self.tables, self.measured_of = path, rehearsal, tables, measured
        self.n_steps = int(rehearsal.job["steps"])

    @classmethod
    def read(cls, path: str) -> Trace:
        """Return the trace at *path*. Raises CalibrationError if it does not say what was issued."""
        if not is_traced(path):
            raise CalibrationError(
                f"{path} does not say its operators and their shapes: record with record_shapes=True, and "
                "take the files over with foretrace ingest --explain"
            )
        folder, rehearsal = rehearsal_folder(path), read_rehearsal(path)
        tables = {rank: read_rank(folder, rank) for rank in rehearsal.ranks}
        measured = {rank: read_measured(folder, rank) for rank in rehearsal.ranks}
        known = {rank: one for rank, one in measured.items() if one is not None}
        if len(known) < len(tables):
            raise CalibrationError(f"{folder} lacks what operators took: ingest the trace again")
        return cls(path, rehearsal, tables, known)

    def check_explained(self) -> None:
        """Raise CalibrationError if too little of the device's time is of operators of known work."""
        # The rank of which least is explained decides.
        traced = self.rehearsal.job["traced"]
        rank, share = min(
            ((rank, float(traced[str(rank)]["explained"])) for rank in self.tables), key=lambda one: one[1]
        )
        if share < LEAST_EXPLAINED:
            raise CalibrationError(
                f"{self.path}: only {format_share(share)} of the device's time is of operators of which the "
                f"trace tells the work; {format_share(LEAST_EXPLAINED, '.0f')} are needed. Most of the rest: "
                f"{', '.join(self._unexplained(rank))}. Record eagerly with record_shapes=True; newer "
                "PyTorch also writes numbers and members of lists"
            )

    def _unexplained(self, rank: int) -> list[str]:
        """Return the operators of unknown work that took longest on *rank*, with how long."""
        works, took = self.tables[rank].works, defaultdict[str, float](float)
        columns = (works[name].to_pylist() for name in ("name", "is_known"))
        for name, is_known, seconds in zip(*columns, self._device_s(rank)[1].tolist(), strict=True):
            took[name] += 0.0 if is_known else seconds
        longest = sorted(took, key=lambda name: -took[name])[:3]
        return [f"{name[:80]} {1e3 * took[name]:.3g} ms" for name in longest]

    def _device_s(self, rank: int) -> tuple[Int64Array, Floats]:
        """Return how often each distinct operator of *rank* ran, and how long all its calls took, seconds."""
        tables, measured = self.tables[rank], self.measured_of[rank]
        what, item = (tables.events[name].to_numpy() for name in ("what", "item"))
        event, device_ns = (measured[name].to_numpy() for name in ("event", "device_ns"))
        ops = what[event] == OP
        n = tables.works.num_rows
        calls = np.bincount(item[event[ops]], minlength=n).astype(np.int64)
        return calls, np.bincount(item[event[ops]], device_ns[ops], minlength=n) / 1e9

    def compute_on(self, machine: Cluster) -> ComputeModel:
        """Return the compute model of *machine* in the precision of the trace."""
        precision = precision_of([one.works for one in self.tables.values()], machine.device)
        return ComputeModel(machine.device, precision)

    def timed(self, rank: int, compute: ComputeModel) -> Timed:
        """Return the operators of *rank*: counted, priced and measured."""
        calls, took = self._device_s(rank)
        rows = self.tables[rank].works.to_pylist()
        kinds, design = [], np.zeros((len(rows), len(COLUMNS)))
        for at, row in enumerate(rows):
            kind = _class_of(row, compute)
            kinds.append(kind)
            if kind in COLUMNS:
                op = op_of(row, compute.device)
                fixed = fixed_s(op, compute.device)
                # Rounding may leave a hair less than nothing.
                design[at, COLUMNS.index(kind)] = max(compute.op_s(op) - fixed, 0.0)
                design[at, COLUMNS.index("fixed")] = fixed
        # What the host does itself it does not launch.
        kernels = np.array([0 if row["kind"] == ON_HOST else row["kernels"] for row in rows], np.int64)
        # An operator that never ran has no mean; its zero time counts for nothing.
        return Timed(kinds, design, calls, took / np.maximum(calls, 1), kernels)

    @property
    def _communication(self) -> str:
        """Name of the part of a step that communicates; with ranks that are missing it takes what it took."""
        return COMMUNICATION_PART if len(self.tables) == self.rehearsal.world_size else UNTOLD

    def measured_parts(self, compute: ComputeModel) -> dict[str, float]:
        """Return the seconds of a step and of its parts, mean over ranks and steps."""
        found: dict[str, float] = defaultdict(float)
        facts = self.rehearsal.job["traced"]
        found[STEP] = float(np.mean([np.median(one["step_s"]) for one in facts.values()]))
        n = len(self.tables) * self.n_steps
        communication = self._communication
        for rank, tables in self.tables.items():
            timed = self.timed(rank, compute)
            for kind, calls, took in zip(timed.kinds, timed.calls, timed.device_s, strict=True):
                found[kind or UNKNOWN] += float(calls * took) / n
            measured = self.measured_of[rank]
            event, device_ns, host_ns, pause_ns = (
                measured[name].to_numpy() for name in ("event", "device_ns", "host_ns", "pause_ns")
            )
            what = tables.events["what"].to_numpy()[event]
            found[communication] += float(device_ns[what == COMMUNICATION].sum()) / 1e9 / n
            found[LAUNCHING] += float(host_ns.sum()) / 1e9 / n
            found[PAUSES] += float(pause_ns.sum()) / 1e9 / n
        found[NOTHING] = float(np.mean([np.mean(one["idle_s"]) for one in facts.values()]))
        return dict(found)

    def predicted_parts(self, machine: Cluster, simulation: Simulation | None = None) -> dict[str, float]:
        """Return the same, predicted on *machine*, by *simulation* if it is there already."""
        found: dict[str, float] = defaultdict(float)
        if simulation is None:
            simulation = simulate_rehearsal(self.path, lambda _: machine)
        compute = self.compute_on(machine)
        n = len(self.tables) * self.n_steps
        for rank, tables in self.tables.items():
            timed = self.timed(rank, compute)
            for at, (kind, calls) in enumerate(zip(timed.kinds, timed.calls, strict=True)):
                one_s = timed.design[at].sum() if kind else timed.device_s[at]
                found[kind or UNKNOWN] += float(calls * one_s) / n
            found[HOST] += sum(
                link_s(row["bytes_moved"], compute.device) * int(calls) / n
                for row, calls in zip(tables.works.to_pylist(), timed.calls, strict=True)
                if row["kind"] in HOST_KINDS
            )
        spans = simulation.spans
        seconds = int64(spans, "duration_ns") / 1e9
        own = [int64(spans, "rank") == rank for rank in self.rehearsal.ranks]
        for name, kinds, value in (
            (self._communication, "category", ("collective", "p2p")),
            (LAUNCHING, "kind", ("launch",)),
            (PAUSES, "kind", ("pause",)),
        ):
            # Ranks that are stood for are in the simulation, too, but not in the trace.
            found[name] = float(seconds[np.any(own, axis=0) & is_one_of(spans, kinds, value)].sum()) / n
        found[STEP] = float(simulation.summary["step_time_s"])
        runs = is_one_of(spans, "category", ("compute", "copy", "collective", "p2p"))
        # Nothing runs where no span covers a moment; of overlapping streams each moment counts once.
        covered_s = sum(_covered_s(spans, runs & one) for one in own) / n
        found[NOTHING] = max(found[STEP] - covered_s, 0.0)
        return found


def _covered_s(spans: pa.Table, chosen: BoolArray) -> float:
    """Return how long at least one of the *chosen* spans runs."""
    start, end = (edge[chosen] for edge in bounds(spans))
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    # Ends so far are the latest of all before: only what reaches beyond them is new.
    return float(np.maximum(end - np.maximum(start, np.append(start[:1], end[:-1])), 0).sum()) / 1e9


def _class_of(row: Mapping[str, Any], compute: ComputeModel) -> str:
    """Return the factor that applies to a work, ``HOST`` for a copy over the link, empty where unknown."""
    if row["kind"] in HOST_KINDS:
        return HOST
    return factor_of(op_of(row, compute.device)) if row["is_known"] else ""


def _impossible(factors: Mapping[str, Factor], device: Device) -> dict[str, str]:
    """Return the classes whose factor would take *device* beyond what it can do, and that as a sentence.

    Operators of these shapes are faster than the catalogue has them: small ones stay in a cache, or a kernel
    has no need of what slows others. Others are not.
    """
    tiles = device.gemm_tiles
    reached = {
        "products": device.training_clock_fraction * (tiles.efficiency if tiles else device.gemm_efficiency),
        "attention": device.training_clock_fraction * device.attention_efficiency_forward,
        "memory": device.memory_bound_fraction,
    }
    return {
        name: f"its factor is {format_share(share / factors[name].value, '.0f')} of what the device can do"
        for name, share in reached.items()
        if name in factors and share > factors[name].value
    }


def _operators(
    timed: Sequence[Timed],
) -> tuple[dict[str, Factor], dict[str, str], list[str], tuple[Error, ...]]:
    """Return factors on classes of operators, why some fail, what else is not identified, and errors.

    Errors are those of operators that were held back; on them a factor may fail.
    """
    kinds = np.array([kind for one in timed for kind in one.kinds])
    calls = np.concatenate([one.calls for one in timed]).astype(np.float64)
    # Of each distinct operator all its calls together.
    design = np.concatenate([one.design for one in timed]) * calls[:, None]
    took = np.concatenate([one.device_s for one in timed]) * calls
    known = np.isin(kinds, COLUMNS) & (took > 0)
    fold = np.full(len(kinds), -1)
    said: list[str] = []
    failed: dict[str, str] = {}
    for kind in COLUMNS:
        own = np.flatnonzero(known & (kinds == kind))
        # Long and short ones in turns, so that both halves have as much of each.
        fold[own[np.argsort(-took[own], kind="stable")]] = np.arange(len(own)) % 2
        if len(own) and len(own) < LEAST_SHAPES:
            said.append(f"{kind}: operators of one shape only, so that none could be held back")
    factors = _fitted(design[known], took[known])
    predicted = design.sum(axis=1)
    for held in (0, 1):
        values = _fitted(design[fold == 1 - held], took[fold == 1 - held])
        at = np.array([values[name].value if name in values else 1.0 for name in COLUMNS])
        predicted[fold == held] = design[fold == held] @ at
    errors = []
    for kind in COLUMNS:
        own = known & (kinds == kind)
        if own.sum() >= LEAST_SHAPES:
            halves = [
                Error(
                    name=f"{kind}, {own.sum()} shapes",
                    before_s=float(design[own & (fold == held)].sum()),
                    after_s=float(predicted[own & (fold == held)].sum()),
                    measured_s=float(took[own & (fold == held)].sum()),
                )
                for held in (0, 1)
            ]
            worse = max(halves, key=lambda half: abs(half.off_after))
            errors.append(worse)
            one = factors[kind]
            factors[kind] = Factor(one.value, max(one.error, one.value * abs(worse.off_after)))
            if abs(worse.off_after) > OTHERS_SHAPES:
                off = format_share(worse.off_after, "+.0f")
                failed[kind] = f"with its factor operators that were held back are {off} off"
        elif not own.any() and kind in NAMED:
            said.append(f"{kind}: no such operator in the trace; the catalogue is used")
    return factors, failed, said, tuple(errors)


def _fitted(design: Floats, took: Floats) -> dict[str, Factor]:
    """Return the factors with which *design* makes up the times that operators *took*."""
    there = [at for at in range(len(COLUMNS)) if design[:, at].any()]
    if not there:
        return {}
    expected = [EXPECTED[COLUMNS[at]] for at in there]
    found = fit_factors(design[:, there], took[None, :], expected, misfit=MISFIT, power=1.0)
    factors = {
        COLUMNS[at]: Factor(float(value), float(error))
        for at, value, error in zip(there, found.values, found.errors, strict=True)
    }
    # least squares tell fixed times from sizes; a class as a whole then takes as long as it did
    fixed = factors["fixed"].value * design[:, COLUMNS.index("fixed")]
    for at in there:
        name, own = COLUMNS[at], design[:, at] > 0
        left_s = float((took - fixed)[own].sum())
        size_s = factors[name].value * float(design[own, at].sum())
        if name != "fixed" and left_s > 0 and size_s > LEAST_SIZED * float(took[own].sum()):
            value = left_s / float(design[own, at].sum())
            factors[name] = Factor(value, max(factors[name].error, abs(value - factors[name].value)))
    return factors


def _launch(trace: Trace, timed: Sequence[Timed], launch_s: float) -> dict[str, Factor]:
    """Return the factor on what the host needs to launch, and how much parts of the trace differ in it."""
    ratios, total_s, expected_s = [], 0.0, 0.0
    for rank, one in zip(trace.rehearsal.ranks, timed, strict=True):
        tables, measured = trace.tables[rank], trace.measured_of[rank]
        host_ns = measured["host_ns"].to_numpy()
        wanted = launched(tables, measured, one.kernels) * launch_s * OPERATIONS_PER_KERNEL
        total_s, expected_s = total_s + host_ns.sum() / 1e9, expected_s + wanted.sum()
        ratios += [
            host.sum() / 1e9 / want.sum()
            for host, want in zip(np.array_split(host_ns, PARTS), np.array_split(wanted, PARTS), strict=True)
            if want.sum() > 0
        ]
    if not expected_s or not total_s:
        return {}
    # A single part has no spread: the error is as large as the factor.
    error = float(np.std(ratios, ddof=1) / len(ratios) ** 0.5) if len(ratios) > 1 else total_s / expected_s
    return {"launch": Factor(float(total_s / expected_s), error)}


def _link(trace: Trace, timed: Sequence[Timed], compute: ComputeModel) -> dict[str, Factor]:
    """Return the factor on copies over the link to the host; small ones say nothing of its bandwidth."""
    pairs = [
        (
            row["bytes_moved"] * int(calls) / compute.device.host_bytes_per_s,
            # Without the start, which small copies mostly are.
            float(calls * (took - COPY_START_S)),
        )
        for rank, one in zip(trace.rehearsal.ranks, timed, strict=True)
        for row, calls, took in zip(
            trace.tables[rank].works.to_pylist(), one.calls, one.device_s, strict=True
        )
        if row["kind"] in HOST_KINDS and row["bytes_moved"] >= LEAST_COPY_BYTES and took > COPY_START_S
    ]
    if not pairs:
        return {}
    expected_s, took_s = (sum(column) for column in zip(*pairs, strict=True))
    value = took_s / expected_s
    spread = float(np.std([took / expected for expected, took in pairs])) if len(pairs) > 1 else value
    return {"link": Factor(value, spread)}


def _network(run: Run, trace: Trace, machine: Cluster) -> Communication:
    """Return the factors on communication, if the trace holds all ranks."""
    world_size = trace.rehearsal.world_size
    if world_size == 1:
        return Communication({}, [])
    if len(trace.tables) == world_size:
        network = Network(machine, place(world_size, machine))
        steps = np.unique(int64(run.spans([run.stored_ranks[0]]), "step")).tolist()
        return network_factors(run, network, world_size, steps)
    waiting = (
        f"waiting and transfer of communication: the trace holds {len(trace.tables)} of {world_size} ranks; "
        "the catalogue is used, and like this run communication takes what it took"
    )
    return Communication({}, [waiting])


def errors_of(path: str, machine: Cluster, simulation: Simulation) -> tuple[Error, ...]:
    """Return how far *simulation* of the trace at *path* on *machine* is off, by part of a step."""
    trace = Trace.read(path)
    compute = trace.compute_on(machine)
    seen, predicted = trace.measured_parts(compute), trace.predicted_parts(machine, simulation)
    return tuple(
        Error(name=name, before_s=predicted[name], after_s=predicted[name], measured_s=seen[name])
        for name in seen
        if max(seen[name], predicted[name]) > 0
    )


def is_same_device(run: Run, machine: Cluster) -> bool:
    """Whether the trace is of the device of *machine*, as far as its name and memory tell."""
    known = known_device(run)
    return known is not None and known.name == machine.device.name
