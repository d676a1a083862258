"""Predicted times of rehearsed scripts against published ones: ``rehearsed_times.py [PART OF A NAME ...]``.

Every row of ``tables/rehearsed_times.toml`` is rehearsed on its cluster and its predicted step is compared
with the published one. Scripts are those of ``rehearsed/``, or of the folder that ``--scripts`` names; a row
whose script or packages are not here is named and left out. About ten seconds a row. ``--update`` keeps the
ratios in ``tables/rehearsed_ratios.csv``, from which ``pages.py`` writes the tables of the documentation.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from foretrace.traces.report.format import format_share

TABLE: Final = Path(__file__).parent / "tables" / "rehearsed_times.toml"
RATIOS: Final = TABLE.with_name("rehearsed_ratios.csv")
SCRIPTS: Final = Path(__file__).parent / "rehearsed"
BYTES_PER_GB: Final = 1e9
TIMEOUT_S: Final = 900.0

Row = Mapping[str, Any]
Compared = tuple[Row, float]
"""A row, and ``ln(predicted / measured)``."""


def wanted(rows: Sequence[Row], parts: Sequence[str]) -> list[Row]:
    """Return the rows that have one of *parts* in their name or family, all if none are given."""
    return [row for row in rows if not parts or any(part in _names(row) for part in parts)]


def _names(row: Row) -> str:
    return f"{row['name']} {row['family']}"


def missing(row: Row, scripts: Path) -> str:
    """Return what *row* lacks here, in words; empty if it can be rehearsed."""
    modules = [name for name in row.get("needs", ()) if importlib.util.find_spec(name) is None]
    if modules:
        return f"{', '.join(modules)} not installed: pip install {' '.join(modules)}"
    return "" if script_of(row, scripts).is_file() else f"no {row['script']} in {scripts} (--scripts FOLDER)"


def script_of(row: Row, scripts: Path) -> Path:
    """Return the script of *row*: in the folder *scripts*, or among those that come with this benchmark."""
    given = scripts / str(row["script"])
    return given if given.is_file() else SCRIPTS / str(row["script"])


def rehearsed(row: Row, scripts: Path, cluster: str) -> dict[str, Any] | str:
    """Return the figures of the rehearsal of *row* on *cluster*, or the line with which it ended."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "foretrace", "rehearse", "--world-size", str(row["ranks"])]
        command += ["--cluster", cluster, "--json", "-o", str(Path(folder) / "run"), "--"]
        command += [str(script_of(row, scripts)), *map(str, row["arguments"])]
        done = subprocess.run(
            command,
            env=os.environ | row.get("env", {}),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def line(row: Row, found: Mapping[str, Any]) -> str:
    """Return the comparison of one row."""
    predicted, measured = found["step_time_s"], row["measured_step_s"]
    mfu = format_share(found["mfu"], ".0f") if found["mfu"] else "-"
    published = row.get("measured_reserved_gb")
    reserved = max(rank.get("reserved_bytes", 0) for rank in found["memory"].values()) / BYTES_PER_GB
    held = f"  reserved: {published:.1f}, {reserved:.1f} GB, {reserved / published:.2f}" if published else ""
    how = f"{row['basis']} {row.get('half', '')}"
    return (
        f"{row['name']:38} {1e3 * measured:9.1f} {1e3 * predicted:9.1f} {predicted / measured:6.2f}"
        f" {mfu:>6} {found['peak_memory_bytes'] / BYTES_PER_GB:7.1f}  {how}{held}"
    )


def update(compared: Sequence[Compared]) -> None:
    """Write the ratios of *compared* into the table of ratios."""
    with RATIOS.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        names, rows = reader.fieldnames or (), list(reader)
    now = {row["name"]: f"{math.exp(error):.3f}" for row, error in compared}
    with RATIOS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(row | {"now": now.get(row["name"], row["now"])} for row in rows)


def summary(compared: Sequence[Compared]) -> list[str]:
    """Return medians over families, types and halves."""
    groups: dict[str, list[float]] = defaultdict(list)
    for row, error in compared:
        for name in (row["family"], f"{row['basis']} {row['dtype']}", row.get("half", "")):
            groups[name].append(error)
    groups.pop("", None)
    groups["all"] = [error for _, error in compared]
    return [
        f"{name:38} {len(errors):3} rows, median |ln ratio| {format_share(median(map(abs, errors)), '5.1f')},"
        f" median ratio {math.exp(median(errors)):.2f}"
        for name, errors in groups.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART OF A NAME")
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--scripts", type=Path, default=SCRIPTS)
    parser.add_argument("--update", action="store_true", help="Keep the ratios.")
    asked = parser.parse_args()
    rows = wanted(tomllib.loads(asked.table.read_text())["run"], asked.parts)
    print(f"{'':38} {'measured':>9} {'predicted':>9} {'ratio':>6} {'MFU':>6} {'GB':>7}   (ms)")
    compared: list[Compared] = []
    for row in rows:
        lacks = missing(row, asked.scripts)
        found = lacks or rehearsed(row, asked.scripts, row["cluster"])
        if isinstance(found, str):
            print(f"{row['name']:38} left out: {found}", flush=True)
            continue
        print(line(row, found), flush=True)
        compared.append((row, math.log(found["step_time_s"] / row["measured_step_s"])))
    if asked.update:
        update(compared)
    if compared:
        print("\n".join(["", *summary(compared)]))


if __name__ == "__main__":
    main()
