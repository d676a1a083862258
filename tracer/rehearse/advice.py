"""What a rehearsal has seen that a person may want to change: findings with figures, if certain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Final

import numpy as np

from foretrace.traces.columns import int64
from foretrace.traces.layout import Group
from foretrace.traces.rehearsal import WHAT, RankTables
from foretrace.traces.report.format import format_share

LEAST_PADDING: Final = 0.1
"""Share of padding in what FSDP gathers from which it is said."""

LEAST_RATIO: Final = 1.2
"""FLOPs of a stage, as a multiple of those of the others, from which they are said."""

Finding = dict[str, Any]
"""``finding`` names it, ``words`` say it, further keys have its figures."""


def findings(
    outcomes: Mapping[int, Mapping[str, Any]], tables: Mapping[int, RankTables], groups: Sequence[Group]
) -> list[Finding]:
    """Return what is certain of the rehearsed ranks."""
    flops = {rank: _flops(one) for rank, one in tables.items()}
    found = [*_padding(outcomes), *_stages(flops, groups), *_idle(flops)]
    for one in outcomes.values():
        found += [finding for finding in map(_uneven, one["uneven"]) if finding not in found]
    return found


def _padding(outcomes: Mapping[int, Mapping[str, Any]]) -> list[Finding]:
    """Return the finding of the rank that pads most, if it pads much."""
    shares = {rank: one["gathered"][1] / max(one["gathered"][0], 1) for rank, one in outcomes.items()}
    rank = max(shares, key=lambda one: shares[one])
    if shares[rank] < LEAST_PADDING:
        return []
    pads = format_share(shares[rank], ".0f")
    words = (
        f"FSDP pads {pads} of what it gathers: dimensions of parameters are rounded up "
        "to a multiple of the ranks that they are cut over; cut them over fewer ranks, or along another one"
    )
    return [{"finding": "padding", "share": shares[rank], "rank": rank, "words": words}]


def _stages(flops: Mapping[int, int], groups: Sequence[Group]) -> list[Finding]:
    """Return the finding of a pipeline, all of whose ranks were rehearsed, with a rank that does most."""
    pipelines = {group.ranks for group in groups if group.axis == "pp" and {*group.ranks} <= flops.keys()}
    for ranks in sorted(pipelines, key=len, reverse=True):
        most = max(ranks, key=lambda rank: flops[rank])
        others = median(flops[rank] for rank in ranks if rank != most) if len(ranks) > 1 else 0
        if not others or flops[most] < LEAST_RATIO * others:
            continue
        ratio, at = flops[most] / others, ranks.index(most)
        name = {0: "the first stage", len(ranks) - 1: "the last stage"}.get(at, f"stage {at}")
        other = "the other" if len(ranks) == 2 else "the others"
        words = f"{name} (rank {most}) has {ratio:.1f} times the FLOPs of {other}, which wait for it"
        return [{"finding": "stages", "ratio": ratio, "rank": most, "words": words}]
    return []


def _idle(flops: Mapping[int, int]) -> list[Finding]:
    """Return the finding of ranks that compute no products while others do."""
    idle = [rank for rank, n in flops.items() if not n]
    if not idle or len(idle) == len(flops):
        return []
    listed = ", ".join(map(str, idle))
    words = f"rank {listed} computes no matrix product in the kept steps, while others do"
    return [{"finding": "idle", "ranks": idle, "words": words}]


def _uneven(found: Mapping[str, Any]) -> Finding:
    """Return the finding of a loader, as ``loaders.uneven_of`` tells it."""
    parts = []
    if found["repeated"]:
        parts.append(f"the sampler repeats {found['repeated']:,} rows so that all ranks have as many")
    if found["last"]:
        kept = "is dropped" if found["is_dropped"] else "is shorter than others"
        of = f"{found['last']:,} of {found['batch_size']:,} rows"
        parts.append(f"the last batch of a rank has {of} and {kept}")
    words = f"{found['rows']:,} rows are not divisible: {'; '.join(parts)}"
    return {"finding": "rows", **found, "words": words}


def _flops(tables: RankTables) -> int:
    """Return the FLOPs of a rank in all events that are kept of passes that train."""
    trains = np.array(tables.places["trains"].to_pylist(), np.bool_)
    is_own = int64(tables.events, "what") == WHAT.index("op")
    is_own &= trains[int64(tables.events, "place")]
    weights = np.array(tables.works["flops"].to_pylist(), np.float64)
    return int(weights[int64(tables.events, "item")[is_own]].sum()) if len(weights) else 0
