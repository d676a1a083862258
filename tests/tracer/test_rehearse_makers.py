"""A script that puts functions of its own over torch's, which make tensors, changes what it makes itself."""

from pathlib import Path

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.rehearsing import Asked

pytest.importorskip("torch")

SCRIPT = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
names = "tensor empty zeros ones full arange eye randn".split()


def over(make):
    def made(*args, **kwargs):
        return make(*args, **{{"device": torch.device("cuda"), "dtype": torch.bfloat16, **kwargs}})

    return made


as_it_was = {{name: getattr(torch, name) for name in names}}
if {is_over}:
    for name in names:
        setattr(torch, name, over(as_it_was[name]))
places = as_it_was["arange"](24, device="cuda").view(4, 6)
buffer = as_it_was["zeros"](24, dtype=torch.int64, device="cuda")
buffer.narrow(0, 6, 6).copy_(places[2])
own = buffer.view(4, 6)[1].clone()
rows = dist.get_rank() + int(own.sum())
parts = [torch.empty_like(own) for _ in range(2)]
dist.all_gather(parts, own)
n_filled = int((buffer.view(2, 12) != 0).all(dim=1).sum())
for name in names:
    setattr(torch, name, as_it_was[name])
print(rows, int(parts[1][0]) + n_filled)
model = torch.nn.Linear(rows, rows).cuda()
for _ in range(3):
    model(torch.randn(4, rows, device="cuda")).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
"""


def test_numbers_are_followed_where_functions_that_make_tensors_are_a_scripts_own(tmp_path: Path) -> None:
    """As under ``deepspeed.zero.Init``: the same numbers, 12 + ... + 17, and 12."""
    sizes = []
    for is_over in (False, True):
        script = tmp_path / "train.py"
        script.write_text(SCRIPT.format(is_over=is_over))
        run = tmp_path / f"run{is_over}"
        rehearse(Asked(command=(str(script),), world_size=2, ranks=(0,)), run)
        sizes.append((run / "rehearsal/rank-00000/output.log").read_text().split()[:2])
    assert sizes == [["87", "12"]] * 2
