"""What benchmarks on published steps share: arguments, rows that count, families, and timing many rows."""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from multiprocessing import get_context
from statistics import fmean, median
from typing import Final, TypeVar

from measured.jobs import StepJob
from measured.judge import COMPLETE
from measured.table import Row
from rich.console import Console
from rich.progress import track

from foretrace.simulator.compute.timing import ComputeModel
from foretrace.simulator.recorded.one_time import curve_of
from foretrace.topologies.device import Device

FAMILY: Final = ("source_group", "model", "hardware", "precision")
"""Columns that name a family; the first says who measured it."""

Family = tuple[str, ...]
Errors = Mapping[Family, Sequence[float]]
"""Signed log ratios, ``ln(predicted / measured)``, by family."""

Given = TypeVar("Given")
Found = TypeVar("Found")


def table_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser for a table of steps and the number of processes that run its rows."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table")
    parser.add_argument("--workers", type=int, default=2)
    return parser


def counted(rows: Iterable[Row]) -> dict[Family, list[Row]]:
    """Return the rows that count in the score, by family."""
    found: dict[Family, list[Row]] = defaultdict(list)
    for row in rows:
        flags = row.text("check_flags")
        if row.text("spec_level") in COMPLETE and "stress" not in flags and "slow mode" not in flags:
            found[family(row)].append(row)
    return dict(found)


def family(row: Row) -> Family:
    """Return source, model, GPU and precision of *row*."""
    return tuple(row.text(name) for name in FAMILY)


def log_ratio(row: Row, step: StepJob) -> float:
    """Return ``ln(predicted / measured)`` of *row*, if what ran was *step*.

    Raises:
        SimulationError: it cannot run.
    """
    job = step.job
    curve = curve_of(job, step.network, _compute(job.cluster.device, job.precision), (1.0,))
    return math.log(step.share * curve.step_s[0] / row.number_in("step_time_s"))


@cache
def _compute(device: Device, precision: str) -> ComputeModel:
    """Return the times of *device*, whose kernels are timed once however many rows have them."""
    return ComputeModel(device, precision)


def by_source(errors: Errors) -> dict[str, dict[Family, Sequence[float]]]:
    """Return *errors* by who measured them."""
    found: dict[str, dict[Family, Sequence[float]]] = defaultdict(dict)
    for name, ratios in errors.items():
        found[name[0]][name] = ratios
    return dict(found)


def score(errors: Errors) -> float:
    """Return the mean over families of the median error."""
    return fmean(median(map(abs, ratios)) for ratios in errors.values())


def bias(errors: Errors) -> float:
    """Return the mean over families of the median signed log ratio."""
    return fmean(median(ratios) for ratios in errors.values())


def together(
    work: Callable[[Given], Found], given: Iterable[Given], workers: int, what: str
) -> Iterator[Found]:
    """Yield what *work* makes of each of *given* as it is done; a bar on standard error says *what*."""
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(work, one) for one in given]
        done = as_completed(futures)
        for future in track(done, what, len(futures), console=Console(stderr=True), transient=True):
            yield future.result()
