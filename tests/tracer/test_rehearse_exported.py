"""Models that ``torch.export`` has traced, as ``pipeline()`` does: what it writes into their graphs runs."""

from pathlib import Path

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.traces.rehearsal import read_rank, rehearsal_folder

pytest.importorskip("torch")

ROWS, WIDTH, MICROBATCHES = 4, 8, 2

CUT = f"""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear({WIDTH}, {WIDTH}, bias=False)
        self.register_buffer("mask", torch.ones({WIDTH}))

    def forward(self, x):
        left, right = self.linear(x).masked_fill(self.mask.bool(), 0.0).chunk(2, dim=-1)
        return torch.cat((left, right), dim=-1)


dist.init_process_group("nccl")
rank, device = dist.get_rank(), torch.device("cuda", int(os.environ["LOCAL_RANK"]))
model = nn.Sequential(Masked(), Masked())
pipe = pipeline(model, (torch.zeros({ROWS}, {WIDTH}),), split_spec={{"1": SplitPoint.BEGINNING}})
assert any("_assert_tensor" in str(getattr(one, "graph", "")) for one in pipe.split_gm.modules())
stage = pipe.build_stage(rank, device=device)
schedule = ScheduleGPipe(stage, {MICROBATCHES}, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
x = torch.randn({ROWS * MICROBATCHES}, {WIDTH}, device=device)
for _ in range(2):
    schedule.step(*([x] if rank == 0 else []), **({{"target": x}} if rank else {{}}))
    optimizer.step()
"""


def test_casts_that_an_exported_graph_asserts_run_on_the_gpu(tmp_path: Path) -> None:
    """Each stage multiplies and sends as often as its micro-batches say."""
    script = tmp_path / "train.py"
    script.write_text(CUT)
    rehearse(Asked(command=(str(script),), world_size=2, ranks=(0, 1)), tmp_path / "run")
    product = 2 * ROWS * WIDTH * WIDTH
    for rank, products in ((0, 2), (1, 3)):  # forward and weights; the last stage sends a gradient back
        table = read_rank(rehearsal_folder(tmp_path / "run"), rank)
        works, messages = table.works.to_pylist(), table.messages.to_pylist()
        events = table.events.to_pylist()
        flops = sum(works[event["item"]]["flops"] for event in events if event["what"] == 0)
        assert flops == products * MICROBATCHES * product
        sizes = [messages[event["item"]]["size_bytes"] for event in events if event["what"] == 1]
        assert sizes == [ROWS * WIDTH * 4] * (2 * MICROBATCHES)
