"""Everything that is known about where the time of a run goes, as one JSON object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, Final

from foretrace.traces.analysis.collectives import bandwidths, stragglers
from foretrace.traces.analysis.critical_path import critical_path
from foretrace.traces.analysis.device_time import held_memory, launches
from foretrace.traces.analysis.findings import findings
from foretrace.traces.analysis.gaps import gaps, gaps_on_path
from foretrace.traces.analysis.kernels import kernel_groups, kernels
from foretrace.traces.analysis.metrics import typical_step
from foretrace.traces.analysis.roots import roots
from foretrace.traces.errors import RunError
from foretrace.traces.replay.whatif import what_if
from foretrace.traces.run import Run

WHAT_IF: Final[Mapping[str, float]] = MappingProxyType({"half": 0.5, "none": 0.0})
"""How many times as long a kind of work takes in the questions that are asked of the critical path."""

MOST_ROWS: Final = 20  # rows of each table that are given: the rest is in the Python API


def analysis(
    run: Run, usd_per_gpu_hour: float | None = None, *, limit_bytes_per_s: float | None = None
) -> dict[str, Any]:
    """Return findings and the tables behind them.

    Keys:
        findings: what the run loses, in words, dearest first.
        collectives: bandwidths by kind, axis and size.
        stragglers: who comes last, and makes others wait.
        roots: whose own work is at the root of that: who comes last may have waited itself.
        gaps: why devices were idle.
        kernels: compute by group.
        kernel_table: compute by name: times, calls, what it reached against the device; copies: the same.
        launches: by rank how the host launches, if the trace tells: how many, how long each takes, how long
            until it starts, and how many wait in the queue, on average over time and at most.
        memory: by rank the most that its device held and reserved, when, and what it has.
        critical_path: for the step of median length: length, what it is made of, and by kind how long it
            would be if that took half the time or none; the step cannot become shorter than that; by cause
            what of its gaps the trace explains.
        what_if: slowdowns of a pipeline run; null where it cannot be played again.

    Args:
        run: an open run.
        usd_per_gpu_hour: price of one GPU, for costs in money.
        limit_bytes_per_s: bus bandwidth that the links allow, if the run does not describe them.
    """
    said = findings(run, usd_per_gpu_hour, limit_bytes_per_s=limit_bytes_per_s)
    step, step_ns = typical_step(run)
    path = critical_path(run, step)
    by_kind, length_ns = path.by_kind(), path.length_ns
    return {
        "findings": [asdict(one) for one in said],
        "collectives": bandwidths(run, averaged=True, limit_bytes_per_s=limit_bytes_per_s)[:MOST_ROWS],
        "stragglers": [asdict(one) for one in stragglers(run)[:MOST_ROWS]],
        "roots": [one.to_dict() for one in roots(run)[:MOST_ROWS]],
        "gaps": gaps(run)[:MOST_ROWS],
        "kernels": kernel_groups(run)[:MOST_ROWS],
        "kernel_table": kernels(run, copies=False)[:MOST_ROWS],
        "copies": kernels(run, copies=True)[:MOST_ROWS],
        "launches": launches(run),
        "memory": held_memory(run)[:MOST_ROWS],
        "critical_path": {
            "step": step,
            "length_s": length_ns / 1e9,
            "step_time_s": step_ns / 1e9,
            "by_kind_s": {kind: ns / 1e9 for kind, ns in by_kind.items()},
            "gaps_s": {cause: ns / 1e9 for cause, ns in gaps_on_path(run, path).items()},
            "what_if_s": {
                kind: {name: (length_ns + ns * (factor - 1)) / 1e9 for name, factor in WHAT_IF.items()}
                for kind, ns in list(by_kind.items())[:MOST_ROWS]
            },
            "by_rank_s": {str(rank): ns / 1e9 for rank, ns in path.by_rank().items()},
        },
        "what_if": _what_if(run),
    }


def _what_if(run: Run) -> dict[str, Any] | None:
    try:
        return asdict(what_if(run))
    except RunError:
        return None
