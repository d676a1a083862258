"""Plotly figures of runs, for notebooks and documents, in the colours of the report.

A figure is drawn from a few thousand marks at most, past which plotly takes seconds per zoom. Timelines that
are longer belong into a report, which has no such limit.
"""

from traces.figures.communication import links, overlap
from traces.figures.comparisons import accuracy, compare
from traces.figures.sweeps import pareto
from traces.figures.timelines import breakdown, memory, schedule

__all__ = ["accuracy", "breakdown", "compare", "links", "memory", "overlap", "pareto", "schedule"]
