"""What if: the same search on links half as fast, or with twice the batch, and what becomes of the winner."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from foretrace.simulator.errors import SimulationError
from foretrace.simulator.job import Job
from foretrace.simulator.search.found import Found, Ranked, Timed, order_of, summarised
from foretrace.simulator.search.space import Space
from foretrace.topologies.cluster import Cluster

SLOWER = 2.0
"""Times as long as bytes take on the wire where links are half as fast."""


def half_as_fast(cluster: Cluster) -> Cluster:
    """Return *cluster* with links on which every byte takes twice as long; latencies stay."""
    factors = dict(cluster.transfer_factors)
    for link in ("near", "far"):
        mine = {
            key: value
            for key, value in factors.items()
            if key.startswith(f"{link}.") and key.endswith(".wire")
        }
        factors |= {key: value * SLOWER for key, value in mine.items()}
        # Kinds that no calibration names are slower too.
        factors.setdefault(f"{link}.others.wire", SLOWER)
    return replace(cluster, transfer_factors=factors)


def scenarios(spaces: Sequence[Space]) -> Iterator[tuple[str, list[Space], Callable[[Job], Job]]]:
    """Yield each what-if in words, its spaces, and what it makes of a job."""
    yield (
        "links were half as fast",
        [replace(space, cluster=half_as_fast(space.cluster)) for space in spaces],
        lambda job: replace(job, cluster=half_as_fast(job.cluster)),
    )
    yield (
        "the batch were doubled",
        [replace(space, global_batch=2 * space.global_batch) for space in spaces],
        lambda job: replace(job, global_batch=2 * job.global_batch),
    )


def answers(
    spaces: Sequence[Space],
    winner: Ranked,
    search: Callable[[Sequence[Space]], Found],
    describe: Callable[[Ranked], dict[str, Any]],
) -> list[dict[str, Any]]:
    """Return what each what-if comes to."""
    found = []
    for what, others, changed in scenarios(spaces):
        best = search(others).best
        if not best:
            continue
        kept = _kept(changed(winner.job))
        same = kept is not None and order_of(kept.job) == order_of(best[0].job)
        found.append(
            {
                "what": what,
                "same": same,
                "best": describe(best[0]),
                "kept": None if kept is None else describe(kept),
            }
        )
    return found


def _kept(job: Job) -> Ranked | None:
    """Return the old winner under new circumstances; None where it cannot run."""
    try:
        return summarised([Timed(job=job, cost=0.0)])[0]
    except SimulationError:
        return None
