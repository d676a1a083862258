"""The verbs ``analyze``, ``compare`` and ``export``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from foretrace.door import json_text
from foretrace.traces.console import stdout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from foretrace.traces.analysis.diagnosis import Diagnosis
    from foretrace.traces.run import Run

PERFETTO_SPANS: Final = 5_000_000
"""Spans that Perfetto's page can hold: it needs 2 to 4 times the file in a memory of 2 GB
(google/perfetto, docs/visualization/large-traces.md)."""


PARTIAL: Final = click.option(
    "--partial", is_flag=True, help="Read a finished run even if ranks are missing."
)
"""Option of every verb that reads a run."""


def usd_per_hour(value: str) -> float:
    """Return ``2.5 USD/h`` as dollars per hour, as ``topologies.units.parse_price`` does.

    Raises click.BadParameter: *value* is no price.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*USD/h\s*", value)
    if found is None:
        raise click.BadParameter(f"{value!r}: write a number and USD/h, e.g. '2.5 USD/h'")
    return float(found[1])


@click.command()
@click.argument("paths", metavar="RUN", nargs=-1, required=True, type=click.Path())
@PARTIAL
@click.option(
    "--price", type=usd_per_hour, help="Price of a GPU, e.g. '2.5 USD/h', to show losses in dollars."
)
@click.option("--bus-limit", help="Bus bandwidth of the links, e.g. '400 GB/s', if RUN does not say.")
@click.option(
    "--rows",
    "n_rows",
    type=click.IntRange(min=0),
    default=5,
    show_default=True,
    help="Rows of each table of kernels, collectives and copies of an ingested trace.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def analyze(
    diagnose_dumps: Callable[[Sequence[str]], Diagnosis | None],
    paths: tuple[str, ...],
    price: float | None,
    bus_limit: str | None,
    n_rows: int,
    *,
    partial: bool,
    as_json: bool,
) -> None:
    """Show where the time of a run goes, rank by rank; adds up to 100 %.

    RUN is a run directory, one .arrow, .arrows or .parquet file, or a URL. Simulated and recorded runs, and
    runs still being written, are read alike. Of a job that hangs or has died it is said which rank is behind
    or failed first. RUN may also be the dumps of PyTorch's flight recorder, one per rank, or their folder:
    they tell that of a job which nobody has recorded.
    """
    from foretrace.traces import batch
    from foretrace.traces.analysis.collectives import parse_limit
    from foretrace.traces.analysis.diagnosis import diagnose
    from foretrace.traces.analysis.everything import analysis
    from foretrace.traces.analysis.findings import findings
    from foretrace.traces.analysis.metrics import summarize
    from foretrace.traces.errors import RunError
    from foretrace.traces.reader import open_whole
    from foretrace.traces.render import (
        show_analysis,
        show_critical_path,
        show_diagnosis,
        show_findings,
        show_tables,
    )

    limit = None if bus_limit is None else parse_limit(bus_limit)
    run = paths[0]
    try:
        if len(paths) > 1:
            raise RunError("several paths are no run: give one run, or dumps of PyTorch's flight recorder")
        opened = open_whole(run, partial=partial)
        summary = summarize(opened)
    except RunError:  # it may hang or end before a span of it can be read
        alone = diagnose(run, None)
        told = alone or diagnose_dumps(paths)
        if told is None:
            raise
        if as_json:
            click.echo(json_text({"run": run, **told.to_dict()}))
        else:
            show_diagnosis(told)
        return
    found = diagnose(run, opened)
    if as_json:
        document = {
            "run": run,
            **summary,
            **batch.told(opened.info.job or {}),
            "ranks": _steps_of_ranks(opened),
            **opened.info.audited(),
            "warnings": list(opened.warnings),
            **found.to_dict(),
            **analysis(opened, price, limit_bytes_per_s=limit),
        }
        click.echo(json_text(document))
        return
    show_analysis(opened, summary)
    show_diagnosis(found)
    show_findings(opened, findings(opened, price, limit_bytes_per_s=limit))
    show_critical_path(opened)
    show_tables(opened, n_rows, limit)


