"""Losses over no elements, as of a mask that selects nothing: empty gradients, and no error."""

from pathlib import Path

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.traces.rehearsal import read_rank, rehearsal_folder

pytest.importorskip("torch")

SCRIPT = """
import torch
import torch.nn.functional as F

model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
mask = torch.tensor([{chosen}] * 3).cuda()
for _ in range(2):
    out, goal = model(torch.ones(3, 4, device="cuda")), torch.zeros(3, 4, device="cuda")
    F.{loss}(out[mask], goal[mask]).backward()
    optimizer.step()
print(tuple(model.weight.grad.shape))
"""
WEIGHT = 2 * 3 * 4 * 4
"""FLOPs of the product of the layer, and of the one that makes the gradient of its weight."""


@pytest.mark.parametrize("loss", ["mse_loss", "smooth_l1_loss", "huber_loss"])
@pytest.mark.parametrize("chosen", [True, False])
def test_a_loss_over_no_elements_has_a_gradient_without_any(tmp_path: Path, loss: str, chosen: bool) -> None:
    """As on a GPU, where the backward pass goes on behind the mask."""
    script = tmp_path / "masked.py"
    script.write_text(SCRIPT.format(loss=loss, chosen=chosen))
    rehearse(Asked(command=(str(script),), world_size=1, ranks=(0,), warmup=0, steps=9), tmp_path / "run")
    folder = rehearsal_folder(tmp_path / "run")
    works, events = (getattr(read_rank(folder, 0), name).to_pylist() for name in ("works", "events"))
    assert sum(works[event["item"]]["flops"] for event in events if event["what"] == 0) == 2 * 2 * WEIGHT
    assert (folder / "rank-00000" / "output.log").read_text().endswith("(4, 4)\n")
