"""A random number that a script reads is one that could have been drawn."""

from pathlib import Path

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.traces.rehearsal import rehearsal_folder

pytest.importorskip("torch")

SCRIPT = """
import torch
import torch.distributed as dist
dist.init_process_group("nccl")
numbers = {drawn}
print(*(numbers if isinstance(numbers, list) else [numbers]))
model = torch.nn.Linear(2, 2, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(1, 2, device="cuda")).sum().backward()
    optimizer.step()
"""
PLACE = '("only",)[int(torch.empty(1).uniform_(0.0, 1.0).item())]'


@pytest.mark.parametrize(
    ("drawn", "told"),
    [
        (PLACE, "only"),
        ("torch.empty(1).uniform_().item()", "0.5"),
        ("torch.empty(2).uniform_(1, 4).tolist()", "2.5 2.5"),
        ("float(torch.empty(1).uniform_(to=6.0))", "3.0"),
        ("(torch.empty(1).uniform_() > 0.7).item()", "False"),
        ("(torch.empty(1).uniform_(1, 4) < 2).item()", "False"),
        ("torch.empty(1).uniform_(-0.5, 0.5).item()", "1.0"),
    ],
)
def test_a_number_that_is_drawn_is_told_within_its_bounds(drawn: str, told: str, tmp_path: Path) -> None:
    """As a place in a list of one, by which torchvision's detectors choose to what size they resize."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(drawn=drawn))
    rehearse(Asked(command=(str(script),), world_size=2, ranks=(0,)), tmp_path / "run")
    log = rehearsal_folder(tmp_path / "run") / "rank-00000" / "output.log"
    assert log.read_text().strip() == told


@pytest.mark.parametrize(
    "mask",
    [
        "rand(64, 64) < 0.15",
        "randn(64, 64) > 0",
        "bernoulli(torch.full((64, 64), 0.15)).bool()",
        "randn(9).ge(-1)",
    ],
)
def test_what_is_asked_of_a_random_mask_agrees_with_itself(mask: str, tmp_path: Path) -> None:
    """Some of many truths hold and some do not, as in nearly every real draw, however a script asks."""
    ways = "m.any(), not m.all(), m.sum() > 0, not m.sum() == 0, m.sum().item() > 0"
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(drawn=f"(lambda m: [bool(one) for one in ({ways})])(torch.{mask})"))
    rehearse(Asked(command=(str(script),), world_size=2, ranks=(0,)), tmp_path / "run")
    log = rehearsal_folder(tmp_path / "run") / "rank-00000" / "output.log"
    assert set(log.read_text().split()) == {"True"}
