"""A script that records itself and ends its own steps has these in a rehearsal, and records nothing."""

from pathlib import Path

import pytest
from tests.tracer.own_steps import N_STEPS, ROWS, WIDTH

from foretrace.tracer.rehearse.rehearsing import Asked, rehearse
from foretrace.tracer.rehearse.world.acting import Loaded
from foretrace.traces.rehearsal import Rehearsal, read_rank, rehearsal_folder

SCRIPT = Path(__file__).parent / "own_steps.py"
PRODUCTS = 2 * 2 * ROWS * WIDTH * WIDTH
"""FLOPs of a forward and a backward: the rows ask for no gradient."""


def _rehearsed(folder: Path, loaded: Loaded, kept: tuple[int, int], *how: str) -> Rehearsal:
    command = (str(SCRIPT), str(folder.parent / "recorded"), *how)
    asked = Asked(command=command, world_size=2, ranks=(0,), warmup=kept[0], steps=kept[1])
    return rehearse(asked, folder, on=loaded)


def _per_step(folder: Path) -> dict[int, tuple[int, int]]:
    """FLOPs and number of sums of every step that is written down."""
    tables = read_rank(rehearsal_folder(folder), 0)
    places, works = tables.places.to_pylist(), tables.works.to_pylist()
    found: dict[int, tuple[int, int]] = {}
    for event in tables.events.to_pylist():
        step = places[event["place"]]["step"]
        flops, n_sums = found.get(step, (0, 0))
        if event["what"] == 0:
            flops += works[event["item"]]["flops"]
        found[step] = flops, n_sums + (event["what"] == 1)
    return found


@pytest.mark.parametrize("what", ["model", "tensors"])
@pytest.mark.parametrize(
    ("rounds", "kept"), [(1, (1, 1)), (2, (1, 1)), (2, (1, 2)), (3, (3, 1)), (2, (0, 99)), (1, (0, 99))]
)
def test_a_step_is_all_that_the_script_does_between_two_of_its_marks(
    tmp_path: Path, loaded: Loaded, what: str, rounds: int, kept: tuple[int, int]
) -> None:
    """Of more steps than there are, those are kept that are whole.

    No step of an optimizer had ended before, and something said where it begins: a call of a module.
    """
    folder = tmp_path / "run"
    rehearsal = _rehearsed(folder, loaded, kept, str(rounds), what)
    found, first = _per_step(folder), rehearsal.job["first_step"]
    n_whole = N_STEPS - (what == "tensors" or rounds > 1)
    assert len(found) == rehearsal.job["steps"] == min(kept[1], n_whole)
    assert [found[first + at] for at in range(len(found))] == [(rounds * PRODUCTS, rounds)] * len(found)
    assert not (tmp_path / "recorded").exists()


@pytest.mark.parametrize("what", ["model", "tensors"])
@pytest.mark.parametrize(("kept", "are"), [((1, 1), (2, 1)), ((0, 99), (1, N_STEPS - 1))])
def test_before_the_mark_that_begins_the_first_step_nothing_warms_up(
    tmp_path: Path, loaded: Loaded, what: str, kept: tuple[int, int], are: tuple[int, int]
) -> None:
    """Building is no step. What is made from then on is of a step, and of no parameter."""
    folder = tmp_path / "run"
    rehearsal = _rehearsed(folder, loaded, kept, "1", what, "begins")
    found, parameters = _per_step(folder), WIDTH * WIDTH * 4
    assert (rehearsal.job["first_step"], rehearsal.job["steps"]) == are
    assert [found[are[0] + at] for at in range(are[1])] == [(PRODUCTS, 1)] * are[1]
    assert rehearsal.memory["0"]["bytes"]["parameters"] == parameters
    assert "setup" not in {row["kind"] for row in read_rank(rehearsal_folder(folder), 0).places.to_pylist()}


def test_of_fewer_steps_than_were_asked_for_those_are_named_that_are_kept(
    tmp_path: Path, loaded: Loaded
) -> None:
    """Also those that were to warm up: they are in the times."""
    script = Path(__file__).parent / "where_there_is.py"
    asked = Asked(command=(str(script), "asked", ""), world_size=2, ranks=(0,), warmup=1, steps=9)
    found = rehearse(asked, tmp_path / "run", on=loaded)
    assert (found.job["first_step"], found.job["steps"]) == (0, 2)
    assert set(_per_step(tmp_path / "run")) == {0, 1}
    assert any(note.startswith("the script did 2 steps only: steps 0 to 1 were kept") for note in found.notes)
