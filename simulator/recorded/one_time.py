"""Calibrates a model on a machine with a single number: a measured step time.

Without a recording nothing tells matrix products from attention, or links inside nodes from those between
them. So two factors are fitted, one on all computing and one on all communication. They explain only the part
of the difference that runs of one model usually share (docs/calibration.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from foretrace.simulator.compute.timing import ComputeModel
from foretrace.simulator.engine import require_numba
from foretrace.simulator.errors import CalibrationError
from foretrace.simulator.job import Job
from foretrace.simulator.network.cost import Network
from foretrace.simulator.network.nccl import choice
from foretrace.simulator.recorded.calibration import (
    COMPUTE,
    LINKS,
    OTHERS,
    PARTS,
    Calibration,
    Factor,
    constants_of,
    job_kind,
)
from foretrace.simulator.simulate import simulate
from foretrace.simulator.validate.calibrate import OUTLIER, errors, fit, usual_spread
from foretrace.simulator.validate.curve import curve_of
from foretrace.topologies.placement import place
from foretrace.topologies.units import format_time


@dataclass(frozen=True, slots=True, kw_only=True)
class OneTime:
    """A calibration on one measured step.

    Attributes:
        calibration: the factors.
        measured_s: time of the step that was measured.
        before_s: what the catalogue predicts for it.
        after_s: what is predicted with the factors.
        usual: how far off a prediction usually is, as a standard deviation of its logarithm.
    """

    calibration: Calibration
    measured_s: float
    before_s: float
    after_s: float
    usual: float

    @property
    def is_unusual(self) -> bool:
        """Whether the run is too far off for the factors to explain it."""
        return abs(math.log(self.measured_s / self.before_s)) > OUTLIER * self.usual

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON types."""
        one = self.calibration
        return {
            **{key: getattr(one, key) for key in ("run", "cluster", "device", "precision", "only")},
            "factors": {name: {"value": f.value, "error": f.error} for name, f in one.named()},
            **{key: getattr(self, key) for key in ("measured_s", "before_s", "after_s")},
            "error_before": self.before_s / self.measured_s - 1,
            "error_after": self.after_s / self.measured_s - 1,
            "is_unusual": self.is_unusual,
        }


def calibrate_on_time(job: Job, measured_s: float) -> OneTime:
    """Return the calibration of the model of *job* on its machine, if a step of it took *measured_s*.

    Args:
        job: what was run, on the machine of the catalogue.
        measured_s: mean or median time of its steps after warm-up, in s.

    Raises:
        CalibrationError: the time is not above zero.
        SimulationError: the job cannot be simulated, or numba is not installed.
    """
    require_numba("calibrating on a step time")
    if not (math.isfinite(measured_s) and measured_s > 0):
        raise CalibrationError(f"step time {measured_s!r}: seconds above zero, such as 3.21")
    job = replace(job, n_steps=1)
    cluster = job.cluster
    network = Network(
        cluster,
        place(job.layout.world_size, cluster, job.placement),
        choice(job.nccl_algo, job.nccl_proto),
    )
    curve = curve_of(job, network, ComputeModel(cluster.device, job.precision))
    values, spreads = fit(curve, measured_s), errors(curve)
    compute, communication = (
        Factor(value, value * spread) for value, spread in zip(values, spreads, strict=True)
    )
    found = Calibration(
        run=f"a step of {format_time(measured_s)}",
        cluster=cluster.name,
        device=cluster.device.name,
        precision=job.precision,
        constants=constants_of(cluster),
        compute=dict.fromkeys(COMPUTE, compute),
        network={f"{link}.{OTHERS}.{part}": communication for link in LINKS for part in PARTS},
        only=job_kind(job),
    )
    before, after = (simulate(one).summary["step_time_s"] for one in (job, found.calibrated(job)))
    return OneTime(
        calibration=found,
        measured_s=measured_s,
        before_s=before,
        after_s=after,
        usual=usual_spread(curve),
    )
