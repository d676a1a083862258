"""A log of the rates at which communications progress, kept while compiled code runs."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from foretrace.simulator.engine.fair import Floats
from foretrace.simulator.engine.jit import jit
from foretrace.simulator.program import Int64Array

Log = list[tuple[int, int, float]]
"""Entries of time in ns, number of a communication, and the rate that it has from then on."""

Rates = tuple[Int64Array, Int64Array, Floats]
"""The columns of a ``Log``."""


def empty_log() -> Log:
    """Return a log without entries, of the right type."""
    log = [(int(np.int64(0)), int(np.int64(0)), 0.0)]
    log.pop()
    return log


def note_rates(now: int, jobs: tuple[Int64Array, Int64Array], rate: Floats, noted: Floats, log: Log) -> None:
    """Add the jobs under way whose rate is not the one *noted* last to *log*, and those that have arrived."""
    active, arrived = jobs
    for job in arrived:
        log.append((now, job, 0.0))
    for job in active:
        if rate[job] != noted[job]:
            noted[job] = rate[job]
            log.append((now, job, rate[job]))


def as_columns(log: Log) -> Rates:
    """Return the columns of a *log*."""
    at_ns, job, rate = np.empty(len(log), np.int64), np.empty(len(log), np.int64), np.empty(len(log))
    for row, (when, which, what) in enumerate(log):
        at_ns[row], job[row], rate[row] = when, which, what
    return at_ns, job, rate


no_rates: Final[Any] = jit(empty_log)
"""``empty_log``, compiled."""
note: Final[Any] = jit(note_rates)
"""``note_rates``, compiled."""
columns: Final[Any] = jit(as_columns)
"""``as_columns``, compiled."""
