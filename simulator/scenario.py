"""What happens to the machine while a job runs: GPUs that throttle, links that change."""

from __future__ import annotations

from simulator.engine.changes import Change, Throttle
from simulator.errors import JobError
from simulator.job import Job
from simulator.link_changes import link_changes


def changes_of(job: Job) -> list[Change | Throttle]:
    """Return what happens to links and GPUs while *job* runs.

    Raises:
        JobError: it happens to a rank that is not in the world.
    """
    links, gpus = link_changes(job.variation.link_changes), job.variation.throttles
    ranks = {
        "link_changes": [change.way.rank for change in links],
        "stragglers": [*job.variation.factors, *(throttle.rank for throttle in gpus)],
    }
    for name, found in ranks.items():
        if found and max(found) >= job.layout.world_size:
            raise JobError(f"{name}: rank {max(found)} is outside a world of {job.layout.world_size}")
    return [*links, *gpus]


def ranks_of(changes: list[Change | Throttle]) -> set[int]:
    """Return the ranks to which something happens."""
    return {change.way.rank if isinstance(change, Change) else change.rank for change in changes}
