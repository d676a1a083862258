"""How full the links of a simulated run were: one line per way, one column per slice of time."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from foretrace.traces.columns import int64, labels
from foretrace.traces.pack import Pack
from foretrace.traces.report.run import View
from foretrace.traces.run import Run

BINS: Final = 600  # slices of the step
MOST_LINES: Final = 192  # ways in the picture; of more, the fullest of each neighbourhood is shown
FULL: Final = 250  # value of a pixel whose link is full

TIERS: Final = {
    "near": "inside the node",
    "far": "out of the node",
    "leaf": "from leaf switches upward",
    "spine": "from spine switches upward",
}
"""What the tiers of ``links.arrow`` are called."""


def tiers_of(lines: Sequence[tuple[str, int, str]]) -> list[str]:
    """Return the tiers of *lines*, from inside the node outward."""
    found = dict.fromkeys(line[0] for line in lines)
    return [*(tier for tier in TIERS if tier in found), *(tier for tier in found if tier not in TIERS)]


def way_name(tier: str, number: int, direction: str) -> str:
    """Return what a way is called: that of a rank, or of a switch upward.

    >>> way_name("far", 3, "out"), way_name("leaf", 3, "in")
    ('rank 3 out', 'leaf 3 down')
    """
    if tier in ("near", "far"):
        return f"rank {number} {direction}"
    return f"{tier} {number} {'down' if direction == 'in' else 'up'}"


def links_of(run: Run) -> pa.Table | None:
    """Return the utilisation of links that was stored with *run*, in ``LINKS``; None if there is none."""
    return run.links if run.links is not None and run.links.num_rows else None


def links_entry(view: View, pack: Pack, key: str) -> dict[str, Any] | None:
    """Return the picture of the links in the step shown first, None if the run holds none.

    The pixels, ``<key>.links`` of shape ``(n_lines * BINS,)``, are the mean share of a link in use, times
    ``FULL``.
    """
    table = links_of(view.run)
    if table is None:
        return None
    step = view.steps[view.default_step]
    used, lines = utilisation(table, view.origin_ns(step), view.length_ns(step))
    slow = narrow(table, view.origin_ns(step), view.length_ns(step))
    groups: list[dict[str, Any]] = []
    pixels = []
    for tier in tiers_of(lines):
        rows = [row for row, line in enumerate(lines) if line[0] == tier]
        # Rounded up, so that no more lines are left than fit.
        every = -(-len(rows) // MOST_LINES)
        for first in range(0, len(rows), every):
            near = rows[first : first + every]
            pixels.append(used[near].max(axis=0))
        shown = len(pixels) - sum(group["n_lines"] for group in groups)
        mean, high = used[rows].mean(axis=1), np.quantile(used[rows], 0.99, axis=1)
        fullest = int(mean.argmax())
        groups.append(
            {
                "label": TIERS.get(tier, tier),
                "n_lines": shown,
                "n_ways": len(rows),
                "mean": float(mean.mean()),
                "fullest": {"name": way_name(*lines[rows[fullest]]), "mean": float(mean[fullest])},
                "high": float(high.max()),
                "names": [way_name(*lines[row]) for row in rows[::every]],
                "narrow": [
                    {"row": at // every, "from_ns": from_ns, "to_ns": to_ns, "left": left}
                    for at, row in enumerate(rows)
                    for from_ns, to_ns, left in slow.get(lines[row], ())
                ],
            }
        )
    pack.add(f"{key}.links", np.rint(np.concatenate(pixels).clip(0, 1) * FULL).astype(np.uint8))
    return {"bins": BINS, "full": FULL, "groups": groups}


def narrow(
    table: pa.Table, origin_ns: int, length_ns: int
) -> dict[tuple[str, int, str], list[tuple[int, int, float]]]:
    """Return when in a step a way had less than its width: from, to (ns into the step), and the share left.

    Args:
        table: in the columns of ``LINKS``.
        origin_ns: start of the step.
        length_ns: its length.
    """
    said = json.loads((table.schema.metadata or {}).get(b"changes", b"[]"))
    by_way: dict[tuple[str, int, str], list[tuple[int, float]]] = defaultdict(list)
    for change in said:
        way = (change["tier"], change["rank"], change["direction"])
        by_way[way].append((change["at_ns"] - origin_ns, change["capacity"]))
    found = {}
    for way, changes in by_way.items():
        changes.sort(key=lambda change: change[0])  # of two at once the later one counts
        ends = [*(at_ns for at_ns, _ in changes[1:]), length_ns]
        spans = [
            (max(at_ns, 0), min(to_ns, length_ns), left)
            for (at_ns, left), to_ns in zip(changes, ends, strict=True)
        ]
        found[way] = [span for span in spans if span[2] < 1 and span[0] < span[1]]
    return found


def utilisation(
    table: pa.Table, origin_ns: int, length_ns: int
) -> tuple[NDArray[np.float64], list[tuple[str, int, str]]]:
    """Return the mean share of each way in use in each slice of a step, and which way each line is.

    Args:
        table: in the columns of ``LINKS``.
        origin_ns: start of the step.
        length_ns: its length.

    Returns:
        Shares, shape ``(n_lines, BINS)``; tier, rank and direction of each line, by tier and rank.
    """
    tier, tiers = labels(table, "tier")
    direction, directions = labels(table, "direction")
    rank = int64(table, "rank")
    start, end = int64(table, "start_ns") - origin_ns, int64(table, "end_ns") - origin_ns
    share = table["used"].to_numpy()
    said = ([tiers[code] for code in tier], rank.tolist(), [directions[code] for code in direction])
    keys = sorted(set(zip(*said, strict=True)))
    edges = np.linspace(0, length_ns, BINS + 1)
    used = np.zeros((len(keys), BINS))
    for line, (name, of_rank, way) in enumerate(keys):
        ours = (tier == tiers.index(name)) & (rank == of_rank) & (direction == directions.index(way))
        order = np.flatnonzero(ours)[np.argsort(start[ours], kind="stable")]
        points = np.stack([start[order], end[order]], axis=1).reshape(-1)
        # The integral of what is in use, at both ends of each span. Its differences lose nothing between
        # slices.
        busy = np.cumsum(np.stack([np.zeros(len(order)), (end - start)[order] * share[order]], axis=1))
        used[line] = np.diff(np.interp(edges, points, busy)) / (length_ns / BINS)
    return used, keys
