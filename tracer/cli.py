"""The verbs ``record``, ``ingest`` and ``detect`` (as ``topology detect``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from rich.markup import escape

from foretrace.door import json_text
from foretrace.tracer.bench.cli import MOST_PROCESSES
from foretrace.traces.console import stdout, telling

if TYPE_CHECKING:
    from collections.abc import Callable

    from foretrace.traces.info import RunInfo

MOST_TOLD: Final = 6
"""Reasons why a command failed that are printed, what holds up others first; ``analyze`` has as many."""


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Run directory, new or empty. [default: runs/SCRIPT-1, or the next free number]",
)
@click.option("--name", default="", help="Name of the run. [default: the last part of the directory]")
@click.option(
    "--merge", "is_merge", is_flag=True, help="Join run directories of several machines instead of recording."
)
@click.option("--ranks", default="", help="Ranks to record, e.g. 0,8-11. [default: all]")
@click.option("--steps", default="", help="Steps to record, e.g. 10:20 or 0:2,50:52. [default: all]")
@click.option(
    "--depth",
    type=click.Choice(["light", "kernels"]),
    default="light",
    show_default=True,
    help="How much to record: kernels adds torch.profiler, in the steps given by --steps, else in 2 to 4.",
)
@click.option(
    "--on-cpu",
    "n_gpus_on_cpu",
    type=click.IntRange(min=1),
    metavar="N",
    help="Run a script for GPUs on the processors of this machine, telling it that there are N GPUs.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object; the command's output goes to stderr."
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def record(
    context: click.Context,
    *,
    output: Path | None,
    name: str,
    is_merge: bool,
    ranks: str,
    steps: str,
    depth: str,
    n_gpus_on_cpu: int | None,
    as_json: bool,
    command: tuple[str, ...],
) -> None:
    """Record a real torch.distributed run, without editing its script.

    COMMAND is what you would run anyway, after --:

        foretrace record -o runs/a -- torchrun --nproc-per-node 4 train.py --steps 20

    Every process that calls torch.distributed.init_process_group is recorded, others are left alone. The
    exit status is that of the command. A training without a process group is recorded from the first step
    of its optimizer on. On several machines record on each, into a directory of its own, and then:

        foretrace record --merge -o runs/all node0/run node1/run
    """
    if is_merge:
        _merge(command, output, as_json=as_json)
        return
    asked = {"ranks": ranks, "steps": steps, "depth": depth, "n_gpus_on_cpu": n_gpus_on_cpu or 0}
    _record(context, command, output, as_json=as_json, name=name, **asked)


def _record(
    context: click.Context, command: tuple[str, ...], output: Path | None, *, as_json: bool, **asked: Any
) -> None:
    """Record *command* and say what there is; *asked* as ``tracer.launch.launch`` takes it."""
    from foretrace.tracer.launch import end_as, launch
    from foretrace.tracer.process import is_first, is_one_of_many
    from foretrace.tracer.run_directory import beside, no_empty_folders

    path = _free_directory(command) if output is None else output
    if is_one_of_many() and output is None:
        raise click.UsageError(
            "every rank starts a recording of its own: give all of them one directory, -o DIR"
        )
    with no_empty_folders(path):
        before = beside(path.absolute())
        status = launch(command, path, quiet=as_json, **asked)
        if is_one_of_many():  # the others may not have ended, and no rank knows when
            if is_first() and not as_json:
                click.echo(
                    f"{path}: a recorder per rank; next, when all ended: foretrace analyze {path}", err=True
                )
        else:
            # A launcher that restarts a training leaves a run beside *path* for each attempt.
            more = [path.with_name(one.name) for one in beside(path.absolute()) if one not in before]
            runs = [path, *more] if path.is_dir() or not more else more
            # As a shell tells that signal n has ended a command: 128 + n.
            code = status if status >= 0 else 128 - status
            with suppress(KeyboardInterrupt):  # who has seen enough still gets the status of the command
                _tell_all(runs, path, code, ranks=asked["ranks"], as_json=as_json)
    context.exit(end_as(status))


def _tell_all(runs: Sequence[Path], path: Path, status: int, *, ranks: str, as_json: bool) -> None:
    """Finish *runs*, which a command asked to record into *path* has left, and say what they are.

    Only the last attempt has the exit *status* of the command; *ranks* and *as_json* as for `_told`.
    """
    from foretrace.tracer.run_directory import attempt

    last = max(attempt(path, one) for one in runs)
    told = [
        _told(one, status if attempt(path, one) == last else 0, ranks=ranks, as_json=as_json) for one in runs
    ]
    if as_json:
        restarts = {"restarts": told[1:]} if told[1:] else {}
        click.echo(json_text({**told[0], "exit_status": status, **restarts}))


def _told(path: Path, status: int, *, ranks: str, as_json: bool) -> dict[str, Any]:
    """Finish the run in *path* and say what it is, or return that for a JSON object.

    *status* is the exit status of what was recorded there, *ranks* the ranks that were chosen, empty: all.
    """
    from foretrace.tracer.finish import finish, why_it_failed, why_nothing

    summary = finish(path.absolute()) if path.is_dir() else None
    why = why_it_failed(path) if status and path.is_dir() else []
    if as_json:
        return {"run": str(path), "recorded": summary is not None, "failure": why, **(summary or {})}
    if summary is None:
        lacks, but = (
            ("no span was written", "; the last calls are known:") if why else ("nothing recorded", "")
        )
        click.echo(f"foretrace: {lacks} in {path}: {why_nothing(path)}{but}", err=True)
    else:
        _show(path, summary)
        lacks_some = summary["ranks_known"] < summary["world_size"] and not ranks
        if lacks_some and (not status or summary["ranks_here"] < summary["world_size"]):  # else they died
            click.echo(
                f"the other ranks, on other machines: foretrace record --merge -o ALL {path} ...", err=True
            )
    for line in why[:MOST_TOLD]:
        click.echo(line, err=True)
    return {}


def _merge(parts: tuple[str, ...], output: Path | None, *, as_json: bool) -> None:
    from foretrace.tracer.finish import merge

    if output is None:
        raise click.UsageError("--merge needs -o DIRECTORY for the joined run")
    summary = merge([Path(part) for part in parts], output)
    if as_json:
        click.echo(json_text({"run": str(output), **(summary or {})}))
    elif summary is not None:
        _show(output, summary)


def _show(path: Path, summary: Mapping[str, Any]) -> None:
    """Print where the run is, what c10d confirms of it and what is next: standard output is the command's."""
    click.echo(f"{path}: {_sentence(summary)}", err=True)
    for line in summary.get("audit", {}).get("lines", ()):
        click.echo(line, err=True)
    click.echo(f"next: foretrace analyze {path}, foretrace report {path}", err=True)
    if (kernels := summary.get("kernels")) is not None:
        click.echo(f"kernels: {kernels}", err=True)
    for warning in summary["warnings"]:
        click.echo(f"warning: {warning}", err=True)


