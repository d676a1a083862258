"""What the what-if page offers where a plan does not fit into memory: changes that its controls can make."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from foretrace.simulator.job import Job
from foretrace.simulator.memory.remedies import NOT_POSSIBLE, Remedy, changes, fits, peak_bytes

MOST_CHANGES: Final = 4
"""Changes that are made together before more GPUs are asked for."""

TIMES_GPUS: Final = (2, 4, 8)
"""How many times the GPUs are tried, as so many times the pipeline stages, or else replicas."""

_SETTINGS: Final = ("sharding", "recompute", "micro_batch")
_AXES: Final = ("tp", "pp", "cp", "ep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One or several changes with which a job fits.

    Attributes:
        change: what is changed, as flags would give it.
        peak_bytes: peak memory of the fullest rank with the change.
        settings: the same as the page's controls take it, texts by name.
    """

    change: str
    peak_bytes: int
    settings: dict[str, str]


def ways_to_fit(job: Job) -> list[Way]:
    """Return what would make *job* fit: single changes; else several together, and more GPUs; else both.

    Args:
        job: what does not fit.
    """
    limit = job.cluster.device.memory_bytes
    possible = list(_on_the_page(job))
    single = [_way(job, one.change, one) for one in possible if one.peak_bytes <= limit]
    return single or [*_together(job, possible), *_more_gpus(job)] or list(_both(job))


def _on_the_page(job: Job) -> Iterator[Remedy]:
    """Yield the changes that the page has controls for."""
    for one in changes(job):
        same = {name: getattr(one.job, name) for name in _SETTINGS} | {"layout": one.job.layout}
        if replace(job, **same) == one.job:
            yield one


def _together(job: Job, possible: list[Remedy]) -> Iterator[Way]:
    """Yield the changes that, each time, save most, until the job fits."""
    limit = job.cluster.device.memory_bytes
    made: list[str] = []
    changed = job
    while possible and len(made) < MOST_CHANGES:
        best = min(possible, key=lambda one: one.peak_bytes)
        made.append(best.change.partition(" ")[0])
        if best.peak_bytes <= limit:
            yield _way(job, " and ".join(made), best)
            return
        changed = best.job
        possible = list(_on_the_page(changed))


def _both(job: Job) -> Iterator[Way]:
    """Yield the change that saves most with more GPUs besides, from the smallest number on which it fits."""
    for one in sorted(_on_the_page(job), key=lambda one: one.peak_bytes):
        for more in _more_gpus(one.job):
            own = _way(job, one.change.partition(" ")[0], one)
            yield Way(
                change=f"{own.change} and {more.change}",
                peak_bytes=more.peak_bytes,
                settings=own.settings | more.settings,
            )
            return


def _more_gpus(job: Job) -> Iterator[Way]:
    """Yield the same on the fewest GPUs of ``TIMES_GPUS`` on which it fits."""
    layout = job.layout
    for times in TIMES_GPUS:
        gpus = layout.world_size * times
        for axis in ("pp", "dp"):
            wider = replace(layout, **{axis: getattr(layout, axis) * times})
            try:
                other = replace(job, layout=wider, cluster=job.cluster.sized(gpus))
                if not fits(other):
                    continue
            except NOT_POSSIBLE:
                continue
            settings = {"gpus": str(gpus), "pp": str(wider.pp)}
            said = f"gpus={gpus}" + (f" and pp={wider.pp}" if axis == "pp" else "")
            yield Way(change=said, peak_bytes=peak_bytes(other), settings=settings)
            return


def _way(job: Job, change: str, end: Remedy) -> Way:
    """Return what leads from *job* to the job of *end*."""
    changed: dict[str, str] = {}
    for axis in _AXES:
        if (degree := getattr(end.job.layout, axis)) != getattr(job.layout, axis):
            changed[axis] = str(degree)
    for name in _SETTINGS:
        if (value := getattr(end.job, name)) != getattr(job, name):
            changed[name] = str(value)
    return Way(change=change, peak_bytes=end.peak_bytes, settings=changed)
