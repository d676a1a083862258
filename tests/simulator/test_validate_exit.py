"""How ``foretrace validate`` ends: with 1 if nothing could be predicted, whatever the table is of."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from foretrace.cli import main

JOB = {"model": "llama3-8b", "cluster": "a slide rule", "gpus": 8, "global_batch": 8}
UNKNOWN: dict[str, dict[str, object]] = {
    "kernels": {
        "kernel": "gemm",
        "dtype": "bf16",
        "m": 64,
        "n": 64,
        "k": 64,
        "time_us": 5.0,
        "load": "burst",
        "hardware": "a slide rule",
    },
    "collectives": {"op": "all_reduce", "bytes": 1024, "gpus": 8, "time_us": 5.0, "cluster": "a slide rule"},
    "memory": {**JOB, "peak_allocated_gb": 40.0},
    "fit": {**JOB, "completed": "true"},
    "steps": {**JOB, "step_time_s": 1.0},
}
"""One row for each table, on something that is in no catalogue."""


def run(path: Path, table: str, *rows: Mapping[str, object], options: tuple[str, ...] = ()) -> Result:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return CliRunner().invoke(main, ["validate", table, str(path), *options])


@pytest.mark.parametrize("table", UNKNOWN)
def test_nothing_predicted_is_no_success(tmp_path: Path, table: str) -> None:
    """One line says so, behind what is printed anyway; with --json stdout is the object alone."""
    path = tmp_path / "rows.csv"
    for options in ((), ("--json",)):
        found = run(path, table, UNKNOWN[table], UNKNOWN[table], options=options)
        assert found.exit_code == 1, found.output
        last = found.stderr.strip().splitlines()[-1]
        assert last.startswith(f"Error: none of the 2 rows of {path} could be predicted; most often: ")
    assert json.loads(found.stdout)["failures"] == 2


def test_one_row_that_can_be_predicted_is_enough(tmp_path: Path) -> None:
    known = {**UNKNOWN["kernels"], "hardware": "h100-sxm"}
    found = run(tmp_path / "rows.csv", "kernels", UNKNOWN["kernels"], known)
    assert found.exit_code == 0, found.output
    assert "1 rows predicted, 1 failed" in found.stdout
