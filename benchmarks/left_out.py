"""Checks every constant that was fitted on steps without the source that it is then judged on.

    python benchmarks/left_out.py steps.csv

Clocks of training: for each GPU that several sources measured, each source in turn has no part in the choice
of the clock. Time of the host in nanotron, which one source measured: chosen on one of its models, and judged
on the other. Writes the table of docs/accuracy-evidence.md. Takes about a minute of two processors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from itertools import product
from statistics import median
from typing import Final

from accuracy import EVIDENCE, replaced
from fit_training_clock import at_clocks, best_clock, dense_rows
from measured.jobs import step_job
from measured.judge import evenly
from measured.table import Row, read_table
from published import by_source, counted, log_ratio, score, table_parser, together

from foretrace.simulator.framework import load_framework
from foretrace.topologies.catalog import load_device
from foretrace.traces.report.format import format_share

DEVICES: Final = ("a100-80gb", "h100-sxm", "gb200")
"""GPUs whose clock in training several sources have a say in."""

HOST_WORK: Final = (1.8, 2.1, 2.4)
PER_TENSOR_RANK: Final = (0.35, 0.5, 0.65)
MODELS: Final = ("nanotron-1B", "nanotron-8B")
NANOTRON_ROWS: Final = 20
"""Rows of each model that stand for all, evenly over the table."""

PER_FAMILY: Final = 2
"""Rows of each family that stand for it."""

HEAD: Final = ("judged on", "constant", "in use", "error", "chosen without it", "error then")

Host = tuple[float, float]
"""Host time per operation of the framework, and what each tensor-parallel rank adds to it."""


def main() -> None:
    """Write the table."""
    args = table_parser(__doc__).parse_args()
    rows = read_table(args.table, ("id",))
    found = [line for device in DEVICES for line in _clocks(rows, device, args.workers)]
    found += _hosts(rows, args.workers)
    lines = [f"Simulated on {date.today():%d %B %Y}.", ""]
    lines += ["| " + " | ".join(cells) + " |" for cells in (HEAD, tuple("---" for _ in HEAD), *found)]
    print("\n".join(lines))
    EVIDENCE.write_text(replaced(EVIDENCE.read_text(encoding="utf-8"), "left-out", lines), encoding="utf-8")


def _clocks(rows: Sequence[Row], device: str, workers: int) -> Iterator[tuple[str, ...]]:
    """Yield a line for each source of *device*: its error with the clock in use, and with that of others."""
    used = load_device(device).training_clock_fraction
    found = at_clocks(dense_rows(rows, device, PER_FAMILY), workers, f"clock of {device}")
    sources = sorted(by_source(found[used]))
    for source in sources if len(sources) > 1 else ():
        others = best_clock(found, [other for other in sources if other != source])
        now, then = (format_share(score(by_source(found[clock])[source])) for clock in (used, others))
        yield source, f"clock of {device}", f"{used:.2f}", now, f"{others:.2f}", then


def _hosts(rows: Sequence[Row], workers: int) -> Iterator[tuple[str, ...]]:
    """Yield a line for each model that nanotron ran: its error, and with what the other one chooses."""
    families = counted(row for row in rows if row.text("model") in MODELS)
    some = [row for own in families.values() for row in evenly(own, NANOTRON_ROWS)]
    profile = load_framework("nanotron")
    used = (profile.host_work, profile.host_per_tensor_rank)
    hosts = sorted({*product(HOST_WORK, PER_TENSOR_RANK), used})
    errors: dict[Host, dict[str, list[float]]] = {}
    for model, ratios in together(partial(_at_hosts, hosts), some, workers, "host of nanotron"):
        for host, ratio in ratios.items():
            errors.setdefault(host, {}).setdefault(model, []).append(abs(ratio))
    found = {host: {name: median(own) for name, own in models.items()} for host, models in errors.items()}
    for name, other in (MODELS, MODELS[::-1]):
        best = min(found, key=lambda host: found[host][other])
        words = [f"{work:g}, {rank:g}" for work, rank in (used, best)]
        now, then = (format_share(found[host][name]) for host in (used, best))
        yield name, "host of nanotron, and per TP rank", words[0], now, words[1], then


def _at_hosts(hosts: Sequence[Host], row: Row) -> tuple[str, dict[Host, float]]:
    """Return the model of *row*, and its signed log ratio at each of *hosts*."""
    step, found = step_job(row), {}
    for work, rank in hosts:
        own = (("host_work", work), ("host_per_tensor_rank", rank))
        job = replace(step.job, conventions=(*step.job.conventions, *own))
        found[work, rank] = log_ratio(row, replace(step, job=job))
    return row.text("model"), found


if __name__ == "__main__":
    main()
