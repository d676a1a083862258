"""Calibrates a machine on one recorded run, and says how far predictions are off before and after.

Every other step is fitted on, the steps between are held back: the errors are those of the held-back steps.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np

from foretrace.simulator.compute.timing import ComputeModel, factor_of, fixed_s
from foretrace.simulator.errors import CalibrationError
from foretrace.simulator.job import Job
from foretrace.simulator.network.cost import job_network
from foretrace.simulator.recorded.calibration import Calibration, Factor, constants_of
from foretrace.simulator.recorded.least_squares import Fit, Floats, fit_factors, median_error
from foretrace.simulator.recorded.network import network_factors
from foretrace.simulator.simulate import Simulation, simulate
from foretrace.simulator.workload.micro_batch import embedding_block, head_block, layer_blocks
from foretrace.simulator.workload.ops import DTYPE_BYTES, Comm, Op, memory
from foretrace.topologies.catalog import device_named, device_names
from foretrace.topologies.cluster import Cluster
from foretrace.topologies.device import Device
from foretrace.topologies.errors import TopologyError
from foretrace.traces.analysis.metrics import averaged_steps, breakdown, step_times_ns
from foretrace.traces.columns import int64, labels
from foretrace.traces.report.format import format_share
from foretrace.traces.run import Run

# How long blocks computed in a recorded run, beside what each kind of operation in them should have taken.
#
# Spans are put together by phase and part: attention, MLP, what else a layer does (norms, residuals), and
# what is outside of the layers. Parts are made of matrix products, memory traffic and fixed costs in
# different shares; that is what tells the factors apart.

PHASES: Final = ("forward", "backward", "backward_input", "backward_weight", "recompute")
EXPECTED: Final[Mapping[str, float]] = MappingProxyType(
    {"products": 1.5, "attention": 2.0, "memory": 2.0, "fixed": 3.0, "copies": 3.0}
)
"""By what factor each may be off, either way, before anything was measured. A convention: products are known
best; what is in a cache moves many times as fast as memory, what was just allocated several times slower."""

COLUMNS: Final = tuple(EXPECTED)

MISFIT: Final = 0.05
"""Relative error of predicted compute of one part that no factor explains. A convention, of the size that
``foretrace validate kernels`` finds for single products."""

_ATTENTION: Final = re.compile(r"att|(^|\.)(wq|wk|wv|wo|qkv)\b")
_BETWEEN: Final = re.compile(r"\.(norm|residual)(\.|$)")
"""Names of operations that stand between the parts of a layer: of its own, not of its attention or MLP."""

Key = tuple[str, str]
"""Phase and part."""


class Compute(NamedTuple):
    """Factors on compute, and what the run cannot say about it."""

    factors: dict[str, Factor]
    not_identified: list[str]


def compute_factors(run: Run, job: Job, steps: Sequence[int], optimizer_s: float) -> Compute:
    """Return the factors with which the compute of *job* takes as long as it did in *steps* of *run*.

    *optimizer_s*: how long an optimizer step should take on the mean rank. Raises CalibrationError if the run
    has no compute that can be told by phase.
    """
    times, updates = measured(run, steps)
    # A recording with spans of whole layers says what stands between their parts.
    has_glue = any(part == "layer" for _, part in times)
    wanted = predicted(run, job, has_glue=has_glue)
    keys = [key for key in sorted(times) if key in wanted and wanted[key].sum() > 0]
    if not keys:
        raise CalibrationError(
            f"{run.path} has no forward or backward compute in blocks: record it with foretrace record"
        )
    design = np.array([wanted[key] for key in keys])
    seen = np.array([times[key] for key in keys]).T  # (steps, keys)
    # What the job has no counterpart of cannot be fitted, and is said below.
    missed = sum(float(np.median(times[key])) for key in times if key not in keys and key[0] in PHASES)
    found = _identified(job, design, seen)
    if missed > 0:
        found.not_identified.append(f"{missed * 1e3:.2f} ms a step of compute that the job does not have")
    if optimizer_s > 0 and updates.any():
        ratio = updates / optimizer_s
        found.factors["optimizer"] = Factor(float(np.median(ratio)), median_error(ratio))
    else:
        found.not_identified.append("optimizer: no optimizer step in the run; the catalogue is used")
    return found


def measured(run: Run, steps: Sequence[int]) -> tuple[dict[Key, list[float]], Floats]:
    """Return by phase and part the seconds of each of *steps*, mean over ranks; and of the optimizer."""
    total: dict[Key, Floats] = defaultdict(lambda: np.zeros(len(steps)))
    place = {step: at for at, step in enumerate(steps)}
    for rank in run.stored_ranks:
        table = run.spans([rank])
        category, categories = labels(table, "category")
        if "compute" not in categories:
            continue
        rows = np.flatnonzero(category == categories.index("compute"))
        kinds, kind_names = labels(table, "kind")
        names, name_labels = labels(table, "name")
        layer, step, ns = (int64(table, name)[rows] for name in ("layer", "step", "duration_ns"))
        phase = [kind_names[code] for code in kinds[rows]]
        parts = [_part(name_labels[code], at) for code, at in zip(names[rows], layer.tolist(), strict=True)]
        for at, one, part, took in zip(step.tolist(), phase, parts, ns.tolist(), strict=True):
            # Compute outside of the phases, such as the optimizer, is kept without a part.
            if at in place:
                total[one, part if one in PHASES else ""][place[at]] += took / 1e9
    n = max(len(run.stored_ranks), 1)
    updates = total.pop(("optimizer", ""), np.zeros(len(steps))) / n
    return {key: (values / n).tolist() for key, values in total.items()}, updates


def predicted(run: Run, job: Job, *, has_glue: bool) -> dict[Key, Floats]:
    """Return by phase and part the seconds of products, memory traffic and fixed costs, mean over ranks."""
    compute = ComputeModel(job.cluster.device, job.precision)
    total: dict[Key, Floats] = defaultdict(lambda: np.zeros(len(COLUMNS)))
    for rank in run.stored_ranks:
        for block, part in _blocks(run, job, rank):
            for phase in PHASES:
                for op in block.phases[phase]:
                    if not isinstance(op, Comm):
                        between = has_glue and part != "ends" and _BETWEEN.search(op.name)
                        total[phase, "layer" if between else part] += _by_cause(op, compute)
        if has_glue:
            for part, phase, op in _copies(run, job, rank):
                total[phase, part] += _by_cause(op, compute)
    n = max(len(run.stored_ranks), 1)
    return {key: values * job.n_microbatches / n for key, values in total.items()}


def _copies(run: Run, job: Job, rank: int) -> Iterable[tuple[str, str, Op]]:
    """Yield the part, phase and operation of what full sharding copies: gathered parameters, gradients.

    The recorder counts it to the layer around its parts, or to what is outside; the simulator to nobody.
    """
    if not job.shards.parameters or not job.profile.copies_gathered:
        return
    width, other = DTYPE_BYTES[job.precision], DTYPE_BYTES[job.gradient_dtype]
    layout, model = job.layout, job.model
    split = layout.tp, layout.ep, layout.etp
    again = job.profile.reshard_after_forward and job.profile.wrap == "block"
    sizes = [("layer", model.layer_params(layer, *split), again) for layer in _layers(run, job, rank)]
    ends = [block for block, part in _blocks(run, job, rank) if part == "ends"]
    sizes += [("ends", block.params, again and block.name != "head") for block in ends]
    for part, n_params, twice in sizes:
        gathered = memory("copy.parameters", 2 * width * n_params, job.precision)
        yield part, "forward", gathered
        if twice:
            yield part, "backward", gathered
        yield part, "backward", memory("copy.gradients", (width + other) * n_params, job.precision)


def _layers(run: Run, job: Job, rank: int) -> list[int]:
    """Return the layers of the model that *rank* has spans of."""
    layers = np.unique(int64(run.spans([rank]), "layer")).tolist()
    return [layer for layer in layers if 0 <= layer < job.model.n_layers]


def _blocks(run: Run, job: Job, rank: int) -> Iterable[tuple[Any, str]]:
    """Yield the blocks that *rank* has spans of, and the part that each is."""
    pp = job.layout.coord(rank).pp
    for layer in _layers(run, job, rank):
        for block in layer_blocks(job, layer):
            yield block, "attention" if block.name == "attention" else "mlp"
    if pp == 0:
        yield embedding_block(job), "ends"
    if pp == job.layout.pp - 1:
        yield head_block(job), "ends"


def _part(name: str, layer: int) -> str:
    """Return the part of the model that a span is of.

    >>> _part("layers.3.self_attn", 3), _part("layers.3", 3), _part("mlp", 3), _part("lm_head", -1)
    ('attention', 'layer', 'mlp', 'ends')
    """
    if layer < 0:
        return "ends"
    number = f".{layer}"
    if name.endswith(number):
        return "layer"
    within = name.partition(f"{number}.")[2] or name
    return "attention" if _ATTENTION.search(within) else "mlp"


def _by_cause(op: Op, compute: ComputeModel) -> Floats:
    """Return the seconds of *op* by cause, in the order of ``COLUMNS``; the optimizer is counted apart."""
    seconds = compute.op_s(op)
    fixed = fixed_s(op, compute.device)
    found = np.zeros(len(COLUMNS))
    # Fixed parts have a factor of their own: this one is on what depends on size.
    found[COLUMNS.index(factor_of(op))] = seconds - fixed
    found[COLUMNS.index("fixed")] = fixed
    return found


def _identified(job: Job, design: Floats, seen: Floats) -> Compute:
    """Return the factors that the times identify."""
    there = [at for at in range(len(COLUMNS)) if design[:, at].any()]
    expected = [EXPECTED[COLUMNS[at]] for at in there]
    found: Fit = fit_factors(design[:, there], seen, expected, misfit=MISFIT, power=1.0)
    factors, said = {}, []
    columns = zip(there, found.values, found.errors, found.told, found.held, strict=True)
    for at, value, error, told, held in columns:
        factors[COLUMNS[at]] = Factor(float(value), float(error))
        if held:
            said.append(f"{COLUMNS[at]}: too small a part of the run to be told; held at the catalogue")
        elif not told:
            said.append(f"{COLUMNS[at]}: told to +- {error:.2f} only, hardly better than it was expected")
    if COLUMNS.index("copies") not in there:
        # They are memory traffic: nearer to what the run tells of it than to the catalogue.
        value = factors["memory"].value if "memory" in factors else 1.0
        factors["copies"] = Factor(value, value * math.log(EXPECTED["copies"]))
        said.append("copies: the run does not gather parameters; the factor on memory is used")
    if job.cluster.device.kind == "gpu":
        said.append("launch: the device is not seen waiting for the host; the catalogue is used")
    return Compute(factors, said)


def pass_seconds(times: Mapping[Key, Sequence[float]]) -> float:
    """Return how long all passes together take in the step of the middle."""
    total = sum(np.array(values) for values in times.values())
    return float(np.median(total))


LEAST_STEPS: Final = 4
"""Averaged steps that a calibration needs: two to fit on, two held back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Error:
    """A time that was predicted and measured, in s, before and after calibration."""

    name: str
    before_s: float
    after_s: float
    measured_s: float

    @property
    def is_better(self) -> bool:
        """Whether it is nearer after calibration than before, or was as near."""
        return abs(self.after_s - self.measured_s) <= abs(self.before_s - self.measured_s)

    @property
    def off_before(self) -> float:
        """Relative error of the catalogue; infinite for a time that was not there."""
        return self.before_s / self.measured_s - 1 if self.measured_s else math.inf

    @property
    def off_after(self) -> float:
        """Relative error of the calibration."""
        return self.after_s / self.measured_s - 1 if self.measured_s else math.inf

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON types; an error of a time that was not there is None."""
        known = bool(self.measured_s)
        return {
            "name": self.name,
            "before_s": self.before_s,
            "after_s": self.after_s,
            "measured_s": self.measured_s,
            "error_before": self.off_before if known else None,
            "error_after": self.off_after if known else None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """A calibration and how good it is.

    Attributes:
        calibration: the factors.
        errors: errors of the step, then of its parts, on the held-back steps.
        spread: standard deviation of the time of a held-back step over its mean.
        left_out: factors that were fitted and are not in the calibration, as sentences: with them held-back
            steps are predicted worse.
        operators: errors of operators that were held back, by class; of a trace that says its operators.
    """

    calibration: Calibration
    fitted: tuple[int, ...]
    held_back: tuple[int, ...]
    errors: tuple[Error, ...]
    spread: float
    left_out: tuple[str, ...]
    warnings: tuple[str, ...]
    operators: tuple[Error, ...] = ()

    @property
    def is_better(self) -> bool:
        """Whether held-back steps are predicted better with the calibration than by the catalogue."""
        step = self.errors[0]
        return abs(step.after_s - step.measured_s) < abs(step.before_s - step.measured_s)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON types."""
        one = self.calibration
        return {
            **{key: getattr(one, key) for key in ("run", "cluster", "device", "precision")},
            "factors": {name: {"value": f.value, "error": f.error} for name, f in one.named()},
            "not_identified": list(one.not_identified),
            "left_out": list(self.left_out),
            "is_better": self.is_better,
            "steps_fitted": list(self.fitted),
            "steps_held_back": list(self.held_back),
            "held_back": [e.to_dict() for e in self.errors],
            "operators_held_back": [e.to_dict() for e in self.operators],
            "spread": self.spread,
            "warnings": list(self.warnings),
        }


