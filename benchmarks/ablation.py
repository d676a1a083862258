"""How much each physical term buys: the score with it and without it, and how many sources gain.

    python benchmarks/ablation.py steps.csv --page

A few rows of every family are simulated, once as they are and once without each term. With ``--page`` the
table is written into docs/accuracy-evidence.md. Takes about two minutes of two processors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import fields, replace
from datetime import date
from typing import Final

from accuracy import EVIDENCE, replaced
from measured.jobs import StepJob, step_job
from measured.judge import evenly
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

from foretrace.simulator.errors import SimulationError
from foretrace.simulator.job import Job
from foretrace.topologies.device import Device
from foretrace.traces.report.format import format_share

Change = Callable[[StepJob], StepJob]

CHANGED: Final = 0.002
"""Difference of two scores of a source from which it counts as a loss or a gain."""


def main() -> None:
    """Print the table, and write it into the page if asked to."""
    parser = table_parser(__doc__)
    parser.add_argument("--per-family", type=int, default=1, help="Rows that stand for a family.")
    parser.add_argument("--page", action="store_true", help="Write the table into docs/accuracy-evidence.md.")
    args = parser.parse_args()
    families = counted(read_table(args.table, ("id",)))
    rows = [row for own in families.values() for row in evenly(own, args.per_family)]
    found: dict[str, dict[Family, list[float]]] = {name: defaultdict(list) for name in TERMS}
    for name, ratios in together(without_each, rows, args.workers, "rows, without each term"):
        for term, ratio in ratios.items():
            found[term][name].append(ratio)
    lines = list(table(found, len(rows)))
    print("\n".join(lines))
    if args.page:
        EVIDENCE.write_text(
            replaced(EVIDENCE.read_text(encoding="utf-8"), "ablation", lines), encoding="utf-8"
        )


def without_each(row: Row) -> tuple[Family, dict[str, float]]:
    """Return the family of *row*, and its signed log ratio without each term with which it can run."""
    step, found = step_job(row), {}
    known: dict[Hashable, float] = {}
    for name, change in TERMS.items():
        changed = change(step)
        key = _key(changed)
        try:
            if key not in known:
                known[key] = log_ratio(row, changed)
        except SimulationError:
            continue
        found[name] = known[key]
    return family(row), found


def _key(step: StepJob) -> Hashable:
    """Return what two jobs agree in if a change makes no difference between them."""
    own = (getattr(step.job, one.name) for one in fields(Job) if one.name not in ("cluster", "conventions"))
    return (step.network, step.job.cluster.device, step.job.profile, *own)


def table(found: Mapping[str, Errors], n_rows: int) -> Iterable[str]:
    """Yield the lines of the table."""
    base = found[WHOLE]
    whole = by_source(base)
    yield f"{n_rows:,} rows of {len(base)} families, simulated on {date.today():%d %B %Y}."
    yield ""
    yield "| without | score | bias | sources that lose | sources that gain |"
    yield "|---|---|---|---|---|"
    for name, errors in found.items():
        worse = [score(own) - score(whole[source]) for source, own in by_source(errors).items()]
        counts = (str(sum(one > CHANGED for one in worse)), str(sum(one < -CHANGED for one in worse)))
        figures = (format_share(score(errors)), format_share(bias(errors), "+.1f"))
        yield "| " + " | ".join((name, *figures, *(counts if name != WHOLE else ("", "")))) + " |"


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


def _ideal(job: Job) -> Job:
    """Return *job* with links inside nodes as latency and bandwidth alone."""
    cluster = job.cluster
    return replace(job, cluster=replace(cluster, intra=replace(cluster.intra, tables={}, curves={})))


def _plain_exchange(step: StepJob) -> StepJob:
    changed = _conventions(expert_dispatch="copies")(step)
    if changed.job.schedule != "combined-1f1b":
        return changed
    several = (changed.job.virtual_stages or 1) > 1
    return replace(changed, job=replace(changed.job, schedule="interleaved-1f1b" if several else "1f1b"))


WHOLE: Final = "nothing (full model)"

TERMS: Final[Mapping[str, Change]] = {
    WHOLE: lambda step: step,
    "host time (launches are free)": _conventions(host_work=0.0),
    "additional host time per tensor-parallel rank in pipelines": _conventions(host_per_tensor_rank=0.0),
    "training clock (clock of one product after another instead)": _device(training_clock_fraction=1.0),
    "any derating of the clock": _device(training_clock_fraction=1.0, sustained_clock_fraction=1.0),
    "measured products (three constants instead of tiles)": _device(gemm_tiles=None),
    "measured collectives inside nodes (latency and bandwidth)": _job(_ideal),
    "attention kernels of frameworks (the fastest one instead)": _conventions(attention=()),
    "differences between frameworks (all as Megatron-LM)": _job(
        lambda job: replace(job, framework="megatron", kernels="fused", conventions=())
    ),
    "eager kernels (all element-wise work fused)": _job(lambda job: replace(job, kernels="fused")),
    "exposed gradient and parameter communication (all overlapped)": _conventions(
        overlap_grad_reduce=True, overlap_param_gather=True
    ),
    "overlap of tensor-parallel communication": _conventions(async_tp=False, overlap_tp_backward=False),
    "token exchange of experts (every copy is sent, no overlap)": _plain_exchange,
    "free overlap (communication occupies processors and memory)": _job(
        lambda job: replace(job, overlap_slowdown=1.0)
    ),
}
"""What is taken away, by name; the last one adds."""


if __name__ == "__main__":
    main()
