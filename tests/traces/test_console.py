"""How wide the lines of verbs are: a terminal has its width, a file or a pipe has one that cuts no table."""

from __future__ import annotations

import io
import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.table import Table

from foretrace.cli import main
from foretrace.traces.console import FILE_WIDTH, stdout, telling
from foretrace.traces.run import Run
from foretrace.traces.store import write_run

JOB = "simulate --model llama2-7b --cluster dgx-h100 --gpus 8 --tp 8 --global-batch 2".split()
SEARCH = "search --model llama2-7b --cluster dgx-h100 --gpus 2 --global-batch 2 --top 3".split()
MEMORY = "memory --model llama2-7b --cluster dgx-h100 --gpus 8 --tp 8 --global-batch 2".split()


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("words", [JOB, SEARCH, MEMORY, ["topology", "list"]], ids=lambda words: words[0])
def test_a_pipe_gets_whole_lines_without_padding(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    if words[0] != "topology":  # its lines fit a terminal of 80 columns
        assert 80 < max(map(len, lines)) <= FILE_WIDTH
    assert "…" not in done.stdout
    assert [line for line in lines if line != line.rstrip()] == []


@pytest.mark.parametrize("columns", [60, 200])
def test_the_environment_sets_another_width(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert stdout().width == columns
    monkeypatch.setattr(sys, "stdout", _Terminal())
    assert stdout().width == columns


def test_no_width_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    for file in (io.StringIO(), _Terminal()):
        monkeypatch.setattr(sys, "stdout", file)
        assert stdout().width > 20


def test_what_a_run_says_gives_a_terminal_no_orders(pipeline_run: Run, tmp_path: Path) -> None:
    """Not to change the title of its window, nor what its user pastes; a colour is harmless."""
    write_run(
        tmp_path / "run",
        replace(pipeline_run.info, name="red\x1b[31m \x1b]0;title\x9b2J"),
        pipeline_run.spans(),
    )
    for words in (["analyze", str(tmp_path / "run")], ["compare", *[str(tmp_path / "run")] * 2]):
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 0, done.output
        assert r"\x1b]0;title\x9b2J" in done.stdout
        assert not set("\x1b\x9b") & set(done.stdout.replace("\x1b[31m", ""))


@pytest.mark.parametrize("quiet", [False, True])
def test_progress_is_told_to_people_only(quiet: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a terminal, on the error stream; in a file, or with ``--json``, nobody is told anything."""
    monkeypatch.setenv("TERM", "xterm")
    for file in (_Terminal(), io.StringIO()):
        printed = io.StringIO()
        monkeypatch.setattr(sys, "stderr", file)
        monkeypatch.setattr(sys, "stdout", printed)
        now_s = itertools.count(0.0, 3.0)
        monkeypatch.setattr("foretrace.traces.console.time.monotonic", lambda now_s=now_s: next(now_s))
        with telling("simulating", quiet=quiet) as tell:
            assert (tell is None) == quiet
            for n in range(5):
                if tell is not None:
                    tell(f"adding up {n}")
        assert ("adding up" in file.getvalue()) == (tell is not None)
        if (
            tell is not None and not file.isatty()
        ):  # a line every five seconds: of words told every three, half
            assert file.getvalue().splitlines() == ["simulating: adding up 1", "simulating: adding up 3"]
        assert not printed.getvalue()


def test_a_table_in_a_pipe_says_what_it_says_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("name")
    table.add_column("value")
    table.add_row("step", "1")
    table.add_row("a longer name", "2")
    monkeypatch.setenv("TERM", "dumb")
    pipe, terminal = io.StringIO(), _Terminal()
    for file in (pipe, terminal):
        monkeypatch.setattr(sys, "stdout", file)
        stdout().print(table)
    assert pipe.getvalue() == "".join(f"{line.rstrip()}\n" for line in terminal.getvalue().splitlines())
    assert pipe.getvalue() != terminal.getvalue()
