"""Where a process without a process group records: laws of the directories, without a recording."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from foretrace.tracer.process import RANKS, WORLD_SIZES
from foretrace.tracer.run_directory import beside, folder_alone, set_aside, settle


@pytest.fixture(autouse=True)
def started_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*RANKS, *WORLD_SIZES):
        monkeypatch.delenv(name, raising=False)


def filled(path: Path) -> Path:
    """Return the run directory *path*, in which rank 0 has written."""
    (path / "spans").mkdir(parents=True)
    (path / "spans" / "rank-00000.arrows").write_text(path.name)
    return path


def contents(path: Path) -> str:
    return (path / "spans" / "rank-00000.arrows").read_text()


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_process_on_its_own_gets_the_directory_that_was_asked_for(tmp_path: Path, is_shared: bool) -> None:
    assert folder_alone(tmp_path / "run", is_shared=is_shared) == tmp_path / "run"


def test_the_next_training_of_a_command_gets_one_beside_it(tmp_path: Path) -> None:
    """Only of a command that says so: elsewhere, a directory in use is refused later, in a line."""
    target = filled(tmp_path / "run")
    assert folder_alone(target, is_shared=False) == target
    assert folder_alone(target, is_shared=True) == tmp_path / f"run-process{os.getpid()}"


def test_one_of_many_has_its_number_in_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    monkeypatch.setenv("SLURM_PROCID", "3")
    for target in (tmp_path / "run", filled(tmp_path / "used")):
        assert folder_alone(target, is_shared=True) == tmp_path / f"{target.name}-task3"


def test_what_was_done_before_a_meeting_makes_way_for_the_group(tmp_path: Path) -> None:
    """Once and again: the directory that was asked for is free, and nothing that was recorded is lost."""
    target = tmp_path / "run"
    names = ["run-alone", f"run-process{os.getpid()}"]
    for number, name in enumerate(names, start=1):
        set_aside(filled(target), target, n_spans=5)
        assert not target.exists()
        assert [path.name for path in beside(target)] == sorted(names[:number])
        assert contents(tmp_path / name) == "run"


def test_what_is_beside_already_stays_where_it_is(tmp_path: Path) -> None:
    path = filled(tmp_path / "run-task1")
    set_aside(path, tmp_path / "run", n_spans=5)
    assert contents(path) == "run-task1"
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("name", ["run", "run-task1"])
def test_nothing_recorded_before_a_meeting_leaves_nothing(tmp_path: Path, name: str) -> None:
    set_aside(filled(tmp_path / name), tmp_path / "run", n_spans=0)
    assert [*tmp_path.iterdir()] == []


def test_the_first_to_end_gets_the_directory_and_others_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "run"
    first, second = (filled(tmp_path / f"run-task{number}") for number in (0, 1))
    assert settle(second, target) == target
    assert capsys.readouterr().err == ""
    assert settle(first, target) == first
    assert capsys.readouterr().err == f"foretrace: recorded into {first}: run is of another process\n"
    assert settle(target, target) == target
    assert (contents(target), contents(first)) == ("run-task1", "run-task0")
    assert sorted(tmp_path.iterdir()) == [target, first]
    assert capsys.readouterr().err == ""
