"""Ranks that load the same rows are told from ranks with rows of their own, by what they have loaded."""

from pathlib import Path

import pytest
from tests.rehearsals import rehearse

from foretrace.simulator.rehearsed.figures import rows_and_tokens
from foretrace.tracer.rehearse.ranks import rows
from foretrace.tracer.rehearse.rehearsing import Asked

pytest.importorskip("torch")

ROWS, RANKS = 4, 4

SCRIPT = """
import random
import numpy
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(rank)
data = [numpy.arange(8, dtype="float32") + i for i in range(400)]
cut = lambda batch: batch
model = torch.nn.Sequential(torch.nn.Linear({width}, 8), torch.nn.Linear(8, 8)).cuda()
{made}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
for step, batch in zip(range(3), loader):
    model(cut(batch.cuda())).sum().backward()
    optimizer.step()
"""
DDP = "model = DistributedDataParallel(model)\n"
TP = """
mesh = init_device_mesh("cuda", (world,), mesh_dim_names=("tp",))
model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
"""
OWN = "loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))"
PLAIN = "loader = DataLoader(data, batch_size=4)"
SEEDED = "torch.manual_seed(1)\nloader = DataLoader(data, batch_size=4, shuffle=True)"
FREE = "loader = DataLoader(data, batch_size=4, shuffle=True)"
SUBSET = "data = data[rank::world]\nloader = DataLoader(data, batch_size=4)"
ALIKE = "loader = DataLoader([numpy.ones(8, numpy.float32)] * 400, batch_size=4)"
STREAM = """
class Stream(IterableDataset):
    def __iter__(self):
        return iter(data[{}])
loader = DataLoader(Stream(), batch_size=4)
"""
FAKE = "loader = DataLoader([torch.randn(8) for _ in range(100)], batch_size=4)"
CUT = "cut = lambda batch: batch.chunk(world, 1)[rank]\n"
MIXED = "random.shuffle(data)\nloader = DataLoader(data, batch_size=4)"


@pytest.mark.parametrize(
    ("made", "n_shares", "note"),
    [
        (DDP + OWN, RANKS, ""),
        (DDP + PLAIN, 1, rows.SHARED),
        (DDP + SEEDED, 1, rows.SHARED),
        (DDP + FREE, RANKS, ""),
        (DDP + MIXED, RANKS, ""),
        (DDP + SUBSET, RANKS, ""),
        (DDP + STREAM.format("rank::world"), RANKS, ""),
        (DDP + STREAM.format(":"), 1, rows.SHARED),
        (DDP + ALIKE, RANKS, rows.DRAWN),
        (DDP + FAKE, RANKS, rows.DRAWN),
        (DDP + CUT + PLAIN, RANKS, rows.PARTS),
        (TP + PLAIN, 1, ""),
        (TP + OWN, 1, rows.OTHERS),
    ],
)
def test_rows_count_once_where_ranks_load_the_same(
    made: str, n_shares: int, note: str, tmp_path: Path
) -> None:
    """Without a seed ranks shuffle each in its own way; whether they share is said where it is not known."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(made=made, width=2 if "chunk" in made else 8))
    found = rehearse(Asked(command=(str(script),), world_size=RANKS), tmp_path / "run")
    assert rows_and_tokens(found)[0] == ROWS * n_shares
    said = [one for one in found.notes if "rank" in one]
    assert said == [note.format(one=0, other=RANKS - 1)] * bool(note)
