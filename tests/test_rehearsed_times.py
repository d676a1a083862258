"""The table of published step times, and the command that holds rehearsals against it."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from foretrace.topologies.catalog import load_cluster

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks"
ROWS = tomllib.loads((FOLDER / "tables" / "rehearsed_times.toml").read_text())["run"]
TEXTS = ("name", "family", "dtype", "basis", "source", "script", "cluster")

SCRIPT = """
import torch

model = torch.nn.Linear(1024, 1024, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(4096, 1024, device="cuda")).sum().backward()
    optimizer.step()
"""

TABLE = """
[[run]]
name = "linear"
family = "small"
dtype = "fp32"
basis = "step"
source = "made up"
script = "linear.py"
arguments = []
cluster = "dgx-a100"
ranks = 1
measured_step_s = 0.5

[[run]]
name = "absent"
family = "small"
dtype = "fp32"
basis = "step"
source = "made up"
script = "linear.py"
arguments = []
needs = ["no_such_module"]
cluster = "dgx-a100"
ranks = 1
measured_step_s = 0.5
"""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_a_row_says_who_measured_what_and_can_be_rehearsed(row: dict[str, object]) -> None:
    assert all(isinstance(row[name], str) and row[name] for name in TEXTS)
    assert row["basis"] in {"step", "training"}
    assert isinstance(row["measured_step_s"], float)
    assert 0 < row["measured_step_s"] < 60
    assert isinstance(row["ranks"], int)
    assert load_cluster(str(row["cluster"]), row["ranks"]).n_gpus == row["ranks"]


def test_names_of_rows_are_their_own() -> None:
    names = [row["name"] for row in ROWS]
    assert len(set(names)) == len(names)


def test_a_row_is_rehearsed_and_one_that_lacks_a_package_is_named(tmp_path: Path) -> None:
    """The printed ratio is that of the printed times, and the other row says what to install."""
    pytest.importorskip("torch")
    (tmp_path / "linear.py").write_text(SCRIPT)
    (tmp_path / "table.toml").write_text(TABLE)
    command = [sys.executable, str(FOLDER / "rehearsed_times.py"), "--table", str(tmp_path / "table.toml")]
    done = subprocess.run(
        [*command, "--scripts", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        check=True,
    )
    assert "absent                                 left out: no_such_module not installed" in done.stdout
    found = re.search(r"^linear +(\S+) +(\S+) +(\S+)", done.stdout, re.MULTILINE)
    assert found, done.stdout + done.stderr
    measured, predicted, ratio = map(float, found.groups())
    assert measured == 500
    assert 0 < predicted < 50
    assert ratio == pytest.approx(predicted / measured, abs=0.006)
    assert "all                                      1 rows" in done.stdout
