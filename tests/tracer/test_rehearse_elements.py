"""A loop that fills a batch one by one, as a loader of nanochat does, is not followed at each of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.rehearsing import Asked

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

ROWS, TOKENS = 4, 16


class Count(TorchDispatchMode):
    n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        Count.n += bool(types)  # of fake tensors
        return func(*args, **(kwargs or {}))


def count(write):
    Count.n = 0
    with Count():
        write()
    return Count.n


def by_loop(batch):
    for at in range(ROWS * TOKENS):
        batch[at] = at


def in_two(rows):
    for row in range(ROWS):
        for at in range(TOKENS):
            rows[row, -1 - at] = True


dist.init_process_group("nccl")
torch.cuda.set_device(0)
model = torch.nn.Sequential(torch.nn.Embedding(64, 8), torch.nn.Linear(8, 64)).cuda()
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

known = torch.zeros(4, dtype=torch.long)
known[1] = 7
known[-1] = 2
assert known.tolist() == [0, 7, 0, 2]
assert known[1:].sum().item() == 9
places = torch.arange(6)
places[3] = 9
assert places.tolist() == [0, 1, 2, 9, 4, 5]
try:
    torch.empty(4)[4] = 1.0
except IndexError:
    pass
else:
    raise AssertionError("an index outside of a tensor is an error")
assert count(lambda: torch.empty(4, device="cuda").__setitem__(1, 1.0)) > 1
weight = torch.nn.Parameter(torch.empty(4))
try:
    weight[0] = 1.0
except RuntimeError:
    pass
else:
    raise AssertionError("a leaf that is trained cannot be written to")

scratch, mask = torch.empty(ROWS * TOKENS, dtype=torch.long), torch.empty(ROWS, TOKENS, dtype=torch.bool)
for _ in range(3):
    if sys.argv[1] == "loop":
        assert count(lambda: by_loop(scratch)) == 0
        assert count(lambda: in_two(mask)) == 0
    batch = scratch.view(ROWS, TOKENS).cuda()
    loss = model(batch).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_batch_that_a_loop_fills_trains_as_one_that_was_there(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    found = {
        kind: rehearse(Asked(command=("torchrun", str(script), kind), world_size=2), tmp_path / kind)
        for kind in ("loop", "whole")
    }
    assert found["loop"].memory == found["whole"].memory
    assert found["loop"].job["input_shape"] == found["whole"].job["input_shape"]
