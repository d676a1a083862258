"""Fits ``training_clock_fraction`` of a device on published steps, with each source held out in turn.

    python benchmarks/fit_training_clock.py steps.csv --device h100-sxm

Dense rows of the device, a few of each family, are simulated at five clocks. Between two the logarithm of
the step is a straight line over that of the clock: 0.4 % off at most, where the host sets the pace. Of a
grid of clocks the one is taken whose mean over families of the median error is least, each source counting
once. Then the same without one source, whose own error is shown: a clock is a property of a device only if
the sources agree on it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Final

import numpy as np
from fitting import Floats
from measured.jobs import step_job
from measured.judge import evenly
from measured.machines import device_of
from measured.table import Row, read_table
from published import (
    Errors,
    Family,
    bias,
    by_source,
    counted,
    family,
    log_ratio,
    score,
    table_parser,
    together,
)

from foretrace.simulator.errors import TableError

SIMULATED: Final = (0.72, 0.79, 0.86, 0.93, 1.0)
"""Shares of the boost clock at which every row is simulated; errors between them are interpolated."""

GRID: Final = tuple(round(0.72 + 0.01 * step, 2) for step in range(29))
"""Shares of the boost clock that are compared."""

PER_FAMILY: Final = 4
"""Rows of each family that are simulated, evenly over their times."""


def main() -> None:
    """Print the best value, and what each source says of the value that the others choose."""
    parser = table_parser(__doc__)
    parser.add_argument("--device", required=True)
    args = parser.parse_args()
    rows = dense_rows(read_table(args.table, ("id",)), args.device, PER_FAMILY)
    found = at_clocks(rows, args.workers, args.device)
    sources = sorted(by_source(found[1.0]))
    print(f"{args.device}: {len(rows)} rows, {len(found[1.0])} families of {', '.join(sources)}")
    for clock, errors in found.items():
        print(f"  {clock:.2f}  score {score(errors):.3f}  bias {bias(errors):+.3f}")
    print(f"best: {best_clock(found, sources):.2f}")
    for left_out in sources if len(sources) > 1 else ():
        clock = best_clock(found, [source for source in sources if source != left_out])
        before, after = (score(by_source(found[at])[left_out]) for at in (1.0, clock))
        print(f"  without {left_out}: {clock:.2f}; its score {before:.3f} -> {after:.3f}")


def dense_rows(rows: Iterable[Row], device: str, per_family: int) -> list[Row]:
    """Return rows of *device* without experts that count in the score, *per_family* of each family."""
    families = counted(row for row in rows if row.integer("experts", 0) <= 1 and _is_on(row, device))
    return [row for own in families.values() for row in evenly(own, per_family)]


def _is_on(row: Row, device: str) -> bool:
    try:
        return device_of(row.text("hardware")).name == device
    except TableError:
        return False


def at_clocks(rows: Iterable[Row], workers: int, what: str) -> dict[float, Errors]:
    """Return the errors of *rows* at each clock of ``GRID``, with a bar that says *what*."""
    found: dict[float, dict[Family, list[float]]] = {clock: defaultdict(list) for clock in GRID}
    for name, ratios in together(_ratios, rows, workers, what):
        for clock, ratio in zip(GRID, ratios, strict=True):
            found[clock][name].append(float(ratio))
    return dict(found)


def _ratios(row: Row) -> tuple[Family, Floats]:
    """Return the family of *row*, and its signed log ratio at each clock of ``GRID``."""
    step, found = step_job(row), []
    for clock in SIMULATED:
        device = replace(step.job.cluster.device, training_clock_fraction=clock)
        job = replace(step.job, cluster=replace(step.job.cluster, device=device))
        found.append(log_ratio(row, replace(step, job=job)))
    return family(row), np.interp(np.log(GRID), np.log(SIMULATED), found)


def best_clock(found: Mapping[float, Errors], sources: Sequence[str]) -> float:
    """Return the value with the least score of *sources*, each counting once."""
    scores = {
        clock: {name: score(own) for name, own in by_source(one).items()} for clock, one in found.items()
    }
    return min(scores, key=lambda clock: fmean(scores[clock][source] for source in sources))


if __name__ == "__main__":
    main()
