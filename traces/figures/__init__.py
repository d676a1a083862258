"""Plotly figures of runs, for notebooks and documents, in the colours of the report.

A figure is drawn from a few thousand marks at most, past which plotly takes seconds per zoom. Timelines that
are longer belong into a report, which has no such limit.
"""

from foretrace.traces.figures.comparisons import accuracy, compare, operations, pareto
from foretrace.traces.figures.timelines import (
    breakdown,
    critical_path,
    history,
    lanes,
    links,
    memory,
    overlap,
    overview,
    schedule,
)

__all__ = [
    "accuracy", "breakdown", "compare", "critical_path", "history", "lanes", "links", "memory", "operations",
    "overlap", "overview", "pareto", "schedule",
]  # fmt: skip
