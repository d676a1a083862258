"""Calibrates a machine on one recorded run, and says how far predictions are off before and after.

Every other step is fitted on, the steps between are held back: the errors are those of the held-back steps.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final

import numpy as np

from foretrace.simulator.errors import CalibrationError
from foretrace.simulator.job import Job
from foretrace.simulator.recorded.calibration import Calibration, constants_of
from foretrace.simulator.recorded.compute import compute_factors, measured, pass_seconds
from foretrace.simulator.recorded.network import network_factors
from foretrace.simulator.simulate import Simulation, simulate
from foretrace.traces.analysis.metrics import averaged_steps, breakdown, step_times_ns
from foretrace.traces.report.format import format_share
from foretrace.traces.run import Run

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """A calibration and how good it is.

    Attributes:
        calibration: the factors.
        fitted, held_back: steps.
        errors: errors of the step, then of its parts, on the held-back steps.
        spread: standard deviation of the time of a held-back step over its mean.
        left_out: factors that were fitted and are not in the calibration, as sentences: with them held-back
            steps are predicted worse.
        warnings: warnings of the run.
    """

    calibration: Calibration
    fitted: tuple[int, ...]
    held_back: tuple[int, ...]
    errors: tuple[Error, ...]
    spread: float
    left_out: tuple[str, ...]
    warnings: tuple[str, ...]

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
            "held_back": [
                {
                    "name": e.name,
                    "before_s": e.before_s,
                    "after_s": e.after_s,
                    "measured_s": e.measured_s,
                    "error_before": e.before_s / e.measured_s - 1 if e.measured_s else None,
                    "error_after": e.after_s / e.measured_s - 1 if e.measured_s else None,
                }
                for e in self.errors
            ],
            "spread": self.spread,
            "warnings": list(self.warnings),
        }


def calibrate(run: Run, job: Job, *, undisturbed: bool = False) -> Calibrated:
    """Return the calibration of the machine of *job* on *run*.

    Args:
        run: a run of that job, recorded.
        job: what was run, on the machine of the catalogue.
        undisturbed: only the faster half of the steps counts, for a machine that others use as well.

    Raises:
        CalibrationError: the run has too few steps, other ranks, another device, or nothing to fit on.
        SimulationError: the job cannot be simulated.
    """
    if run.info.world_size != job.layout.world_size:
        raise CalibrationError(
            f"{run.path} has {run.info.world_size} ranks, the job {job.layout.world_size}: give its layout"
        )
    _check_device(run, job)
    times_ns = step_times_ns(breakdown(run))
    steps = _steps(run, times_ns, undisturbed=undisturbed)
    fitted, held_back = tuple(steps[::2]), tuple(steps[1::2])
    before = simulate(replace(job, n_steps=1))
    optimizer_s = _parts(before.run, [0])["optimizer"]
    compute = compute_factors(run, job, fitted, optimizer_s)
    network = network_factors(run, job, fitted)
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
    kept, left_out = _kept(calibration, found)
    return Calibrated(
        calibration=kept,
        fitted=fitted,
        held_back=held_back,
        errors=errors(kept) if left_out else found,
        spread=_spread(held_s),
        left_out=left_out,
        warnings=tuple(run.warnings),
    )


def _check_device(run: Run, job: Job) -> None:
    """Raise CalibrationError if one of *run* and *job* is on a processor and the other on GPUs."""
    recorded, device = (run.info.cluster or {}).get("device") or {}, job.cluster.device
    if "kind" in recorded and (recorded["kind"] == "cpu") != (device.kind == "cpu"):
        ran_on = "a processor" if recorded["kind"] == "cpu" else recorded.get("name", "a GPU")
        raise CalibrationError(
            f"{run.path} ran on {ran_on}, {job.cluster.name} has {device.name}: "
            "give the machine that it ran on, as --cluster here.toml"
        )


def _steps(run: Run, times_ns: Mapping[int, int], *, undisturbed: bool) -> list[int]:
    """Return the steps of *run* that count, of *times_ns* each; the faster half of them if *undisturbed*.

    Raises:
        CalibrationError: there are too few.
    """
    steps = list(averaged_steps(run, times_ns))
    if undisturbed:
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
            by_step[row.step] += [ns] * row.represents
        return float(np.median([np.mean(values) for values in by_step.values()])) / 1e9 if by_step else 0.0

    return {
        "forward and backward": pass_seconds(times),
        "optimizer": float(np.median(updates)) if len(updates) else 0.0,
        "exposed communication": middle_s("exposed"),
        "bubble and waiting": middle_s("bubble", "wait"),
        "other": middle_s("other"),
    }
