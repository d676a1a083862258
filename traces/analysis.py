"""Everything that is known about where the time of a run goes, as one JSON object."""

from __future__ import annotations

from typing import Any, Final

from traces.collectives import bandwidths
from traces.compare import typical_step
from traces.critical_path import critical_path
from traces.errors import RunError
from traces.findings import findings
from traces.gaps import gaps
from traces.kernels import kernel_groups
from traces.run import Run
from traces.stragglers import stragglers
from traces.whatif import what_if

MOST_ROWS: Final = 20
"""Rows of each table that are given: the rest is in the Python API."""


def analysis(run: Run, usd_per_gpu_hour: float | None = None) -> dict[str, Any]:
    """Return findings and the tables behind them.

    Keys:
        findings: what the run loses, in words, dearest first.
        collectives: bandwidths by kind, axis and size.
        stragglers: who makes whom wait.
        gaps: why devices were idle.
        kernels: compute by group.
        critical_path: of the step of median length: length, and what it is made of.
        what_if: slowdowns of a pipeline run; null where it cannot be played again.

    Args:
        run: an open run.
        usd_per_gpu_hour: price of one GPU, for costs in money.
    """
    step, step_ns = typical_step(run)
    path = critical_path(run, step)
    return {
        "findings": [one.to_dict() for one in findings(run, usd_per_gpu_hour)],
        "collectives": bandwidths(run)[:MOST_ROWS],
        "stragglers": [one.to_dict() for one in stragglers(run)[:MOST_ROWS]],
        "gaps": gaps(run)[:MOST_ROWS],
        "kernels": kernel_groups(run)[:MOST_ROWS],
        "critical_path": {
            "step": step,
            "length_s": path.length_ns / 1e9,
            "step_time_s": step_ns / 1e9,
            "by_kind_s": {kind: ns / 1e9 for kind, ns in path.by_kind().items()},
            "by_rank_s": {str(rank): ns / 1e9 for rank, ns in path.by_rank().items()},
        },
        "what_if": _what_if(run),
    }


def _what_if(run: Run) -> dict[str, Any] | None:
    try:
        return what_if(run).to_dict()
    except RunError:
        return None
