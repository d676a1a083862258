"""A script that records itself and ends its own steps has these in a rehearsal, and records nothing."""

from pathlib import Path
from types import FrameType

import pytest
from tests.tracer.own_steps import N_STEPS, ROWS, WIDTH

from foretrace.tracer.rehearse.rehearsing import Asked, rehearse
from foretrace.tracer.rehearse.tape.steps import NOT_YET, names_step
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
    assert not any(NOT_YET in note for note in rehearsal.notes)
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
    assert not any(NOT_YET in note for note in found.notes)  # it names no steps


def test_a_rehearsal_that_ends_before_the_first_mark_says_so(tmp_path: Path, loaded: Loaded) -> None:
    notes = _rehearsed(tmp_path / "run", loaded, (1, 1), "4", "model").notes
    assert any(NOT_YET in note for note in notes)


ENDING = {
    "import foretrace\ndef loop():\n    foretrace.step": True,
    "import foretrace as ft\ndef loop():\n    ft.step": True,
    "def loop():\n    import foretrace\n    foretrace.step": True,
    "from foretrace import step as end\ndef loop():\n    end": True,
    "import foretrace\ndef loop():\n    foretrace.record": False,
    "import types\nother = types.ModuleType('other')\nother.step = 0\ndef loop():\n    other.step": False,
    "import foretrace\ndef loop():\n    'foretrace.step()'": False,
}


@pytest.mark.parametrize("is_caller", [False, True])
@pytest.mark.parametrize("source", ENDING)
def test_a_loop_may_end_steps_if_it_or_its_caller_names_the_function(source: str, *, is_caller: bool) -> None:
    """By whatever name; a step of another module is none, nor is another function of this."""
    known: dict[str, FrameType] = {}
    inner = "import sys\ndef inner():\n    return sys._getframe()\n"
    exec(f"{inner}{source}\n    return {'inner()' if is_caller else 'sys._getframe()'}\nit = loop()", known)
    assert names_step(known["it"]) is ENDING[source]