def calibrate(run: Run, job: Job, *, undisturbed: bool = False) -> Calibrated:
    """Return the calibration of the machine of *job* on *run*.

    *undisturbed*: only the faster half of the steps counts, for a machine that others use as well. Raises
    CalibrationError if the run has too few steps, other ranks, another device, or nothing to fit on. Raises
    SimulationError if the job cannot be simulated.
    """
    if run.info.world_size != job.layout.world_size:
        raise CalibrationError(
            f"{run.path} has {run.info.world_size} ranks, the job {job.layout.world_size}: give its layout"
        )
    check_device(run, job.cluster)
    times_ns = step_times_ns(breakdown(run))
    steps = _steps(run, times_ns, undisturbed=undisturbed)
    # In turns, not first and second half: what drifts over time is in both.
    fitted, held_back = tuple(steps[::2]), tuple(steps[1::2])
    before = simulate(replace(job, n_steps=1))
    optimizer_s = _parts(before.run, [0])["optimizer"]
    compute = compute_factors(run, job, fitted, optimizer_s)
    network = network_factors(run, job_network(job), job.layout.world_size, fitted)
    calibration = Calibration(
        run=run.info.name or run.path,
        cluster=job.cluster.name,
        device=job.cluster.device.name,
        precision=job.precision,
        constants=constants_of(job.cluster),
        compute=compute.factors,
        network=network.factors,
        not_identified=(*compute.not_identified, *network.not_identified),
    )
    held_s = [times_ns[step] / 1e9 for step in held_back]

    def errors(one: Calibration) -> tuple[Error, ...]:
        after = simulate(replace(job, n_steps=1, cluster=one.applied(job.cluster)))
        return _errors(run, held_back, before, after, median(held_s))

    found = errors(calibration)
    # With the errors of all factors, before any is left out: each part is judged by its own.
    kept, left_out = _kept(calibration, found)
    return Calibrated(
        calibration=kept,
        fitted=fitted,
        held_back=held_back,
        # Only what changed is simulated again.
        errors=errors(kept) if left_out else found,
        spread=_spread(held_s),
        left_out=left_out,
        warnings=(*run.warnings, *_assumed(job)),
    )


