"""Fits ``training_clock_fraction`` of a device on published steps, with each source held out in turn.

    python benchmarks/fit_training_clock.py steps.csv --device h100-sxm

For every value of a grid the dense rows of the device are simulated, a few of each family, and the value is
taken whose mean over families of the median error is least, each source counting once. Then the same without
one source, whose own error is shown: a clock is a property of a device only if the sources agree on it.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Final

from simulator.compute.timing import ComputeModel
from simulator.errors import SimulationError
from simulator.validate.curve import curve_of
from simulator.validate.steps_job import StepJob, step_job
from simulator.validate.table import Row, read_table
from topologies.errors import TopologyError

GRID: Final = tuple(round(0.7 + 0.03 * step, 2) for step in range(17))
PER_FAMILY: Final = 4

Errors = dict[tuple[str, str], list[float]]
"""Signed log ratios by source and family."""


def main() -> None:
    """Print the best value, and what each source says of the value that the others choose."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table")
    parser.add_argument("--device", required=True)
    args = parser.parse_args()
    jobs = list(clock_jobs(read_table(args.table, ("id",)), args.device))
    found = {clock: errors_at(jobs, clock) for clock in GRID}
    sources = sorted({source for source, _ in found[1.0]})
    print(f"{args.device}: {len(jobs)} rows, {len(found[1.0])} families of {', '.join(sources)}")
    for clock, errors in found.items():
        print(f"  {clock:.2f}  score {mean_error(errors):.3f}  bias {mean_bias(errors):+.3f}")
    print(f"best: {best_clock(found, sources):.2f}")
    for left_out in sources if len(sources) > 1 else ():
        clock = best_clock(found, [source for source in sources if source != left_out])
        own = {key: ratios for key, ratios in found[clock].items() if key[0] == left_out}
        before = {key: ratios for key, ratios in found[1.0].items() if key[0] == left_out}
        print(
            f"  without {left_out}: {clock:.2f}; its score {mean_error(before):.3f} -> {mean_error(own):.3f}"
        )


def clock_jobs(
    rows: Iterable[Row], device: str, per_family: int = PER_FAMILY
) -> Iterable[tuple[Row, StepJob]]:
    """Yield dense rows of *device* that count in the score, *per_family* of each family."""
    taken: dict[tuple[str, str], int] = defaultdict(int)
    for row in rows:
        flags, key = row.text("check_flags"), family_key(row)
        counts = row.text("spec_level") in ("A", "A-") and "stress" not in flags and "slow" not in flags
        if not counts or row.integer("experts", 0) > 1 or taken[key] == per_family:
            continue
        try:
            step = step_job(row)
        except (SimulationError, TopologyError):
            continue
        if step.job.cluster.device.name == device:
            taken[key] += 1
            yield row, step


def family_key(row: Row) -> tuple[str, str]:
    names = ("model", "hardware", "precision")
    return row.text("source_group"), " ".join(row.text(name) for name in names)


def errors_at(jobs: Sequence[tuple[Row, StepJob]], clock: float) -> Errors:
    found: Errors = defaultdict(list)
    for row, step in jobs:
        device = replace(step.job.cluster.device, training_clock_fraction=clock)
        job = replace(step.job, cluster=replace(step.job.cluster, device=device))
        seconds = (
            step.share * curve_of(job, step.network, ComputeModel(device, job.precision), (1.0,)).step_s[0]
        )
        found[family_key(row)].append(math.log(seconds / row.number_in("step_time_s")))
    return found


def mean_error(errors: Mapping[tuple[str, str], Sequence[float]]) -> float:
    return fmean(median(map(abs, ratios)) for ratios in errors.values())


def mean_bias(errors: Mapping[tuple[str, str], Sequence[float]]) -> float:
    return fmean(median(ratios) for ratios in errors.values())


def best_clock(found: Mapping[float, Errors], sources: Sequence[str]) -> float:
    """Return the value with the least score, each source counting once."""

    def score(clock: float) -> float:
        own = [
            {key: ratios for key, ratios in found[clock].items() if key[0] == source} for source in sources
        ]
        return fmean(mean_error(errors) for errors in own)

    return min(found, key=score)


if __name__ == "__main__":
    main()
