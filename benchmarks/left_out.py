"""Checks every constant that was fitted on steps without the source that it is then judged on.

    python benchmarks/left_out.py steps.csv

Clocks of training: for each GPU that several sources measured, each source in turn has no part in the choice
of the clock. Time of the host in nanotron, which one source measured: chosen on one of its models, and judged
on the other. Writes the table of docs/accuracy.md.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from statistics import median
from typing import Final

from accuracy import PAGE, replaced
from fit_training_clock import Errors, best_clock, clock_jobs, errors_at, mean_error

from simulator.compute.timing import ComputeModel
from simulator.validate.curve import curve_of
from simulator.validate.steps_job import StepJob, step_job
from simulator.validate.table import Row, read_table
from topologies.catalog import load_device

DEVICES: Final = ("a100-80gb", "h100-sxm", "gb200")
"""GPUs whose clock in training several sources have a say in."""

CLOCKS: Final = (0.76, 0.79, 0.82, 0.85, 0.88, 0.91, 0.94)
HOST_WORK: Final = (1.8, 2.1, 2.4)
PER_TENSOR_RANK: Final = (0.35, 0.5, 0.65)
NANOTRON_ROWS: Final = 20
"""Rows of each model that stand for all, evenly over the table."""

PER_FAMILY: Final = 2
"""Rows of each family that stand for it."""

HEAD: Final = ("judged on", "constant", "in use", "error", "chosen without it", "error then")


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table")
    rows = read_table(parser.parse_args().table, ("id",))
    found = [line for device in DEVICES for line in _clocks(rows, device)] + list(_hosts(rows))
    lines = ["| " + " | ".join(cells) + " |" for cells in (HEAD, tuple("---" for _ in HEAD), *found)]
    PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), "left-out", lines), encoding="utf-8")


def _clocks(rows: Sequence[Row], device: str) -> Iterator[tuple[str, ...]]:
    """Yield a line for each source of *device*: its error with the clock in use, and with that of others."""
    jobs, used = list(clock_jobs(rows, device, PER_FAMILY)), load_device(device).training_clock_fraction
    found = {clock: errors_at(jobs, clock) for clock in sorted({*CLOCKS, used})}
    sources = sorted({source for source, _ in found[used]})
    for source in sources:
        others = best_clock(found, [other for other in sources if other != source])
        now, then = (_percent(mean_error(_of(found[clock], source))) for clock in (used, others))
        yield source, f"clock of {device}", f"{used:.2f}", now, f"{others:.2f}", then


def _of(errors: Errors, source: str) -> Errors:
    return {key: ratios for key, ratios in errors.items() if key[0] == source}


def _hosts(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Yield a line for each model that nanotron ran: its error, and with what the other one chooses."""
    models = {name: _of_model(rows, name) for name in ("nanotron-1B", "nanotron-8B")}
    found = {
        (work, rank): {name: _host_error(jobs, work, rank) for name, jobs in models.items()}
        for work, rank in product(HOST_WORK, PER_TENSOR_RANK)
    }
    used = models["nanotron-1B"][0][1].job.profile
    for name, other in (("nanotron-1B", "nanotron-8B"), ("nanotron-8B", "nanotron-1B")):
        work, rank = min(found, key=lambda pair: found[pair][other])
        now = _percent(found[used.host_work, used.host_per_tensor_rank][name])
        words = f"{used.host_work:g}, {used.host_per_tensor_rank:g}"
        then = _percent(found[work, rank][name])
        yield name, "host of nanotron, and per TP rank", words, now, f"{work:g}, {rank:g}", then


def _of_model(rows: Sequence[Row], name: str) -> list[tuple[Row, StepJob]]:
    """Return some rows of *name* that count in the score, evenly over the table."""
    own = [row for row in rows if row.text("model") == name and not row.text("check_flags")]
    own = [row for row in own if row.text("spec_level") in ("A", "A-")]
    return [(row, step_job(row)) for row in own[:: max(1, len(own) // NANOTRON_ROWS)]]


def _host_error(jobs: Sequence[tuple[Row, StepJob]], work: float, rank: float) -> float:
    """Return the median error of *jobs* where the host takes *work*, and *rank* more per tensor rank."""
    found = []
    for row, step in jobs:
        own = (("host_work", work), ("host_per_tensor_rank", rank))
        job = replace(step.job, conventions=(*step.job.conventions, *own))
        compute = ComputeModel(job.cluster.device, job.precision)
        seconds = step.share * curve_of(job, step.network, compute, (1.0,)).step_s[0]
        found.append(abs(math.log(seconds / row.number_in("step_time_s"))))
    return median(found)


def _percent(error: float) -> str:
    return f"{100 * error:.1f} %"


if __name__ == "__main__":
    main()
