"""Every command of the cookbook prints what the page shows; what is a closed form is held to it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from foretrace.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "cookbook.md"
TEXT = PAGE.read_text(encoding="utf-8")
SHOWN = dict(re.findall(r"^```\n\$ foretrace (.+)\n((?:.*\n)*?)```$", TEXT, re.MULTILINE))
FILES = re.findall(r"^```toml\n# (\S+)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(
            command,
            id=command.split()[0],
            marks=pytest.mark.slow if command.startswith("search") else [],
        )
        for command in SHOWN
    ],
)
def test_every_command_prints_what_the_page_shows(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    monkeypatch.chdir(tmp_path)
    for name, text in FILES:
        (tmp_path / name).write_text(text, encoding="utf-8")
    done = CliRunner(env={"COLUMNS": "110"}).invoke(main, shlex.split(command))
    assert done.exit_code == 0, done.output
    lines = [line.rstrip() for line in done.stdout.rstrip().splitlines()]
    shown = SHOWN[command].splitlines()
    if shown[-1] == "...":
        shown.pop()
        lines = lines[: len(shown)]
    assert lines == shown, "run python benchmarks/cookbook.py"


def test_an_all_reduce_over_cards_that_reach_gpu_memory_takes_what_the_page_works_out(tmp_path: Path) -> None:
    """2(n - 1)/n of 141 GB through one card of 12.5 GB/s per node, 94 % of it payload."""
    ((name, text),) = FILES
    (tmp_path / name).write_text(text, encoding="utf-8")
    words = ["topology", "cost", str(tmp_path / name), "all_reduce", "141 GB", "--gpus", "256", "--json"]
    found = json.loads(CliRunner().invoke(main, words, catch_exceptions=False).stdout)
    assert found["time_s"] == pytest.approx(2 * 255 / 256 * 141 / 12.5 / 0.94, rel=0.01)
