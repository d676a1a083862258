"""What the what-if page offers: the values of a case, and changes with which a plan is possible, and fits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from foretrace.door import counted
from foretrace.simulator.job import Job
from foretrace.simulator.memory.ranks import fits, peak_bytes
from foretrace.simulator.memory.remedies import NOT_POSSIBLE, Remedy, changes

MOST_CHANGES: Final = 4
"""Changes that are made together before more GPUs are asked for."""

TIMES_GPUS: Final = (2, 4, 8)
"""How many times the GPUs are tried, as so many times the pipeline stages, or else replicas."""

MOST_TRIED: Final = 24
"""Values of one setting that are tried to find a way out of a mistake, the nearest first."""

LARGEST_DEGREE: Final = 64
"""Largest degree of an axis other than data parallelism that a slider offers; any other may be typed."""

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
    """Return what would make *job* fit: single changes; else several together, and more GPUs; else both."""
    limit = job.cluster.device.memory_bytes
    possible = list(_on_the_page(job))
    single = [_way(job, one.change, one) for one in possible if one.peak_bytes <= limit]
    return single or [*_together(job, possible), *_more_gpus(job)] or list(_both(job))


def _on_the_page(job: Job) -> Iterator[Remedy]:
    """Yield the changes that the page has controls for."""
    for one in changes(job):
        same = {name: getattr(one.job, name) for name in _SETTINGS} | {"layout": one.job.layout}
        # What changes anything else is left out: the page has no control for it.
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
    changed: dict[str, str] = {}
    for axis in _AXES:
        if (degree := getattr(end.job.layout, axis)) != getattr(job.layout, axis):
            changed[axis] = str(degree)
    for name in _SETTINGS:
        if (value := getattr(end.job, name)) != getattr(job, name):
            changed[name] = str(value)
    return Way(change=change, peak_bytes=end.peak_bytes, settings=changed)


def values_of(job: Job) -> dict[str, list[int]]:
    """Return the values that each whole-number setting may have beside the others of *job*, ascending."""
    layout, experts = job.layout, job.model.n_experts
    found = {"gpus": _around(layout.tp * layout.pp * layout.cp), "dp": _around(1)}
    most = {"tp": job.model.n_heads, "pp": job.model.n_layers, "cp": job.seq_len}
    for axis, limit in most.items():
        # Ranks that this axis and data parallelism have together.
        rest = layout.world_size // (layout.tp * layout.pp * layout.cp) * getattr(layout, axis)
        found[axis] = [
            n
            for n in range(1, min(limit, LARGEST_DEGREE) + 1)
            if rest % n == 0 and (axis != "tp" or limit % n == 0)
        ]
    spread = layout.dp * layout.cp * layout.tp
    found["ep"] = [n for n in range(1, (experts or 1) + 1) if (experts or 1) % n == 0 and spread % n == 0]
    found["global_batch"] = _around(layout.dp * job.micro_batch)
    share = job.global_batch // layout.dp
    found["micro_batch"] = [n for n in range(1, min(share, LARGEST_DEGREE) + 1) if share % n == 0]
    return found


def _around(unit: int) -> list[int]:
    """Return round multiples of *unit*.

    >>> _around(72)[:8]
    [72, 144, 216, 288, 432, 576, 864, 1152]
    """
    parts = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 72, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096]
    return [unit * part for part in parts]


def ways_out(
    given: Mapping[str, str],
    error: str,
    names: Mapping[str, Sequence[str]],
    possible: Callable[[Mapping[str, str]], object],
) -> list[dict[str, str]]:
    """Return single changes of settings that are not possible together, each of which makes them so.

    *error*: what is wrong with them; settings that it names are tried first. *possible*: raises one of
    ``NOT_POSSIBLE`` for what is not.
    """
    with suppress(*NOT_POSSIBLE):
        possible(given)
        return []  # the mistake is that of another plan
    tried: dict[str, list[str]] = {
        name: [one for one in known if one != given[name]] for name, known in names.items()
    }
    for name in (
        "tp",
        "pp",
        "cp",
        "ep",
        "expert_tp",
        "virtual_stages",
        "micro_batch",
        "global_batch",
        "gpus",
    ):
        tried[name] = _near(given[name])
    tried |= {name: [""] for name in ("price", "config") if given[name]}
    order = sorted(
        tried, key=lambda name: (name.replace("_", " ") not in error.replace("_", " "), name in names)
    )
    numbers = set(re.findall(r"\d+", error))
    found = []
    for name in order:
        # Numbers that the message names are tried first: it mostly says what would work.
        for value in sorted(tried[name][:MOST_TRIED], key=lambda one: one not in numbers):
            try:
                possible({**given, name: value})
            except NOT_POSSIBLE:
                continue
            found.append({name: value})
            if sum(name in one for one in found) == 2:
                break
    return found


def _near(text: str) -> list[str]:
    """Return values near that of a whole-number setting, halves and doubles first.

    >>> _near("16")[:6]
    ['8', '32', '4', '15', '17', '14']
    """
    value = counted(text)
    if not 0 < value < 10**9:
        return ["1", "8"]
    powers = [value // 2, value * 2, value // 4]
    steps = [value + sign * by for by in range(1, MOST_TRIED) for sign in (-1, 1)]
    return [str(one) for one in dict.fromkeys([*powers, *steps]) if one > 0]
