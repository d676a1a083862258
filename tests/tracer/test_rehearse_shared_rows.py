"""Ranks that load the same rows are told from ranks with rows of their own, by what they have loaded."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.rehearsals import rehearse, rows_and_tokens

from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.tracer.rehearse.world import batch
from foretrace.tracer.rehearse.world.batch import batch_of
from foretrace.traces.batch import Batch, batch_in
from foretrace.traces.layout import Group, Layout

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
        (DDP + PLAIN, 1, batch.SHARED),
        (DDP + SEEDED, 1, batch.SHARED),
        (DDP + FREE, RANKS, ""),
        (DDP + MIXED, RANKS, ""),
        (DDP + SUBSET, RANKS, ""),
        (DDP + STREAM.format("rank::world"), RANKS, ""),
        (DDP + STREAM.format(":"), 1, batch.SHARED),
        (DDP + ALIKE, None, batch.DRAWN),
        (DDP + FAKE, RANKS, ""),
        (DDP + CUT + PLAIN, None, batch.PARTS),
        (TP + PLAIN, 1, ""),
        (TP + OWN, None, batch.OTHERS),
    ],
)
def test_rows_count_once_where_ranks_load_the_same(
    made: str, n_shares: int | None, note: str, tmp_path: Path
) -> None:
    """Without a seed ranks shuffle each in its own way; whether they share is said where it is not known."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(made=made, width=2 if "chunk" in made else 8))
    found = rehearse(Asked(command=(str(script),), world_size=RANKS), tmp_path / "run")
    said = [one for one in (*found.notes, batch_in(found.job).unknown) if "rank" in one]
    assert rows_and_tokens(found)[0] == (None if n_shares is None else ROWS * n_shares)
    assert said == [note.format(one=0, other=RANKS - 1)] * bool(note)
    is_dealt = n_shares == RANKS and "DistributedSampler.num_replicas" in batch_in(found.job).equation
    assert is_dealt == (made == DDP + OWN)


PART = {"rows": 6, "tokens": 30, "words": "6 rows × 5"}
BATCHES = {"same": [["a", "x"]], "other": [["b", "y"]], "": []}
ALONG = {
    "tp": Group(id=1, axis="tp", ranks=(0, 1)),
    "dp": Group(id=2, axis="dp", ranks=(0, 2)),
    "pp": Group(id=3, axis="pp", ranks=(0, 4)),
    "world": Group(id=4, axis="world", ranks=tuple(range(8))),
}


def of(
    layout: Layout | None = None, groups: Sequence[str] = (), seen: str = "", other: int = 2, **first: Any
) -> Batch:
    """Return the batch of 8 ranks, of which 0 and *other* have been rehearsed."""
    common = {"part": PART, "batches": BATCHES["same"], "is_batch": True, "dealt": {}, "job": {}}
    outcomes = {0: {**common, **first}, other: {**common, "batches": BATCHES[seen]}}
    return batch_of(outcomes, [ALONG[name] for name in groups], layout, 8)[0]


def dealt(n: int) -> dict[str, int]:
    return {"Sampler.num_replicas": n}


def test_rows_are_dealt_out_along_data_and_context() -> None:
    """Ranks along others work on the same; so it is too where groups alone say what they are along."""
    both = Layout(dp=2, cp=2, tp=2)
    assert of(both, other=4) == replace(of(both, other=4), rows=4 * 6, tokens=4 * 30)
    assert of(both, other=4, seen="same").rows == 2 * 6  # parts of a sequence still differ
    assert of(both, job={"input_shards": 2}).rows == 8 * 6
    groups = of(groups=("tp", "dp", "pp"))
    assert (groups.rows, groups.tokens) == (2 * 6, 2 * 30)
    assert groups.words == "tokens/step = 6 rows × 5 × dp 2 (gradients are summed) = 60"


@pytest.mark.parametrize(("replicate", "shard"), [(2, 2), (2, 4), (3, 3), (4, 4)])
def test_hybrid_sharding_of_any_degrees_has_the_rows_of_all_its_ranks(replicate: int, shard: int) -> None:
    n = replicate * shard
    summed = [tuple(range(0, n, shard)), tuple(range(shard))]
    for over in (summed, [*summed, tuple(range(n))]):
        groups = [Group(id=at, axis="dp", ranks=ranks) for at, ranks in enumerate(over)]
        one = {"part": PART, "batches": BATCHES[""], "is_batch": True, "dealt": {}, "job": {}}
        assert batch_of({0: one}, groups, None, n)[0].rows == 6 * n


def test_what_a_sampler_says_has_to_fit() -> None:
    """It is evidence beside the groups, or in their place; what disagrees ends in the reason."""
    for layout, groups in ((Layout(dp=8), ()), (None, ()), (None, ("world",))):
        found = of(layout, groups, dealt=dealt(8), seen="other")
        assert found.equation.endswith("dp 8 (Sampler.num_replicas; ranks 0 and 2 load different rows)")
        assert of(layout, groups, dealt=dealt(4)).rows is None
    assert "deals rows out to 8" in of(Layout(dp=8), dealt=dealt(8), seen="same").unknown
    assert "deals rows out to 8" in of(Layout(dp=4, tp=2), dealt=dealt(8)).unknown


def test_without_evidence_nothing_is_said() -> None:
    assert of().unknown == of(groups=("world",)).unknown == of(groups=("tp", "dp")).unknown
    assert "account for all 8 ranks" in of().unknown
    assert of(Layout(dp=8), part={"unknown": "why"}).unknown == "why"
    uneven = of(Layout(dp=8), part={**PART, "words": "7 rows × 5"})
    assert uneven.unknown == "rank 0 trains on 7 rows × 5 in a step, rank 2 on 6 rows × 5"
