"""The verb ``foretrace bubble``: how much of a pipeline idles, by schedule and micro-batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from foretrace.door import json_text
from foretrace.simulator.search.flags import several
from foretrace.traces.report.format import format_share

if TYPE_CHECKING:
    from foretrace.simulator.search.bubbles import Bubble


MOST_FORWARDS: Final = 1_000_000
"""Of all ranks in a step: half a minute of work, and a gigabyte."""


@click.command()
@click.option("--stages", required=True, type=click.IntRange(1, 256), help="Number of pipeline ranks.")
@click.option(
    "--micro-batches", required=True, type=several(int), help="Micro-batches per step, e.g. 8,16,32,64."
)
@click.option(
    "--schedule", type=several(str), default=("1f1b",), help="Schedules to compare. [default: 1f1b]"
)
@click.option(
    "--virtual-stages", type=click.IntRange(1), help="Stages per rank, for schedules that leave a choice."
)
@click.option(
    "--efficiency", type=click.FloatRange(0, 1), default=0.9, show_default=True, help="Efficiency to reach."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def bubble(*, as_json: bool, **flags: Any) -> None:
    """Show how much of a pipeline idles, and how many micro-batches it takes to reach an efficiency.

    A forward takes one unit, a backward two, messages nothing:

        foretrace bubble --stages 32 --micro-batches 8,16,32,64 --schedule 1f1b,interleaved-1f1b
    """
    from foretrace.simulator.errors import ScheduleError
    from foretrace.simulator.search import bubbles

    stages, virtual = flags["stages"], flags["virtual_stages"]
    rows: list[Bubble] = []
    refused: list[str] = []
    if (most := max(flags["micro_batches"])) * stages > MOST_FORWARDS:
        raise ScheduleError(
            f"{most:,} micro-batches on {stages:,} ranks are more than {MOST_FORWARDS:,} forwards: "
            "fewer say the same"
        )
    for schedule in flags["schedule"]:
        for n_microbatches in flags["micro_batches"]:
            try:
                rows.append(bubbles.bubble(schedule, stages, n_microbatches, virtual))
            except ScheduleError as error:
                refused.append(str(error))
    if not rows:
        # Nothing ran: the first refusal is the answer.
        raise ScheduleError(refused[0])
    known = dict.fromkeys(row.schedule for row in rows)
    passing = {name: bubbles.passes(name, stages, flags["efficiency"], virtual) for name in known}
    if as_json:
        said = {"rows": [row.describe() for row in rows], "refused": refused}
        click.echo(json_text(said | {"efficiency": flags["efficiency"], "passes_from": passing}))
        return
    _show(rows, refused, passing, flags["efficiency"])


def _show(rows: list[Bubble], refused: list[str], passing: dict[str, int | None], efficiency: float) -> None:
    from rich.table import Table

    from foretrace.traces.console import stdout

    console = stdout()
    table = Table(box=None, header_style="dim", pad_edge=False)
    for name in (
        "schedule",
        "micro-batches",
        "bubble fraction",
        "bubble overhead",
        "published",
        "efficiency",
        "in flight",
    ):
        wraps = name.startswith("bubble")
        table.add_column(name, justify="left" if name == "schedule" else "right", no_wrap=not wraps)
    for row in rows:
        times = f" ×{row.virtual_stages}" if row.virtual_stages > 1 else ""
        shares = (
            "-" if share is None else format_share(share)
            for share in (row.fraction, row.overhead, row.published, row.efficiency)
        )
        table.add_row(f"{row.schedule}{times}", str(row.n_microbatches), *shares, str(row.in_flight))
    console.print(table)
    reasons = dict.fromkeys((row.schedule, row.differs) for row in rows if row.differs)
    for schedule, why in reasons:
        sizes = ", ".join(
            str(one.n_microbatches) for one in rows if (one.schedule, one.differs) == (schedule, why)
        )
        console.print(f"{schedule} with {sizes} micro-batches differs from the published {why}", markup=False)
    for line in refused:
        console.print(f"! {line}", markup=False)
    for name, n_microbatches in passing.items():
        from_ = (
            "with none that was tried"
            if n_microbatches is None
            else f"from {n_microbatches} micro-batches on"
        )
        console.print(f"{name} reaches {format_share(efficiency, 'g')} {from_}", markup=False)
