"""Whether heads go round tensor-parallel ranks, and layers the stages that a framework wants to be alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretrace.simulator.errors import JobError
from foretrace.simulator.nearest import near_divisors
from foretrace.simulator.schedules import SCHEDULES

if TYPE_CHECKING:
    from foretrace.simulator.job import Job
    from foretrace.simulator.models.model import Model


def check_heads(tp: int, model: Model) -> None:
    """Raise JobError unless *tp* ranks have the same number of attention heads each."""
    if model.n_heads % tp:
        raise JobError(
            f"tp={tp} does not divide the {model.n_heads} attention heads of {model.name}; "
            f"{near_divisors(model.n_heads, tp)} would work"
        )


def counted_layers(n_layers: int, counted_ends: str) -> int:
    """Return the layers that are shared out: those of the model, and ends that count as one.

    >>> counted_layers(126, "none"), counted_layers(126, "head"), counted_layers(126, "both")
    (126, 127, 128)
    """
    return n_layers + {"none": 0, "both": 2}.get(counted_ends, 1)


def check_chunks(job: Job) -> None:
    """Check that every virtual stage gets the same number of layers, where the framework cannot do otherwise.

    A list of layers per stage says outright what each gets, and is always possible.

    Raises:
        JobError: they do not; the message has the nearest numbers that work.
    """
    schedule = SCHEDULES.get(job.schedule)
    if schedule is None or not schedule.is_flexible or not job.profile.even_chunks or job.layers_per_stage:
        return
    pp, virtual = job.layout.pp, job.virtual_stages or schedule.virtual_stages
    n_layers = counted_layers(job.model.n_layers, job.counted_ends)
    if pp == 1 or virtual == 1 or n_layers % (pp * virtual) == 0:
        return
    ends = "" if n_layers == job.model.n_layers else f" with counted_ends {job.counted_ends}"
    raise JobError(
        f"{n_layers} layers of {job.model.name}{ends} do not divide into pp*virtual_stages = "
        f"{pp}*{virtual} = {pp * virtual}; {_others(job, n_layers, pp, virtual)} would work, or "
        f"layers_per_stage with {pp * virtual} numbers"
    )


def _others(job: Job, n_layers: int, pp: int, virtual: int) -> str:
    """Return what else would do in words: other virtual stages, counted ends, or other pipeline ranks."""
    if n_layers % pp == 0:
        return f"virtual_stages {near_divisors(n_layers // pp, virtual)}"
    if counted_layers(job.model.n_layers, "both") % (pp * virtual) == 0:
        return "counted_ends both"
    if n_layers % virtual == 0 and n_layers > virtual:
        return f"pp {near_divisors(n_layers // virtual, pp)}"
    return "schedule 1f1b"
