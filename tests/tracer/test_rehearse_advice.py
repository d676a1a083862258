"""Advice has figures that follow from shapes, FLOPs and rows, and is silent where nothing is wrong."""

from pathlib import Path
from typing import Any

import pytest
from tests.rehearsals import rehearse
from tests.simulator.rehearsal_tables import tables, work

from foretrace.tracer.rehearse.advice import findings
from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.traces.layout import Group
from foretrace.traces.rehearsal import read_rank, rehearsal_folder

pytest.importorskip("torch")

RANKS, WIDTH, ROWS = 4, 8, 10

QUIET: dict[str, Any] = {"gathered": (0, 0), "uneven": []}
"""What a rank tells of which nothing is to be said."""

SCRIPT = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("dp",))
model = fully_shard(torch.nn.Linear({width}, {out}).cuda(), mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = [torch.ones({width}) * i for i in range({rows})]
loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data))
for _ in range(4):
    for batch in loader:
        model(batch.cuda()).sum().backward()
        optimizer.step()
"""


def advised(folder: Path, out: int, rows: int) -> tuple[dict[str, Any], int]:
    """Return the findings by name, and the numbers that one gather of the parameters has."""
    script = folder / "train.py"
    script.write_text(SCRIPT.format(width=WIDTH, out=out, rows=rows))
    found = rehearse(Asked(command=(str(script),), world_size=RANKS), folder / "run")
    messages = read_rank(rehearsal_folder(folder / "run"), 0).messages.to_pylist()
    (size,) = {one["size_bytes"] for one in messages if one["kind"] == "all_gather"}
    return {one["finding"]: one for one in found.job["findings"]}, size // 4


def test_padding_is_what_fsdp_gathers_beyond_the_parameters(tmp_path: Path) -> None:
    """A matrix with one row on four ranks is gathered with three rows of zeros."""
    found, n_gathered = advised(tmp_path, out=1, rows=ROWS)
    assert n_gathered == RANKS * (WIDTH + 1)
    assert found["padding"]["share"] == 1 - (WIDTH + 1) / n_gathered == 0.75
    assert found["padding"]["words"].startswith("FSDP pads 75 % of what it gathers")
    assert (found["rows"]["repeated"], found["rows"]["last"]) == (-ROWS % RANKS, -(-ROWS // RANKS) % 2)


def test_nothing_is_said_where_all_comes_out_even(tmp_path: Path) -> None:
    found, n_gathered = advised(tmp_path, out=RANKS, rows=4 * RANKS)
    assert n_gathered == RANKS * (WIDTH + 1)
    assert found == {}


@pytest.mark.parametrize(
    ("products", "said"), [((10, 10, 10, 23), 2.3), ((10, 10, 10, 11), None), ((1,), None)]
)
def test_a_stage_with_more_work_than_the_others_is_named(
    products: tuple[int, ...], said: float | None
) -> None:
    """Only of a pipeline whose stages have all been rehearsed."""
    seen = {rank: tables([("op", 0, 0, -1)], [work(flops=n)]) for rank, n in enumerate(products)}
    outcomes = dict.fromkeys(seen, QUIET)
    pipeline = [Group(id=0, axis="pp", ranks=tuple(seen))]
    found = findings(outcomes, seen, pipeline)
    assert [one["ratio"] for one in found] == ([] if said is None else [said])
    for one in found:
        assert one["words"].startswith("the last stage (rank 3) has 2.3 times the FLOPs of the others")
    longer = [Group(id=0, axis="pp", ranks=(*seen, len(seen)))]
    assert findings(outcomes, seen, longer) == []


def test_a_rank_that_computes_nothing_is_named() -> None:
    seen = {rank: tables([("op", 0, 0, -1)], [work(flops=rank)]) for rank in (0, 1)}
    (found,) = findings(dict.fromkeys(seen, QUIET), seen, [])
    assert (found["finding"], found["ranks"]) == ("idle", [0])
