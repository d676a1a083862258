"""Products of parallelisms, and pipelines that hold several stages per rank and split their backward."""

import sys
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from foretrace.traces.layout import Layout
from foretrace.traces.store import open_run

MESH = """
import sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)) for _ in range(2)))
for layer in model:
    parallelize_module(layer, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(layer, mesh=mesh["dp"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""

STAGES = """
import sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble

dist.init_process_group("gloo")
rank, device = dist.get_rank(), torch.device("cpu")
torch.manual_seed(0)
parts = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)]
stages = [PipelineStage(parts[i], i, 4, device) for i in (rank, rank + 2)]
schedule = ScheduleInterleavedZeroBubble(stages, 4, loss_fn=nn.functional.mse_loss)
optimizers = [torch.optim.SGD(stage.submod.parameters(), lr=0.1) for stage in stages]
for _ in range(3):
    x = torch.ones(8, 64)
    schedule.step(*([x] if rank == 0 else []), **({"target": x} if rank == 1 else {}))
    for optimizer in optimizers:
        optimizer.step()
dist.destroy_process_group()
"""


def recorded(path: Path, script: str, ranks: Any, n: int) -> Any:
    """Record *script* on *n* ranks and return the run."""
    file = path / "train.py"
    file.write_text(script)
    result = ranks.run([sys.executable, str(file)], ranks.env(path / "run"), n)
    assert result.status == (0,) * n, result.errors
    run = open_run(path / "run")
    assert run.warnings == ()
    return run


def test_two_axes_are_told_apart(tmp_path: Path, ranks: Any, needs_newer_torch: None) -> None:
    run = recorded(tmp_path, MESH, ranks, 4)
    assert run.info.layout == Layout(dp=2, tp=2)
    found = {(group.axis, group.ranks) for group in run.info.groups}
    assert found == {("tp", (0, 1)), ("tp", (2, 3)), ("dp", (0, 2)), ("dp", (1, 3))}
    for rank in range(4):
        kinds = Counter(
            (row["axis"], row["kind"])
            for row in run.spans([rank]).to_pylist()
            if row["step"] == 1 and row["axis"]
        )
        assert kinds == {
            ("tp", "all_reduce"): 3,  # each layer forward, and backward the one with a layer before it
            ("dp", "all_gather"): 2,  # each layer is a root of its own, and keeps what it has gathered
            ("dp", "reduce_scatter"): 2,
        }


def test_split_backwards_of_several_stages_are_told_apart(
    tmp_path: Path, ranks: Any, needs_newer_torch: None
) -> None:
    run = recorded(tmp_path, STAGES, ranks, 2)
    sends: dict[tuple[int, ...], dict[str, Any]] = {}
    receives: dict[tuple[int, ...], dict[str, Any]] = {}
    for rank in (0, 1):
        spans = run.spans([rank]).to_pylist()
        work = {
            (row["kind"], (row["stage"], row["virtual_stage"], row["microbatch"]))
            for row in spans
            if row["category"] == "compute" and row["step"] == 1 and row["microbatch"] >= 0
        }
        every = {(rank + 2 * v, v, microbatch) for v in (0, 1) for microbatch in range(4)}
        assert {at for kind, at in work if kind == "forward"} == every
        weights = {at for kind, at in work if kind in {"backward", "backward_weight"}}
        assert weights == every
        inputs = {at for kind, at in work if kind in {"backward", "backward_input"}}
        assert inputs >= {at for at in every if at[0] > 0}  # nobody needs the gradient of the tokens
        assert {"backward_input", "backward_weight"} <= {kind for kind, _ in work}
        streams: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in spans:
            streams[row["stream"]].append(row)
            key = (row["group"], *((rank, row["peer"]) if row["kind"] == "send" else (row["peer"], rank)))
            if row["category"] == "p2p":
                (sends if row["kind"] == "send" else receives)[(*key, row["sequence"])] = row
        for found_rows in streams.values():
            ordered = sorted(found_rows, key=lambda row: row["start_ns"])
            assert all(a["start_ns"] + a["duration_ns"] <= b["start_ns"] for a, b in pairwise(ordered))
        steps = [row["step"] for row in spans if row["category"] == "step"]
        assert steps == [0, 1, 2]  # two optimizers per rank, one step
    assert sends.keys() == receives.keys()
    for key, send in sends.items():
        # The schedule waits for its sends when the step is over: an end that is that of the wait says so.
        late_ns = (
            send["start_ns"] + send["duration_ns"] - receives[key]["start_ns"] - receives[key]["duration_ns"]
        )
        assert send["is_bound"] or late_ns < 200_000_000


@pytest.fixture
def needs_newer_torch(ranks: Any) -> None:
    """Skip where torch cannot run these on gloo."""
    if ranks.torch() < ranks.newer:
        pytest.skip("this torch cannot run FSDP2 or several stages per rank on gloo")
