"""Every command of the cookbook runs and answers its question; what is a closed form is held to it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from foretrace import main

PAGE = Path(__file__).parents[2] / "docs" / "cookbook.md"
COMMANDS = re.findall(r"^\$ foretrace (.+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)

ANSWERS = {
    "advise": "sequences of up to",
    "bubble": "reaches 90 % from 279 micro-batches on",
    "search": "layouts considered",
    "topology": "bus bandwidth",
    "simulate": "step time",
}
"""What the answer to each verb's question holds, whatever the constants of today."""


def test_there_is_a_command_for_every_question() -> None:
    assert {command.split()[0] for command in COMMANDS} == set(ANSWERS)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(
            command,
            id=command.split()[0],
            marks=pytest.mark.slow if command.startswith("search") else [],
        )
        for command in COMMANDS
    ],
)
def test_every_command_runs_and_answers(command: str) -> None:
    pytest.importorskip("numba")
    done = CliRunner(env={"COLUMNS": "110"}).invoke(main, shlex.split(command))
    assert done.exit_code == 0, done.output
    assert ANSWERS[command.split(maxsplit=1)[0]] in " ".join(done.stdout.split())
