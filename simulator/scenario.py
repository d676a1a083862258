"""What happens to the machine while a job runs: GPUs that throttle, links that change."""

from __future__ import annotations

from foretrace.simulator.engine.changes import SWITCHES, Change, Throttle
from foretrace.simulator.errors import JobError
from foretrace.simulator.job import Job
from foretrace.simulator.network.link_changes import link_changes
from foretrace.topologies.wiring import fabric


def changes_of(job: Job) -> list[Change | Throttle]:
    """Return what happens to links and GPUs while *job* runs.

    Raises:
        JobError: it happens to a rank that is not in the world, or to a switch that is not in the machine.
    """
    links, gpus = link_changes(job.variation.link_changes), job.variation.throttles
    ranks = {
        "link_changes": [change.way.rank for change in links if change.way.tier not in SWITCHES],
        "stragglers": [*job.variation.factors, *(throttle.rank for throttle in gpus)],
    }
    for name, found in ranks.items():
        if found and max(found) >= job.layout.world_size:
            raise JobError(f"{name}: rank {max(found)} is outside a world of {job.layout.world_size}")
    for change in links:
        if change.way.tier in SWITCHES:
            _check_switch(job, change)
    return [*links, *gpus]


def _check_switch(job: Job, change: Change) -> None:
    """Raise JobError unless the machine has that switch, with a way upward."""
    above = SWITCHES[SWITCHES.index(change.way.tier) :]
    graph, name = fabric(job.cluster), f"{change.way.tier}:{change.way.rank}"
    ups = graph.successors(name) if name in graph else iter(())
    if not any(up.partition(":")[0] in {*above[1:], "core"} for up in ups):
        raise JobError(
            f"link_changes: {job.cluster.name} has no {change.way.tier} {change.way.rank} with a way upward; "
            "foretrace topology draw shows its switches"
        )


def ranks_of(changes: list[Change | Throttle]) -> set[int]:
    """Return the ranks to which something happens."""
    ways = [change.way for change in changes if isinstance(change, Change)]
    gpus = {change.rank for change in changes if isinstance(change, Throttle)}
    return gpus | {way.rank for way in ways if way.tier not in SWITCHES}