def _steps_of_ranks(opened: Run) -> list[dict[str, Any]]:
    """Return as JSON what each step of each rank is made of."""
    from foretrace.traces.analysis.metrics import breakdown

    names = ("rank", "step", "represents", "window_ns", "ns", "shares", "hidden_ns")
    return [{name: getattr(row, name) for name in names} for row in breakdown(opened)]


@click.command()
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@PARTIAL
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def compare(a: str, b: str, *, partial: bool, as_json: bool) -> None:
    """Compare two runs: what differs, by cause.

    The causes add up to the difference in step time. Give the simulated run first: the ratio is then
    simulated / measured.
    """
    from foretrace.traces.compare import compare as compare_runs
    from foretrace.traces.reader import open_whole
    from foretrace.traces.render import show_comparison

    found = compare_runs(*(open_whole(path, partial=partial) for path in (a, b)))
    if as_json:
        click.echo(json_text(found.to_dict()))
    else:
        show_comparison(found)


@click.command()
@click.argument("run", type=click.Path())
@click.option(
    "-o", "--output", required=True, type=click.Path(dir_okay=False), help="File to write; .gz compresses."
)
@click.option(
    "--format",
    "kind",
    help="perfetto, chrome, kineto, chakra, memory, csv or parquet.  [default: from the ending of FILE]",
)
@click.option(
    "--ranks", help="Ranks to write, e.g. 0-7,9, or all; folded ranks are expanded.  [default: those stored]"
)
@PARTIAL
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def export(
    run: str, output: str, kind: str | None, ranks: str | None, *, partial: bool, as_json: bool
) -> None:
    """Write a run for other tools: Perfetto, Chrome, Chakra, PyTorch's memory viewer, CSV, Parquet.

    For a timeline that https://ui.perfetto.dev opens, and memory that https://pytorch.org/memory_viz opens:

        foretrace export runs/a -o a.pftrace.gz
        foretrace export runs/a -o a.pickle
    """
    from foretrace.traces.export import export as export_run
    from foretrace.traces.export import format_of
    from foretrace.traces.info import rank_list
    from foretrace.traces.layout import ranks_in
    from foretrace.traces.reader import open_whole
    from foretrace.traces.render import show_warnings
    from foretrace.traces.replacing import check_can_write

    check_can_write(Path(output))
    opened = open_whole(run, partial=partial)
    named = {None: opened.stored_ranks, "all": opened.ranks}
    chosen = named[ranks] if ranks in named else ranks_in(ranks or "", below=opened.info.world_size)
    written = export_run(opened, output, kind, chosen)
    is_memory = format_of(written, kind) == "memory"
    n_spans = sum(opened.spans([opened.source(rank)]).num_rows for rank in chosen if not is_memory)
    if as_json:
        size_bytes = written.stat().st_size
        document = {"file": str(written), "ranks": list(chosen), "n_spans": n_spans, "size_bytes": size_bytes}
        click.echo(json_text(document | {"warnings": list(opened.warnings)}))
        return
    console = stdout()
    what = "memory" if is_memory else f"{n_spans:,} spans"
    console.print(f"{written}: {what} of rank {rank_list(chosen)}", soft_wrap=True, markup=False)
    if is_memory:
        console.print("open it at https://pytorch.org/memory_viz: devices are ranks")
    if written.name.endswith((".pftrace", ".pftrace.gz", ".json", ".json.gz")):
        console.print("open it at https://ui.perfetto.dev: the page reads it without sending it anywhere")
        if n_spans > PERFETTO_SPANS:
            console.print(
                f"more than {PERFETTO_SPANS:,} spans may be too many for the page; choose fewer --ranks"
            )
    show_warnings(console, opened.warnings)
