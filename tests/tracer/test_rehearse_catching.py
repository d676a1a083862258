"""A script that catches an error of the rehearsal alone is not rehearsed without what it leaves out."""

import gc
import weakref
from pathlib import Path

import pytest
from tests.tracer.catching import MICROBATCHES, WIDTH

from foretrace.tracer.rehearse.errors import Finished, RehearsalError
from foretrace.tracer.rehearse.rehearsing import Asked, rehearse
from foretrace.tracer.rehearse.words import CAUGHT, Failures
from foretrace.tracer.rehearse.world.acting import Loaded
from foretrace.traces.rehearsal import Rehearsal, read_rank, rehearsal_folder

SCRIPT = Path(__file__).parent / "catching.py"


def _rehearsed(kind: str, folder: Path, loaded: Loaded, world_size: int = 2) -> Rehearsal:
    asked = Asked(command=(str(SCRIPT), kind), world_size=world_size, ranks=(0,))
    return rehearse(asked, folder, on=loaded)


@pytest.mark.parametrize("ending", ["", "-exit"])
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("custom", r"catching.py:\d+: the output of the custom operator catching::kernel is not described"),
        ("pick", r"catching.py:\d+: aten._unique2.default needs values"),
        ("graph", r"catching.py:\d+: CUDA graphs cannot be rehearsed"),
    ],
)
def test_what_no_real_run_would_catch_ends_the_rehearsal(
    kind: str, said: str, ending: str, tmp_path: Path, loaded: Loaded
) -> None:
    """Whether the script goes on or ends with words of its own: the first cause is said."""
    with pytest.raises(RehearsalError, match=said):
        _rehearsed(kind + ending, tmp_path / "run", loaded)
    assert not (tmp_path / "run").exists()


def test_what_a_real_run_would_catch_is_said(tmp_path: Path, loaded: Loaded) -> None:
    """A GPU refuses such a product, too: the script goes on as there."""
    notes = _rehearsed("unlike", tmp_path / "run", loaded).notes
    assert sum("has caught an error of an operator" in note and "aten.mm" in note for note in notes) == 1


def test_unlike_microbatches_are_all_run_though_the_script_catches_what_asks_for_it(
    tmp_path: Path, loaded: Loaded
) -> None:
    """FLOPs of all: a product each, one more in the last, whose input asks for a gradient."""
    _rehearsed("pipeline", tmp_path / "run", loaded, world_size=1)
    tables = read_rank(rehearsal_folder(tmp_path / "run"), 0)
    works = tables.works.to_pylist()
    flops = sum(works[event["item"]]["flops"] for event in tables.events.to_pylist() if event["what"] == 0)
    assert flops == 2 * WIDTH * WIDTH * (2 * MICROBATCHES + 3)


class Telling:
    """Stands in for the session of a rank: keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def warn(self, warning: str) -> None:
        """Keep *warning*."""
        self.notes.append(warning)


def test_an_error_is_said_in_a_short_line_and_given_up() -> None:
    """With the step in which it was caught: its frames hold tensors."""
    session, error = Telling(), type("OwnError", (RuntimeError,), {})("line of it\n" * 99)
    failures, freed = Failures(session), weakref.ref(error)
    failures.add(error)
    failures.step_ended()
    del error
    gc.collect()
    assert freed() is None
    (note,) = session.notes
    assert "OwnError: line of it line of it" in note
    assert len(note) <= len(CAUGHT) + 200
    failures.step_ended()
    assert session.notes == [note]


def test_a_full_device_is_for_the_script_to_catch() -> None:
    torch = pytest.importorskip("torch")
    session = Telling()
    failures = Failures(session)
    failures.add(torch.OutOfMemoryError("full"))
    failures.step_ended()
    assert session.notes == []


def test_a_refusal_of_one_rank_is_not_that_of_the_next() -> None:
    """A process keeps all that it has raised."""
    refused = RehearsalError("of the rank before")
    try:
        failures = Failures(Telling())
        failures.step_ended()
        RehearsalError("that torch has asked for, and taken away before it came to a line of Python")
        assert failures.refusal() is None
        with pytest.raises(RehearsalError) as own:
            raise RehearsalError("of this one")
        assert failures.refusal() is own.value
        with pytest.raises(Finished):
            failures.step_ended()
    finally:
        del RehearsalError.raised[RehearsalError.raised.index(refused) :]
