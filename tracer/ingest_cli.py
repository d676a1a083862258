"""The verb ``ingest``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.markup import escape

from foretrace.traces.console import stdout

if TYPE_CHECKING:
    from foretrace.traces.info import RunInfo


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path())
@click.option(
    "-o", "--output", required=True, type=click.Path(file_okay=False), help="Run directory to write."
)
@click.option("--name", default="", help="Name of the run. [default: the last part of the directory]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def ingest(paths: tuple[str, ...], output: str, name: str, *, as_json: bool) -> None:
    """Import a trace of another tool as a run.

    PATHS are trace files, one per rank, or a folder or archive of them:

        foretrace ingest traces/ -o runs/theirs

    Kineto and other Chrome traces; plain, .gz or .zip. The kind is detected from the contents.
    """
    from foretrace.tracer.ingest.ingest import ingest as take_over
    from foretrace.tracer.ingest.joining import said

    with _Bar(paths, quiet=as_json) as bar:
        info = take_over(paths, output, name=name, progress=bar.advance)
    evidence = said(info)
    if as_json:
        click.echo(json.dumps(_document(output, info, evidence)))
        return
    console = stdout()
    ranks = f"{len(info.clock)} of {info.world_size} ranks"
    kind = escape(str((info.job or {}).get("ingested_from")))
    console.print(f"[bold]{escape(output)}[/]  from {kind}, {ranks}", soft_wrap=True)
    for line in evidence:
        console.print(f"  {line}", style="dim", soft_wrap=True, markup=False)
    for reason, count in sorted(info.dropped.items()):
        console.print(f"! left out: {count:,} × {reason}", style="yellow", soft_wrap=True, markup=False)
    for warning in info.warnings:
        console.print(f"! {warning}", style="yellow", soft_wrap=True, markup=False)
    console.print(
        f"next: foretrace analyze {output}, foretrace report {output}", soft_wrap=True, markup=False
    )


def _document(output: str, info: RunInfo, evidence: list[str]) -> dict[str, Any]:
    return {
        "run": output,
        "kind": (info.job or {}).get("ingested_from"),
        "ranks": sorted(info.clock),
        "world_size": info.world_size,
        "groups": [{"id": g.id, "axis": g.axis, "n_ranks": len(g.ranks)} for g in info.groups],
        "evidence": evidence,
        "dropped": dict(info.dropped),
        "warnings": list(info.warnings),
    }


class _Bar:
    """A bar over the stored bytes of all files, on stderr; nothing where nobody looks at it."""

    def __init__(self, paths: tuple[str, ...], *, quiet: bool) -> None:
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
        )
        console = Console(stderr=True)
        self._progress = Progress(
            *columns, console=console, transient=True, disable=quiet or not console.is_terminal
        )
        self._task = self._progress.add_task("reading", total=_size(paths) or None)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def advance(self, name: str, n_bytes: int) -> None:
        """Note that *n_bytes* more of the file *name* have been read."""
        self._progress.update(self._task, advance=n_bytes, description=Path(name).name[:40])


def _size(paths: tuple[str, ...]) -> int:
    """Return how many bytes lie at *paths*."""
    files = [file for path in map(Path, paths) for file in (path.rglob("*") if path.is_dir() else [path])]
    return sum(file.stat().st_size for file in files if file.is_file())
