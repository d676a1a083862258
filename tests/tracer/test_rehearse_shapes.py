"""A script that takes a shape for a tensor has its numbers, as models of pictures of many sizes do."""

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
sizes = torch.stack([torch._shape_as_tensor(torch.ones(2, 3, n, n + 1))[2:4] for n in (4, 8)])
print(sizes.dtype, sizes.device, sizes.to("cuda").prod(1).cumsum(0).tolist())
model = torch.nn.Linear(4, 4).to("cuda")
for _ in range(2):
    model(torch.ones(4, 4).to("cuda")).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
"""


def test_a_shape_as_a_tensor_has_its_numbers(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    rehearse(Asked(command=(str(script),), world_size=2, ranks=(0,)), tmp_path / "run")
    printed = (rehearsal_folder(tmp_path / "run") / "rank-00000" / "output.log").read_text()
    assert printed.splitlines()[0] == f"torch.int64 cpu {[4 * 5, 4 * 5 + 8 * 9]}"
