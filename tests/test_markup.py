"""What a run, a path or a file says is printed as it is: never read as colours, never a reason to stop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from foretrace.cli import main
from foretrace.simulator.validate.render import show
from foretrace.simulator.validate.scores import Failed, Scored, Validation
from foretrace.traces.info import RunInfo
from foretrace.traces.store import write_run
from foretrace.traces.timeline import timeline

SAID = "[/x] [bold] [lr=1e-3]"
"""A tag that closes nothing, as gloo's errors have; one that would be eaten; one that people write."""

LINE = "a.py:100: told"
"""A line of a file between colons, which rich would take for the name of a picture."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of one rank whose name, warning, kinds, axes and folder are all ``SAID``."""
    columns: dict[str, object] = {
        "rank": [0, 0],
        "stream": ["compute", "c"],
        "category": ["compute", "collective"],
        "kind": [SAID, SAID],
        "axis": ["", SAID],
        "start_ns": [0, 10],
        "duration_ns": [10, 5],
        "step": [0, 0],
    }
    info = RunInfo(origin="recorded", world_size=1, name=SAID, warnings=(SAID, LINE))
    return write_run(tmp_path / SAID, info, timeline(columns))


def printed(*args: object) -> str:
    """Return what a verb prints for people, lines joined."""
    done = CliRunner().invoke(main, [str(arg) for arg in args])
    assert done.exit_code == 0, done.output
    return " ".join(done.stdout.split())


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """Settings of a job whose model is called ``SAID``."""
    model = tmp_path / "model.toml"
    model.write_text(f'base = "llama2-7b"\nname = "{SAID}"\n', encoding="utf-8")
    job = "--cluster dgx-h100 --gpus 8 --tp 8 --global-batch 2".split()
    return ["--model", str(model), *job]


def test_analyze_prints_names_and_warnings_as_they_are(run: Path) -> None:
    shown = printed("analyze", run)
    assert shown.startswith(SAID)
    assert f"! {SAID} ! {LINE}" in shown
    assert f"exposed {SAID}" in shown


def test_compare_prints_names_and_warnings_as_they_are(run: Path) -> None:
    shown = printed("compare", run, run)
    assert shown.count(f"{SAID}, step 0") == 2
    assert f"{SAID} {SAID} 1" in shown
    assert f"! {SAID}: {SAID}" in shown


def test_export_prints_paths_and_warnings_as_they_are(run: Path) -> None:
    output = run.parent / f"{run.name}.json"
    shown = printed("export", run, "-o", output)
    assert shown.startswith(f"{output}: 2 spans")
    assert f"! {SAID}" in shown


def test_simulate_prints_names_and_paths_as_they_are(flags: list[str], tmp_path: Path) -> None:
    output = tmp_path / SAID
    shown = printed("simulate", *flags, "-o", output)
    assert shown.startswith(SAID)
    assert f"run: {output}" in shown


def test_memory_prints_names_as_they_are(flags: list[str]) -> None:
    assert printed("memory", *flags).startswith(SAID)


def test_ingest_prints_paths_as_they_are(tmp_path: Path) -> None:
    events = [
        {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 0, "dur": 9, "args": {}},
    ]
    trace = tmp_path / f"{SAID.replace('/', '')}.json"
    trace.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    output = tmp_path / SAID
    assert printed("ingest", trace, "-o", output).startswith(f"{output} from")


def test_validate_prints_rows_and_reasons_as_they_are() -> None:
    rows = [Scored(id=SAID, family=SAID, group=SAID, what=SAID, predicted=1.0, measured=1.0)]
    failures = [Failed(id="y", family="b", reason=SAID)]
    found = Validation(kind="k", table="t", unit="us", rows=rows, failures=failures, notes=[SAID])
    console = Console(width=200)
    with console.capture() as shown:
        show(found, console, 1)
    text = " ".join(shown.get().split())
    assert f"{SAID} {SAID} 1" in text
    assert f"1 not predicted: {SAID}" in text
    assert text.endswith(SAID)
    assert text.count(SAID) == 6
