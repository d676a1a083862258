"""``foretrace validate steps``: predicted against measured times of a training step."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from foretrace.simulator.engine import require_numba
from foretrace.simulator.errors import TableError
from foretrace.simulator.validate.choices import choices
from foretrace.simulator.validate.one_run import calibrated
from foretrace.simulator.validate.scores import Failed, Validation
from foretrace.simulator.validate.steps_run import Step, run_rows
from foretrace.simulator.validate.steps_scores import is_main, sections
from foretrace.simulator.validate.table import read_table

COLUMNS: Final = ("id", "model", "hardware", "world_size", "tp", "pp", "dp", "seq_len", "step_time_s")
CALIBRATIONS: Final = ("one-run",)


def validate_steps(
    table: str | Path,
    *,
    calibrate: str | None = None,
    workers: int | None = None,
    tell: Callable[[int, int], None] = lambda *_: None,
) -> Validation:
    """Return the step time of every row of *table*, predicted and measured, in s.

    The rows of the validation, and so its score, are those of level A and A- that are flagged neither as
    stress nor as slow. Everything else is scored beside it, in ``extra``. Rows that cannot be simulated are
    failures whatever their level.

    Args:
        table: CSV or Parquet, with the columns that docs/accuracy.md lists.
        calibrate: ``"one-run"``: also fit two factors per cluster on one of its rows, and score the others;
            and the same for every machine, every model on a machine, and every release of its software.
        workers: processes; as many as there are processors if left out.
        tell: told how many rows more are done, and of how many.

    Raises:
        TableError: the table cannot be read or lacks a column, or *calibrate* is unknown.
        EngineError: numba is not installed.
    """
    if calibrate is not None and calibrate not in CALIBRATIONS:
        raise TableError(f"calibrate={calibrate!r}: one of {', '.join(CALIBRATIONS)}")
    require_numba("validating steps")
    rows = read_table(table, COLUMNS)
    found = run_rows(rows, workers or os.cpu_count() or 1, lambda done: tell(done, len(rows)))
    steps = [one for one in found if isinstance(one, Step)]
    main = [step for step in steps if is_main(step)]
    extra = {"rows": len(rows), **sections(steps), **choices(main)}
    if calibrate:
        extra |= calibrated(main)
    return Validation(
        kind="steps",
        table=str(table),
        unit="s",
        rows=[step.scored for step in main],
        failures=[one for one in found if isinstance(one, Failed)],
        extra=extra,
    )
