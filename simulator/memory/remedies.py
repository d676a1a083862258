"""Which single change of a job makes it fit into memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from foretrace.simulator.errors import SimulationError
from foretrace.simulator.job import RECOMPUTES, Job
from foretrace.simulator.memory.ranks import host_holds, peak_bytes, rank_memories
from foretrace.simulator.sharding import SHARDINGS
from foretrace.topologies.errors import TopologyError
from foretrace.traces.errors import TraceError

NOT_POSSIBLE: Final = (SimulationError, TopologyError, TraceError)


@dataclass(frozen=True, slots=True)
class Remedy:
    """One change, and the peak of the fullest rank with it.

    Attributes:
        change: the settings, e.g. ``"recompute=full"``; ``as_flags`` writes them for a command line.
        peak_bytes: peak memory of the fullest rank after the change.
        job: the job after the change.
    """

    change: str
    peak_bytes: int
    job: Job


def as_flags(change: str) -> str:
    """Return *change* as it is typed behind ``foretrace simulate``.

    >>> as_flags("recompute=full, recompute_every=2"), as_flags("sequence_parallel=true")
    ('--recompute full --recompute-every 2', '--sequence-parallel')
    >>> as_flags("pp=2 (dp=4)")
    '--pp 2 (dp 4)'
    """
    settings, _, rest = change.partition(" (")
    pairs = (setting.partition("=") for setting in settings.split(", "))
    words = [
        f"--{name.replace('_', '-')}{'' if value == 'true' else f' {value}'}" for name, _, value in pairs
    ]
    return " ".join(words) + (f" ({rest.replace('=', ' ')}" if rest else "")


def changes(job: Job) -> Iterator[Remedy]:
    """Yield every single change that needs less memory than *job*, those that cost least time first.

    More sharding, then less kept (selective, smaller micro-batches, full recomputation), then other layouts
    on the same GPUs, then the memory of the host. Changes that are not possible are left out.
    """
    before = peak_bytes(job)
    for change, other in _candidates(job):
        try:
            changed = replace(job, **other)
            ranks = rank_memories(changed)
        except NOT_POSSIBLE:
            continue
        after = max(rank.peak_bytes for rank in ranks)
        if after < before and host_holds(changed, ranks):
            yield Remedy(change, after, changed)


def _candidates(job: Job) -> Iterator[tuple[str, dict[str, Any]]]:
    if not job.sequence_parallel and job.layout.tp > 1:
        yield "sequence_parallel=true", {"sequence_parallel": True}
    if not job.flash_attention:
        yield "flash_attention=true", {"flash_attention": True}
    names = tuple(SHARDINGS)
    for sharding in names[names.index(job.sharding) + 1 :]:
        yield f"sharding={sharding}", {"sharding": sharding}
    kept = RECOMPUTES[RECOMPUTES.index(job.recompute) + 1 :]
    if "selective" in kept:
        yield "recompute=selective", {"recompute": "selective"}
    for micro_batch in range(job.micro_batch - 1, 0, -1):
        if job.global_batch % (job.layout.dp * micro_batch) == 0:
            yield f"micro_batch={micro_batch}", {"micro_batch": micro_batch}
    if "full" in kept:
        yield (
            "recompute=full, recompute_every=2",
            {
                "recompute": "full",
                "recompute_modules": "",
                "recompute_every": 2,
            },
        )
    if "full" in kept or (job.recompute == "full" and (job.recompute_layers or job.recompute_every > 1)):
        yield (
            "recompute=full",
            {
                "recompute": "full",
                "recompute_modules": "",
                "recompute_layers": 0,
                "recompute_every": 1,
            },
        )
    yield from _layouts(job)
    for offload in ("optimizer", "states", "activations", "all"):
        if offload != job.offload:
            yield f"offload={offload}", {"offload": offload}


def _layouts(job: Job) -> Iterator[tuple[str, dict[str, Any]]]:
    """Twice as much of one axis, and half as many replicas; experts over twice as many of the replicas."""
    ep = job.layout.ep * 2
    if job.model.n_experts and (job.layout.dp * job.layout.cp) % ep == 0:
        yield f"ep={ep}", {"layout": replace(job.layout, ep=ep)}
    for axis in ("tp", "pp", "cp"):
        degree = getattr(job.layout, axis) * 2
        if job.layout.dp % 2 or (axis == "tp" and degree > job.most_ranks_per_node):
            continue
        try:
            layout = replace(job.layout, **{axis: degree, "dp": job.layout.dp // 2})
        except NOT_POSSIBLE:
            continue
        yield f"{axis}={degree} (dp={layout.dp})", {"layout": layout}
