"""A script that calls no module has the steps of its optimizer, with all that each of them issues."""

from itertools import groupby
from operator import itemgetter
from pathlib import Path

import pytest
from tests.tracer.unmoduled import HIDDEN, ROWS, WIDTH

from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.rehearsing import Asked, rehearse
from foretrace.tracer.rehearse.tape.steps import FIRST_LEFT_OUT
from foretrace.tracer.rehearse.world.acting import Loaded
from foretrace.traces.rehearsal import Rehearsal, read_rank, rehearsal_folder

SCRIPT = Path(__file__).parent / "unmoduled.py"
PRODUCT = 2 * ROWS * WIDTH * HIDDEN
BYTES = WIDTH * HIDDEN * 4


def _rehearsed(folder: Path, loaded: Loaded, warmup: int, steps: int, way: str = "adamw") -> Rehearsal:
    how = ("adamw", str(steps + 1), "2") if way == "micro-batches" else (way, str(steps + 1))
    asked = Asked(command=(str(SCRIPT), *how), world_size=2, ranks=(0,), warmup=warmup, steps=steps)
    return rehearse(asked, folder, on=loaded)


def _per_step(folder: Path) -> dict[int, list[tuple[str, str, int, int]]]:
    """Return what each step does in turn: kind and name of the place, FLOPs, bytes of sums."""
    tables = read_rank(rehearsal_folder(folder), 0)
    places, works, sent = (getattr(tables, name).to_pylist() for name in ("places", "works", "messages"))
    found: dict[int, list[tuple[str, str, int, int]]] = {}
    for number, events in groupby(tables.events.to_pylist(), key=itemgetter("place")):
        part = list(events)
        flops = sum(works[event["item"]]["flops"] for event in part if event["what"] == 0)
        size = sum(sent[event["item"]]["size_bytes"] for event in part if event["what"] == 1)
        place = places[number]
        found.setdefault(place["step"], []).append((place["kind"], place["name"], flops, size))
    return found


def _passes(*rows: str) -> list[tuple[str, str, int, int]]:
    """Rows, which are made at a place, two products forward, three backward: none for the rows."""
    kind, name = rows
    return [(kind, name, 0, 0), ("forward", "loss", 2 * PRODUCT, 0), ("backward", "loss", 3 * PRODUCT, 0)]


FIRST, SUMS = _passes("forward", "input"), ("optimizer", "gradients", 0, 2 * BYTES)
ADAMW, SGD, ADAGRAD = (("optimizer", name, 0, 0) for name in ("AdamW", "SGD", "Adagrad"))
WAYS = {
    "adamw": [*FIRST, SUMS, ADAMW],
    "micro-batches": [*FIRST, *_passes("optimizer", "gradients"), SUMS, ADAMW],
    "two": [*_passes("optimizer", "SGD"), SGD, *_passes("optimizer", "Adagrad"), ADAGRAD],
}


@pytest.mark.parametrize(
    ("way", "warmup", "steps"), [("adamw", 0, 1), ("adamw", 1, 2), ("micro-batches", 1, 1), ("two", 1, 2)]
)
def test_every_step_has_its_forwards_its_backwards_and_its_sums(
    tmp_path: Path, loaded: Loaded, way: str, warmup: int, steps: int
) -> None:
    """Each at its place, micro-batch by micro-batch, and those of a closure within its optimizer."""
    folder = tmp_path / "run"
    notes = _rehearsed(folder, loaded, warmup, steps, way).notes
    found = _per_step(folder)
    assert [found[step] for step in range(1, 1 + steps)] == [WAYS[way]] * steps
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


IN_CLOSURE = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 16).cuda())


class Closed(torch.optim.SGD):
    def step(self, closure):
        with torch.enable_grad():
            closure()
        return super().step()


optimizer = Closed(model.parameters(), lr=0.1)


def closure():
    optimizer.zero_grad()
    model(torch.randn(4, 16, device="cuda")).sum().backward()


for _ in range(3):
    optimizer.step(closure)
"""


def test_a_module_that_the_first_closure_calls_begins_the_first_step(tmp_path: Path, loaded: Loaded) -> None:
    """Nothing of it is left out: an optimizer that calls its closure steps before any module is called."""
    script = tmp_path / "script.py"
    script.write_text(IN_CLOSURE)
    asked = Asked(command=(str(script),), world_size=2, ranks=(0,), warmup=0, steps=2)
    found = rehearse(asked, tmp_path / "run", on=loaded)
    assert not any(FIRST_LEFT_OUT in note for note in found.notes)
    flops = [sum(part[2] for part in _per_step(tmp_path / "run")[step]) for step in (0, 1)]
    assert flops == [2 * 2 * 4 * 16 * 16] * 2  # forward, and the gradient of the weights
