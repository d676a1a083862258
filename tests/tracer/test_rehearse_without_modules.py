"""A script that calls no module is told to say where its steps are; one whose closure calls one need not."""

from pathlib import Path

import pytest

from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.rehearsing import Asked, rehearse
from foretrace.tracer.rehearse.world.acting import Loaded
from foretrace.traces.rehearsal import read_rank, rehearsal_folder

SCRIPT = Path(__file__).parent / "unmoduled.py"


@pytest.mark.parametrize("way", ["adamw", "two"])
def test_plain_tensors_that_an_optimizer_steps_end_in_a_line(
    tmp_path: Path, loaded: Loaded, way: str
) -> None:
    """However long it would go on."""
    asked = Asked(command=(str(SCRIPT), way, "1000000"), world_size=2, ranks=(0,))
    with pytest.raises(RehearsalError, match=r"no torch\.nn\.Module is called.* call foretrace\.step\(\)"):
        rehearse(asked, tmp_path / "run", on=loaded)


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
    assert found.job["first_step"] == 0
    tables = read_rank(rehearsal_folder(tmp_path / "run"), 0)
    works, places = tables.works.to_pylist(), tables.places.to_pylist()
    flops = [0, 0]
    for event in tables.events.to_pylist():
        flops[places[event["place"]]["step"]] += works[event["item"]]["flops"] if event["what"] == 0 else 0
    assert flops == [2 * 2 * 4 * 16 * 16] * 2  # forward, and the gradient of the weights