def _assumed(job: Job) -> Iterator[str]:
    """Yield whose conventions factors rest on, if nobody said it."""
    if "framework" in job.unsaid:
        yield f"factors are by the conventions of {job.framework}, which nobody said: --framework does"


def known_device(run: Run) -> Device | None:
    """Return the device of the catalogue that *run* ran on, as far as its name and memory tell."""
    said = (run.info.cluster or {}).get("device") or {}
    try:
        return device_named(said["name"], said.get("memory_bytes") or 0) if said.get("name") else None
    except TopologyError:
        return None


def check_device(run: Run, cluster: Cluster) -> None:
    """Raise CalibrationError if *run* and *cluster* are of two devices, as far as the catalogue tells."""
    recorded, device = (run.info.cluster or {}).get("device") or {}, cluster.device
    known = known_device(run)
    differ = (
        known is not None
        and device.name in device_names()
        and (
            (known.peak_flops_per_s, known.memory_bytes_per_s)
            != (device.peak_flops_per_s, device.memory_bytes_per_s)
        )
    )
    if differ or ("kind" in recorded and (recorded["kind"] == "cpu") != (device.kind == "cpu")):
        ran_on = "a processor" if recorded.get("kind") == "cpu" else recorded.get("name", "a GPU")
        raise CalibrationError(
            f"{run.path} ran on {ran_on}, {cluster.name} has {device.name}: "
            "give the machine that it ran on, as --cluster here.toml"
        )


