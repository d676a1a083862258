"""A random number that a script reads is one that its generator draws."""

from pathlib import Path

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.traces.rehearsal import rehearsal_folder

torch = pytest.importorskip("torch")

SCRIPT = """
import torch
import torch.distributed as dist
dist.init_process_group("nccl")
model = torch.nn.Linear(2, 2, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    torch.manual_seed(7)
    print({drawn})
    model(torch.ones(1, 2, device="cuda")).sum().backward()
    optimizer.step()
"""
DRAWN = [
    '("one", "other")[int(torch.empty(1).uniform_(0.0, 2.0).item())]',
    "torch.rand(3).tolist()",
    "torch.empty(2).uniform_(1, 4).tolist()",
    "(torch.empty(1).uniform_() > 0.7).item()",
    "torch.arange(4)[torch.rand(4) > 0.5].tolist()",
    "torch.randn(9).argsort()[:4].tolist()",
    "torch.multinomial(torch.tensor([0.2, 0.3, 0.5]), 2).tolist()",
    "[int((torch.randn(64, 64) > 0).sum()), bool((torch.rand(64, 64) < 0.15).any())]",
]


@pytest.mark.parametrize("drawn", DRAWN)
def test_a_number_that_is_drawn_is_that_of_the_generator(drawn: str, tmp_path: Path) -> None:
    """Fractions, truths, orders, and what is selected by them: as many as a real run selects."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(drawn=drawn))
    rehearse(Asked(command=(str(script),), world_size=2, ranks=(0,)), tmp_path / "run")
    log = rehearsal_folder(tmp_path / "run") / "rank-00000" / "output.log"
    torch.manual_seed(7)
    assert log.read_text().splitlines() == [str(eval(drawn))] * 2
