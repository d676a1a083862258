"""The rehearsals of all tests are acted out by one process that has loaded torch: each then takes a second.

It has the environment in which the suite was started. What one rehearsal leaves to the next is
tested in ``tests/tracer/test_rehearse_acting.py``: nothing.
"""

import atexit
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretrace.tracer.rehearse import rehearsing
from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.tracer.rehearse.world.acting import Loaded
from foretrace.traces.batch import batch_in
from foretrace.traces.rehearsal import Rehearsal

LOADED = Loaded()
"""Starts when it is first needed, and ends with the process that runs the tests."""

atexit.register(LOADED.end, at_once=True)


def in_steps(memory: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the memory of rehearsed ranks without what depends on what came before the kept steps."""
    before = {"building_bytes", "reserved_bytes"}
    return {rank: {key: one[key] for key in one if key not in before} for rank, one in memory.items()}


def rehearse(asked: Asked, output: Path) -> Rehearsal:
    """Rehearse what is *asked* into *output*, as ``tracer.rehearse.rehearsing.rehearse`` does."""
    return rehearsing.rehearse(asked, output, on=LOADED)


def rows_and_tokens(found: Rehearsal) -> tuple[int | None, int | None]:
    """Return the rows and the tokens of a step over all ranks, None for what is unknown."""
    batch = batch_in(found.job)
    return batch.rows, batch.tokens
