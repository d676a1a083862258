"""How much each physical term buys: the score with it and without it, and how many sources gain.

    python benchmarks/ablation.py steps.csv --per-family 2

A few rows of every family are simulated, once as they are and once without each term. With ``--page`` the
table is written into docs/accuracy.md.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from multiprocessing import get_context
from statistics import fmean, median
from typing import Final

from accuracy import PAGE, replaced

from simulator.compute.timing import ComputeModel
from simulator.errors import SimulationError
from simulator.job import Job
from simulator.network.cost import Network
from simulator.validate.curve import curve_of
from simulator.validate.steps_job import StepJob, step_job
from simulator.validate.table import Row, read_table
from topologies.device import Device

Change = Callable[[StepJob], StepJob]


def main() -> None:
    """Print the table, and write it into the page if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table")
    parser.add_argument("--per-family", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--page", action="store_true", help="Write the table into docs/accuracy.md.")
    args = parser.parse_args()
    rows = list(chosen(read_table(args.table, ("id",)), args.per_family))
    with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
        found = dict(pool.map(_one, [(name, rows) for name in TERMS]))
    lines = list(table(found, len(rows)))
    print("\n".join(lines))
    if args.page:
        PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), "ablation", lines), encoding="utf-8")


def chosen(rows: Iterable[Row], per_family: int) -> Iterable[Row]:
    """Yield rows that count in the score, evenly over each family."""
    families: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        flags = row.text("check_flags")
        if row.text("spec_level") in ("A", "A-") and "stress" not in flags and "slow" not in flags:
            families[family(row)].append(row)
    for own in families.values():
        step = max(1.0, len(own) / per_family)
        yield from (own[int(at * step)] for at in range(min(per_family, len(own))))


def family(row: Row) -> str:
    """Return source, model, GPU and precision of *row*."""
    return " · ".join(row.text(name) for name in ("source_group", "model", "hardware", "precision"))


def _one(given: tuple[str, Sequence[Row]]) -> tuple[str, dict[str, list[float]]]:
    """Return signed log ratios by family without the term that *given* names."""
    name, rows = given
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        try:
            step = TERMS[name](step_job(row))
            device, precision = step.job.cluster.device, step.job.precision
            curve = curve_of(step.job, step.network, ComputeModel(device, precision), (1.0,))
        except SimulationError:
            continue
        seconds = step.share * curve.step_s[0]
        found[family(row)].append(math.log(seconds / row.number_in("step_time_s")))
    return name, dict(found)


def table(found: Mapping[str, Mapping[str, Sequence[float]]], n_rows: int) -> Iterable[str]:
    """Yield the lines of the table."""
    base = found[WHOLE]
    n_families = len(base)
    yield f"{n_rows} rows, at most a few of each of {n_families} families."
    yield ""
    yield "| without | score | bias | sources that lose | sources that gain |"
    yield "|---|---|---|---|---|"
    for name, errors in found.items():
        own, whole = _by_source(errors), _by_source(base)
        worse = sum(own[source] > whole[source] + 0.002 for source in own)
        better = sum(own[source] < whole[source] - 0.002 for source in own)
        counts = ("", "") if name == WHOLE else (str(worse), str(better))
        bias = fmean(median(ratios) for ratios in errors.values())
        cells = (name, f"{100 * _score(errors.values()):.1f} %", f"{100 * bias:+.1f} %", *counts)
        yield "| " + " | ".join(cells) + " |"


def _by_source(errors: Mapping[str, Sequence[float]]) -> dict[str, float]:
    found: dict[str, list[Sequence[float]]] = defaultdict(list)
    for name, ratios in errors.items():
        found[name.split(" · ")[0]].append(ratios)
    return {source: _score(own) for source, own in found.items()}


def _score(families: Iterable[Sequence[float]]) -> float:
    return fmean(median(map(abs, ratios)) for ratios in families)


def _job(change: Callable[[Job], Job]) -> Change:
    return lambda step: replace(step, job=change(step.job))


def _device(**changes: object) -> Change:
    def change(step: StepJob) -> StepJob:
        cluster = step.job.cluster
        device: Device = replace(cluster.device, **changes)  # type: ignore[arg-type]
        return replace(step, job=replace(step.job, cluster=replace(cluster, device=device)))

    return change


def _conventions(**changes: object) -> Change:
    return _job(lambda job: replace(job, conventions=tuple({**dict(job.conventions), **changes}.items())))


@cache
def _ideal(network: Network) -> Network:
    """Return *network* with links inside nodes as latency and bandwidth alone."""
    cluster = network.cluster
    intra = replace(cluster.intra, tables={}, curves={})
    return Network(replace(cluster, intra=intra), network.placement, network.choice)


def _plain_exchange(step: StepJob) -> StepJob:
    changed = _conventions(expert_dispatch="copies")(step)
    if changed.job.schedule != "combined-1f1b":
        return changed
    several = (changed.job.virtual_stages or 1) > 1
    return replace(changed, job=replace(changed.job, schedule="interleaved-1f1b" if several else "1f1b"))


WHOLE: Final = "nothing: as it is"

TERMS: Final[Mapping[str, Change]] = {
    WHOLE: lambda step: step,
    "time of the host (launching takes nothing)": _conventions(host_work=0.0),
    "what tensor-parallel ranks add to that in pipelines": _conventions(host_per_tensor_rank=0.0),
    "the clock of training (as one product after another)": _device(training_clock_fraction=1.0),
    "any derating of the clock": _device(training_clock_fraction=1.0, sustained_clock_fraction=1.0),
    "measured products (three constants instead of tiles)": _device(gemm_tiles=None),
    "measured collectives inside nodes (latency and bandwidth)": lambda step: replace(
        step, network=_ideal(step.network)
    ),
    "attention kernels of frameworks (the fastest one)": _conventions(attention=()),
    "differences between frameworks (all as Megatron-LM)": _job(
        lambda job: replace(job, framework="megatron", kernels="fused", conventions=())
    ),
    "eager kernels (all element-wise work fused)": _job(lambda job: replace(job, kernels="fused")),
    "what is exposed of gradients and parameters (all overlapped)": _conventions(
        overlap_grad_reduce=True, overlap_param_gather=True
    ),
    "overlap of tensor-parallel communication": _conventions(async_tp=False, overlap_tp_backward=False),
    "how experts exchange tokens (every copy, none beside computing)": _plain_exchange,
    "free overlap (communication takes processors and memory)": _job(
        lambda job: replace(job, overlap_slowdown=1.0)
    ),
}
"""What is taken away, by name; the last one adds."""


if __name__ == "__main__":
    main()
