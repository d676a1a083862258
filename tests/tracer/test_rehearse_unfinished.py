"""What DDP says of parameters without a gradient: the remedy that helps, which a real run shows."""

from pathlib import Path

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.rehearsing import Asked

pytest.importorskip("torch")

SCRIPT = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.tail = (torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        x = self.body(x)
        return {returned}


model = DistributedDataParallel(Two().cuda(), find_unused_parameters={finds})
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    first, *_ = model(torch.randn(4, 8, device="cuda"))
    first.sum().backward()
    optimizer.step()
"""
BOTH, NEITHER = "self.head(x), self.tail(x)", "self.head(x), 0"


@pytest.mark.parametrize("returned", [BOTH, NEITHER])
def test_torch_says_what_helps(tmp_path: Path, returned: str) -> None:
    script = tmp_path / "two.py"
    script.write_text(SCRIPT.format(returned=returned, finds=False))
    with pytest.raises(RehearsalError, match=r"not used in producing loss.*find_unused_parameters=True"):
        rehearse(Asked(command=(str(script),), world_size=2, ranks=(0,), samples=0), tmp_path / "run")


@pytest.mark.parametrize("returned", [BOTH, NEITHER])
def test_it_goes_through_with_that_remedy(tmp_path: Path, returned: str) -> None:
    """As over gloo, where the gradient of an output that is left out arrives as none."""
    script = tmp_path / "two.py"
    script.write_text(SCRIPT.format(returned=returned, finds=True))
    rehearse(Asked(command=(str(script),), world_size=2, ranks=(0,), samples=0), tmp_path / "run")
