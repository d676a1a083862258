"""Commands that pip has installed are rehearsed by the name that a shell knows them by."""

from pathlib import Path

import pytest

from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.rehearsing import Asked, rehearse
from foretrace.tracer.rehearse.world.launchers import launchers_of, script_of


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A command on the PATH, beside a program that Python does not run."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, first in (("train", "#!/usr/bin/python3"), ("program", "#!/bin/sh")):
        (folder / name).write_text(f"{first}\nprint()\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder / "train"


@pytest.mark.parametrize("before", [[], ["srun"], ["srun", "--ntasks", "8"], ["mpirun", "-n", "8"]])
def test_a_command_on_the_path_is_found_as_a_shell_finds_it(command: Path, before: list[str]) -> None:
    """Alone, and behind what starts any program; with its arguments."""
    words = [*before, "train", "sft", "--lr", "3"]
    assert script_of(words) == ((str(command), "sft", "--lr", "3"), False)
    assert launchers_of(words) == tuple(before[:1])


@pytest.mark.parametrize("words", [["program"], ["nothing"], ["torchrun", "train"], ["./train"]])
def test_other_words_are_left_as_they_are(command: Path, words: list[str]) -> None:
    """Programs that Python does not run, what is not there, and what torchrun would not look for."""
    assert command.is_file()
    assert script_of(words) == (tuple(words), False)


def test_a_file_of_the_folder_comes_first(command: Path, tmp_path: Path) -> None:
    (tmp_path / "train").write_text("print()\n")
    assert command.is_file()
    assert script_of(["train"]) == (("train",), False)


def test_what_is_nowhere_is_said(command: Path, tmp_path: Path) -> None:
    assert command.is_file()
    with pytest.raises(RehearsalError, match="nothing: no such script"):
        rehearse(Asked(command=("nothing",), world_size=2), tmp_path / "run")
