"""Without numba, an extra, what needs it says so; it does not answer as if no layout or row were possible."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from foretrace.cli import main

JOB = "--model llama3-8b --cluster dgx-h100 --gpus 8 --global-batch 64 --seq-len 4096".split()


@pytest.fixture(autouse=True)
def _no_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretrace.simulator.engine.find_spec", lambda _: None)


@pytest.mark.parametrize(
    "words",
    [
        ["search", *JOB],
        ["search", *JOB, "--report", "page.html"],
        ["calibrate", *JOB, "--step-time", "3 s", "-o", "calibration.toml"],
        ["validate", "steps", "table.csv"],
    ],
    ids=["search", "search with a page", "calibrate", "validate"],
)
def test_it_is_named_with_the_way_to_get_it(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 2, done.output
    assert "needs numba: pip install numba" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_advice_is_given_without_the_layouts_that_only_a_search_finds() -> None:
    done = CliRunner().invoke(main, ["advise", *JOB])
    assert done.exit_code == 0, done.output
    assert "a search needs numba: pip install numba" in " ".join(done.stdout.split())