def _sentence(summary: Mapping[str, Any]) -> str:
    from foretrace.traces.report.format import format_time

    stored, n = summary["n_ranks_stored"], summary["world_size"]
    ranks = f"{n} rank{'s' if n > 1 else ''}"
    parts = [ranks if stored == n else f"{stored} of {ranks}", f"{summary['n_spans']:,} spans"]
    if (step_s := summary.get("step_time_s")) is not None:
        parts.append(f"{format_time(step_s)} per step")
    return ", ".join(parts)


def _free_directory(command: tuple[str, ...]) -> Path:
    """Return a directory below ``runs`` that is not there yet, named after the script of *command*."""
    from foretrace.tracer.run_directory import next_free

    scripts = [Path(word).stem for word in command if word.endswith(".py")]
    return next_free(scripts[0] if scripts else Path(command[0]).name if command else "run")


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="TOML file to write.")
@click.option(
    "--processes",
    type=click.IntRange(min=2, max=MOST_PROCESSES),
    default=2,
    show_default=True,
    help="Processes to start, which communicate over gloo.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def detect(*, output: Path, processes: int, as_json: bool) -> None:
    """Measure this machine, and write it as a file for --cluster.

    Measures matrix products, memory bandwidth, and collectives of real gloo processes; some 15 seconds.
    """
    from foretrace.tracer.bench.device import machine_toml, measure
    from foretrace.traces.replacing import check_can_write
    from foretrace.traces.writer import write_atomically

    check_can_write(output)
    measured = measure(processes)
    write_atomically(output, machine_toml(measured))
    if as_json:
        click.echo(json_text({"path": str(output), **measured.describe()}))
        return
    for line in measured.lines():
        click.echo(line)
    click.echo(f"written to {output}; next: foretrace simulate --cluster {output} --gpus {processes} ...")


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path())
@click.option(
    "-o", "--output", required=True, type=click.Path(file_okay=False), help="Run directory to write."
)
@click.option("--name", default="", help="Name of the run. [default: the last part of the directory]")
@click.option(
    "--comm-kernels",
    default="",
    metavar="REGEX",
    help="Kernels that communicate, beside those known: what their names contain.",
)
@click.option(
    "--explain",
    is_flag=True,
    help="Tell from operators and their shapes what job it was, and how sure that is.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def ingest(
    describe_device: Callable[[str, int], Mapping[str, Any]],
    paths: tuple[str, ...],
    output: str,
    name: str,
    comm_kernels: str,
    *,
    explain: bool,
    as_json: bool,
) -> None:
    """Import a trace of another tool as a run.

    PATHS are trace files, one per rank, or a folder or archive of them:

        foretrace ingest traces/ -o runs/theirs

    Kinds: kineto and other Chrome traces, nsight (exported as SQLite), xplane of XLA, rocprof (JSON of
    rocprofv3), exported runs of foretrace, tables of operations, timers, chakra, flight recorder, param;
    plain, .gz or .zip. The kind is detected from the contents.
    """
    from foretrace.tracer.ingest.explained import lines
    from foretrace.tracer.ingest.ingest import ingest as take_over
    from foretrace.tracer.ingest.joining import said
    from foretrace.traces.rehearsal import has_rehearsal
    from foretrace.traces.replacing import check_can_write
    from foretrace.traces.report.format import format_share, format_si

    check_can_write(folder=Path(output))
    total, done = _size(paths), 0

    def read(name: str, n_bytes: int) -> None:
        nonlocal done
        done += n_bytes
        if tell is not None:
            share = format_share(min(done / max(total, 1), 1.0), ".0f")
            tell(f"{escape(Path(name).name[:40])}: {share} of {format_si(total, 'B')}")

    with telling("reading", quiet=as_json) as tell:
        info = take_over(
            paths,
            output,
            name=name,
            progress=read,
            communicates=comm_kernels,
            explain=explain,
            describe_device=describe_device,
        )
    evidence = said(info)
    if as_json:
        document = _document(output, info, evidence)
        if explain:
            document["explained"] = (info.job or {})["explained"]
        click.echo(json_text(document))
        return
    if explain:
        evidence += lines((info.job or {})["explained"])
    console = stdout()
    ranks = f"{len(info.clock)} of {info.world_size} ranks"
    kind = escape(str((info.job or {}).get("ingested_from")))
    origin = (
        f"from {kind}, {ranks}" if info.origin == "ingested" else f"the {info.origin} run that was exported"
    )
    console.print(f"[bold]{escape(output)}[/]  {origin}", soft_wrap=True)
    for line in evidence:
        console.print(f"  {line}", style="dim", soft_wrap=True, markup=False)
    for reason, count in sorted(info.dropped.items()):
        console.print(f"! left out: {count:,} × {reason}", style="yellow", soft_wrap=True, markup=False)
    for warning in info.warnings:
        console.print(f"! {warning}", style="yellow", soft_wrap=True, markup=False)
    # Work for a simulator, beside the timeline.
    more = f", foretrace simulate --rehearsal {output} --cluster NAME" if has_rehearsal(output) else ""
    console.print(
        f"next: foretrace analyze {output}, foretrace report {output}{more}", soft_wrap=True, markup=False
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


def _size(paths: tuple[str, ...]) -> int:
    from foretrace.door import files_in
    from foretrace.tracer.errors import IngestError

    files = [
        one for path in map(Path, paths) for one in (files_in(path, IngestError) if path.is_dir() else [path])
    ]
    return sum(file.stat().st_size for file in files if file.is_file())