def _steps(run: Run, times_ns: Mapping[int, int], *, undisturbed: bool) -> list[int]:
    """Return the steps of *run* that count, of *times_ns* each; the faster half of them if *undisturbed*.

    Raises CalibrationError if there are too few.
    """
    steps = averaged_steps(run)
    if undisturbed:
        # The faster half, in the order of time again, so that steps are fitted on and held back in turns.
        steps = sorted(sorted(steps, key=times_ns.__getitem__)[: (len(steps) + 1) // 2])
    if len(steps) < LEAST_STEPS:
        raise CalibrationError(
            f"{run.path} has {len(steps)} {'undisturbed ' if undisturbed else ''}"
            f"step{'s' if len(steps) != 1 else ''} after warm-up; {LEAST_STEPS} are needed: "
            "half of them are held back"
        )
    return steps


def _spread(times_s: Sequence[float]) -> float:
    """Return the standard deviation of *times_s* over their mean."""
    mean_s = sum(times_s) / len(times_s)
    return float((sum((s - mean_s) ** 2 for s in times_s) / max(len(times_s) - 1, 1)) ** 0.5 / mean_s)


def _kept(one: Calibration, errors: Sequence[Error]) -> tuple[Calibration, tuple[str, ...]]:
    """Return *one* without the factors with which their part of held-back steps is predicted worse."""
    part = {error.name: error for error in errors}
    said = []
    compute, network = dict(one.compute), dict(one.network)
    passes = {name: factor for name, factor in compute.items() if name != "optimizer"}
    for what, name, factors, holder in (
        ("compute", "forward and backward", passes, compute),
        ("optimizer", "optimizer", {"optimizer": None}, compute),
        ("communication", "exposed communication", dict(network), network),
    ):
        error = part.get(name)
        if error is None or not factors.keys() & holder.keys() or error.is_better:
            continue
        for key in factors:
            holder.pop(key, None)
        said.append(
            f"{what}: with its factors {name} of held-back steps is {format_share(error.off_after, '+.1f')} "
            f"off instead of {format_share(error.off_before, '+.1f')}; not better than the catalogue, which "
            "is kept"
        )
    return replace(one, compute=compute, network=network), tuple(said)


def _errors(
    run: Run, held_back: Sequence[int], before: Simulation, after: Simulation, measured_s: float
) -> tuple[Error, ...]:
    """Return what was predicted and measured of the step and of its parts."""
    # The prediction has one step; the recording those that were held back.
    parts = [_parts(one, steps) for one, steps in ((before.run, [0]), (after.run, [0]), (run, held_back))]
    step = Error(
        name="step",
        before_s=before.summary["step_time_s"],
        after_s=after.summary["step_time_s"],
        measured_s=measured_s,
    )
    return step, *(
        Error(name=name, before_s=parts[0][name], after_s=parts[1][name], measured_s=parts[2][name])
        for name in parts[2]
        if any(part[name] > 0 for part in parts)
    )


def _parts(run: Run, steps: Sequence[int]) -> dict[str, float]:
    """Return the seconds of compute by phase, of exposed communication and of all else, per step."""
    times, updates = measured(run, list(steps))
    rows = [row for row in breakdown(run) if row.step in set(steps)]

    def middle_s(*begin: str) -> float:
        by_step: dict[int, list[int]] = defaultdict(list)
        for row in rows:
            ns = sum(n for state, n in row.ns.items() if state.startswith(begin))
            # A row stands for as many ranks as it represents.
            by_step[row.step] += [ns] * row.represents
        return float(np.median([np.mean(values) for values in by_step.values()])) / 1e9 if by_step else 0.0

    return {
        "forward and backward": pass_seconds(times),
        "optimizer": float(np.median(updates)) if len(updates) else 0.0,
        "exposed communication": middle_s("exposed"),
        "bubble and waiting": middle_s("bubble", "wait"),
        "other": middle_s("other"),
    }
