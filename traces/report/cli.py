"""The verb ``report``: one HTML page for a run, or for two."""

from __future__ import annotations

from pathlib import Path

import click

from foretrace.door import json_text


@click.command()
@click.argument("run", type=click.Path())
@click.argument("other", type=click.Path(), required=False)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="HTML file to write.  [default: RUN's name with .html, in the current directory]",
)
@click.option("--partial", is_flag=True, help="Read a finished run although ranks are missing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def report(run: str, other: str | None, output: Path | None, *, partial: bool, as_json: bool) -> None:
    """Write one self-contained HTML page about RUN: schedule, memory, where the step goes.

    With OTHER, both runs are drawn on one time axis, and their difference is taken apart by cause. Give the
    simulated run first. The page opens in any browser from 2023 on, without a network.
    """
    from foretrace.traces.reader import open_whole
    from foretrace.traces.replacing import check_can_write
    from foretrace.traces.report.html import write_report

    target = output or Path(_file_name(run, other))
    check_can_write(target)
    first = open_whole(run, partial=partial)
    second = None if other is None else open_whole(other, partial=partial)
    written = write_report(target, first, second)
    if as_json:
        click.echo(json_text(written))
        return
    click.echo(written["title"])
    width = max(map(len, written["headline"]), default=0)
    for name, value in written["headline"].items():
        click.echo(f"  {name:<{width}}  {value}")
    for warning in written["warnings"]:
        click.echo(f"  warning: {warning}")
    click.echo(f"{written['report']} ({written['size_bytes'] / 1e6:.1f} MB): open it in a browser")


def _file_name(run: str, other: str | None) -> str:
    """Return what to call the report of runs at these paths."""
    names = [Path(path.rstrip("/")).stem for path in (run, other) if path is not None]
    return "-and-".join(names) + ".html"
