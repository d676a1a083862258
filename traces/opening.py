"""How the verbs open a run: one that is finished has to be whole, unless the user says otherwise."""

from __future__ import annotations

from foretrace.traces.errors import RunError
from foretrace.traces.info import rank_list
from foretrace.traces.run import Run
from foretrace.traces.store import open_run


def open_whole(path: str, *, partial: bool) -> Run:
    """Open the run at *path*; refuse a finished one that lacks ranks, unless *partial*.

    A recording that was killed or still goes on, and a trace of another tool, may lack ranks: it is read with
    a warning, for what was recorded is never lost. A run that was finished has lost files since.

    Raises:
        RunError: the run cannot be read, or is not whole.
    """
    run = open_run(path)
    was_whole = run.info.origin == "simulated" or (run.info.origin == "recorded" and run.info.finished)
    lost = set(run.missing_ranks) & set(run.info.recorded_ranks)
    if lost and was_whole and not partial:
        raise RunError(
            f"{path} is finished but has no spans of rank {rank_list(lost)} of "
            f"{run.info.world_size}: files are missing; copy them, or read the other ranks with --partial"
        )
    return run
