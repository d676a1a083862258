"""A script that calls no module has the steps of its optimizer, with all that each of them issues."""

from pathlib import Path

import pytest

from tests.tracer.unmoduled import HIDDEN, ROWS, WIDTH
from tracer.rehearse.acting import Loaded
from tracer.rehearse.errors import RehearsalError
from tracer.rehearse.rehearsing import Asked, rehearse
from tracer.rehearse.without_modules import FIRST_LEFT_OUT
from traces.rehearsal import Rehearsal, read_rank, rehearsal_folder

SCRIPT = Path(__file__).parent / "unmoduled.py"
PRODUCT = 2 * ROWS * WIDTH * HIDDEN
BYTES = WIDTH * HIDDEN * 4


def _rehearsed(folder: Path, loaded: Loaded, warmup: int, steps: int) -> Rehearsal:
    asked = Asked(
        command=(str(SCRIPT), "adamw", str(steps + 1)), world_size=2, ranks=(0,), warmup=warmup, steps=steps
    )
    return rehearse(asked, folder, on=loaded)


def _per_step(folder: Path) -> dict[int, tuple[int, list[int]]]:
    """FLOPs and bytes of sums of every step that is written down."""
    tables = read_rank(rehearsal_folder(folder), 0)
    places, works, sent = (getattr(tables, name).to_pylist() for name in ("places", "works", "messages"))
    found: dict[int, tuple[int, list[int]]] = {}
    for event in tables.events.to_pylist():
        flops, sizes = found.setdefault(places[event["place"]]["step"], (0, []))
        if event["what"] == 0:
            flops += works[event["item"]]["flops"]
        elif event["what"] == 1:
            sizes.append(sent[event["item"]]["size_bytes"])
        found[places[event["place"]]["step"]] = flops, sizes
    return found


@pytest.mark.parametrize(("warmup", "steps"), [(1, 1), (0, 1), (1, 2)])
def test_every_step_has_its_forward_its_backward_and_its_sums(
    tmp_path: Path, loaded: Loaded, warmup: int, steps: int
) -> None:
    """Two products forward, three backward: that for the rows' own gradient is nobody's."""
    folder = tmp_path / "run"
    notes = _rehearsed(folder, loaded, warmup, steps).notes
    found = _per_step(folder)
    assert [found[step] for step in range(1, 1 + steps)] == [(5 * PRODUCT, [BYTES, BYTES])] * steps
    assert any(FIRST_LEFT_OUT in note for note in notes) == (not warmup)


def test_the_peak_is_that_of_the_whole_step(tmp_path: Path, loaded: Loaded) -> None:
    """Both tensors with two states each, and of every row what the first product and its ReLU make."""
    peak = _rehearsed(tmp_path / "run", loaded, 1, 1).memory["0"]["peak_bytes"]
    assert peak >= 2 * 3 * BYTES + 2 * ROWS * HIDDEN * 4


def test_without_an_optimizer_either_a_line_says_that_nothing_tells_its_steps(
    tmp_path: Path, loaded: Loaded
) -> None:
    asked = Asked(command=(str(SCRIPT), "hand", "2"), world_size=2, ranks=(0,))
    with pytest.raises(RehearsalError, match=r"called no torch\.nn\.Module and no optimizer"):
        rehearse(asked, tmp_path / "run", on=loaded)
