"""Predicts every row of a table of published measurements, and says how far off predictions are.

    python benchmarks/validate.py steps steps.csv --calibrate --json > steps.json
    python benchmarks/validate.py collectives collectives.csv --machine "A100 DGX=dgx-a100-staged"
    python benchmarks/validate.py memory memory.csv --write translated

Published tables say in words, recipes and notes what ran. Here these are read (``measured``), turned into the
columns of ``foretrace validate``, and scored by it. ``--write`` keeps the translated table, which
``foretrace validate`` then reads by itself.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from measured import collectives, judge, kernels, memory
from measured.table import read_table
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from foretrace.simulator.errors import SimulationError, TableError
from foretrace.simulator.validate.render import show, show_fit, write_page
from foretrace.simulator.validate.runs import FitValidation
from foretrace.simulator.validate.scores import Validation
from foretrace.topologies.errors import TopologyError
from foretrace.traces.report.format import format_share

Cells = list[dict[str, Any]]
"""Rows in the columns of ``foretrace validate``."""

CALIBRATED: Final = {
    "cluster with its framework and precision": "calibrated",
    "machine": "calibrated_machine",
    "model and machine": "calibrated_model",
    "model, machine and release": "calibrated_release",
}
"""What one run was calibrated for, in words, and how its scores are called in ``--json``."""


def main(words: Sequence[str] | None = None) -> None:
    """Print what was found, as text or as JSON; *words* are those of the command line."""
    args = _arguments(words)
    with TemporaryDirectory() as other:
        folder = args.write or Path(other)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            found, rows = _found(args, folder)
            if args.write is not None:
                write_table(folder / f"{args.table.stem}.csv", rows)
            if args.html is not None and isinstance(found, Validation):
                write_page(args.html, found)
        except (SimulationError, TopologyError) as error:
            raise SystemExit(f"Error: {error}") from None
    if args.json:
        print(json.dumps(found.document(args.worst)))
    elif isinstance(found, FitValidation):
        show_fit(found, Console(), args.worst)
    else:
        show(found, Console(), args.worst)
        if args.kind == "steps":
            show_steps(found, Console())


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=("steps", "memory", "fit", "kernels", "collectives"))
    parser.add_argument("table", type=Path)
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    parser.add_argument("--worst", type=int, default=10, help="Number of worst rows to list.")
    parser.add_argument("--write", type=Path, help="Folder for the translated table and its machines.")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="Processes; of steps.")
    parser.add_argument("--calibrate", action="store_true", help="Calibrate on one run each; of steps.")
    parser.add_argument("--html", type=Path, help="Page to write, predicted against measured; of steps.")
    parser.add_argument("--steps", type=Path, help="Table of steps [steps.csv beside TABLE]; of memory, fit.")
    parser.add_argument("--ran", type=Path, help="Completed runs [memory.csv beside TABLE]; of fit.")
    parser.add_argument("--device", default="", help="Device where the table names none; of kernels.")
    parser.add_argument(
        "--machine",
        action="append",
        default=[],
        metavar="WORDS=MACHINE",
        help="Machine for rows whose hardware begins with WORDS, repeatable; of collectives.",
    )
    return parser.parse_args(words)


def _found(args: argparse.Namespace, folder: Path) -> tuple[Validation | FitValidation, Cells]:
    """Return what was found of the table, and its rows as ``foretrace validate`` reads them."""
    if args.kind == "kernels":
        return kernels.validate_kernels(args.table, args.device)
    if args.kind == "collectives":
        return collectives.validate_collectives(args.table, list(map(_stated, args.machine)), folder)
    if args.kind == "memory":
        return memory.validate_memory(args.table, args.steps, folder)
    if args.kind == "fit":
        return memory.validate_fit(args.table, args.ran, args.steps, folder)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("simulating", total=None)
        found = judge.validate_steps(
            args.table,
            calibrate=args.calibrate,
            workers=args.workers,
            tell=lambda done, total: progress.update(task, advance=done, total=total),
        )
    if args.write is None:
        return found, []
    translated, _ = judge.translate(read_table(args.table, judge.COLUMNS), folder)
    return found, [{name: row.text(name) for name in row.columns} for row in translated.values()]


def _stated(machine: str) -> tuple[str, str]:
    """Return the words and the machine of a flag. Raises TableError if one is missing."""
    words, equals, name = machine.rpartition("=")
    if not (words.strip() and equals and name.strip()):
        raise TableError(f"--machine {machine!r}: WORDS=MACHINE, as in 'A100 DGX=dgx-a100-staged'")
    return words.strip(), name.strip()


def write_table(path: Path, rows: Cells) -> None:
    """Write *rows* as CSV; machines that are files of its folder are named without it."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for row in rows:
            cluster = Path(row.get("cluster", ""))
            writer.writerow({**row, "cluster": cluster.name} if cluster.suffix == ".toml" else row)


def show_steps(found: Validation, console: Console) -> None:
    """Print what only steps have."""
    extra = found.extra
    for name, key in (("GPU", "score_by_gpu"), ("size", "score_by_size"), ("level", "score_by_level")):
        if extra[key]:
            console.print(_scores(name, extra[key]))
    lines: Sequence[tuple[str, float | None]] = [
        (f"{extra['stress_rows']} rows flagged as stress", extra["stress_score"]),
        (
            f"with {extra['slow_rows']} rows flagged as slow",
            extra["with_slow_score"] if extra["slow_rows"] else None,
        ),
        ("regret, median over groups", extra["regret_median"]),
        ("regret, mean over groups", extra["regret_mean"]),
    ]
    for name, figure in lines:
        if figure is not None:
            console.print(f"{name}: {format_share(figure)}", highlight=False)
    for name, key in CALIBRATED.items():
        after, before = (extra.get(f"{key}_{when}") for when in ("score", "before"))
        if after is not None and before is not None:
            figures = f"{format_share(after)}, the same runs before {format_share(before)}"
            console.print(f"calibrated on one run per {name}: {figures}", highlight=False)
    if extra["kendall_tau"] is not None:
        console.print(
            f"Kendall tau {extra['kendall_tau']:.2f} over {extra['choice_groups']} groups of layouts",
            highlight=False,
        )
        console.print(_choices(extra["choices_by_source"]))
    for words, count in extra["assumed"].items():
        console.print(f"{count} rows: {escape(words)}", style="dim", highlight=False)


def _choices(sources: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(box=None, header_style="dim")
    table.add_column("layouts to choose from, of")
    for head in ("groups", "Kendall tau", "regret, median", "mean"):
        table.add_column(head, justify="right")
    for name, found in sources.items():
        tau = "-" if found["kendall_tau"] is None else f"{found['kendall_tau']:.2f}"
        regrets = (format_share(found[key]) for key in ("regret_median", "regret_mean"))
        table.add_row(escape(name), str(found["groups"]), tau, *regrets)
    return table


def _scores(name: str, scores: Mapping[str, float]) -> Table:
    table = Table(box=None, header_style="dim")
    table.add_column(name)
    table.add_column("score", justify="right")
    for key, value in scores.items():
        table.add_row(escape(key), format_share(value))
    return table


if __name__ == "__main__":
    main()
