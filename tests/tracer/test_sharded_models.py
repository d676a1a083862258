"""What is noted of a model that is cut over ranks is what it was before, and how it was cut."""

import sys
from pathlib import Path
from typing import Any

import pytest

from foretrace.traces.layout import Layout
from foretrace.traces.run import Run
from foretrace.traces.store import open_run

N_PARAMS = 16 * 8 + 3 * 8 * 8 + 8 * 16
"""Of the model below: a table, three matrices, a head."""

SHARD_SCRIPT = """
import sys
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
import foretrace

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))
        self.head = nn.Linear(8, 16, bias=False)
    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

def fsdp1(strategy="FULL_SHARD", **options):
    policy = ModuleWrapPolicy({nn.Linear})
    options |= {"sharding_strategy": ShardingStrategy[strategy], "device_id": torch.device("cpu")}
    return FullyShardedDataParallel(Net(), auto_wrap_policy=policy, **options)

def fsdp2(mesh, **options):
    model = Net()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh)
    return model

def by_parameter():
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
    from torch.distributed.tensor import Shard
    infos = [FSDPMeshInfo(mesh, shard_mesh_dim=0) for mesh in (flat, both["shard"])]
    model = Net()
    pick = lambda p: ShardPlacementResult(Shard(0), infos[p is model.head.weight])
    fully_shard(model, mesh=flat, shard_placement_fn=pick)
    return model

def with_context():
    dist.all_reduce(torch.ones(1), group=context["cp"].get_group())
    return fsdp2(context["dp_shard", "cp"]._flatten("dp_shard_cp"))

dist.init_process_group("gloo")
flat = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
context = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "cp"))
WAYS = {
    "fsdp1": fsdp1,
    "fsdp1-orig": lambda: fsdp1(use_orig_params=True),
    "fsdp1-keeps": lambda: fsdp1("SHARD_GRAD_OP"),
    "hsdp1": lambda: fsdp1("HYBRID_SHARD", device_mesh=both),
    "fsdp2": lambda: fsdp2(flat),
    "fsdp2-keeps": lambda: fsdp2(flat, reshard_after_forward=False),
    "hsdp2": lambda: fsdp2(both),
    "context": with_context,
    "by-parameter": by_parameter,
}
for name in sys.argv[2:]:
    with foretrace.record(Path(sys.argv[1]) / name):
        model = WAYS[name]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.zeros(2, 4, dtype=torch.long)).square().mean().backward()
            optimizer.step()
dist.destroy_process_group()
"""

JOBS: dict[str, dict[str, Any]] = {
    "fsdp1": {},
    "fsdp1-orig": {},
    "fsdp1-keeps": {"reshard_after_forward": False},
    "hsdp1": {"shard_ranks": 2},
    "fsdp2": {},
    "fsdp2-keeps": {"reshard_after_forward": False},
    "hsdp2": {"shard_ranks": 2},
    "context": {},
}
"""What is noted besides the sharding and the shape of the input."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, ranks: Any) -> Path:
    """Every way in turn, recorded by the same four processes."""
    if ranks.torch() < ranks.newer:
        pytest.skip("FSDP2 runs on GPUs only")
    folder = tmp_path_factory.mktemp("sharded")
    script = folder / "train.py"
    script.write_text(SHARD_SCRIPT)
    ways = [*JOBS, *(["by-parameter"] if ranks.torch() >= (2, 13) else [])]
    done = ranks.run([sys.executable, "-W", "ignore", str(script), str(folder), *ways], ranks.env(), n=4)
    assert done.status == (0,) * 4, done.errors
    return folder


def check_model(run: Run) -> None:
    """Assert that the model is described as it was before it was cut."""
    assert run.warnings == ()
    model = run.info.model
    assert model is not None
    assert model["name"] == "Net"
    assert model["n_params"] == N_PARAMS
    shapes = {path: entry["shapes"] for path, entry in model["structure"].items() if "shapes" in entry}
    assert shapes == {
        "embed": {"weight": [16, 8]},
        "layers.*": {"weight": [8, 8]},
        "head": {"weight": [16, 8]},
    }


@pytest.mark.parametrize("way", sorted(JOBS))
def test_a_model_that_is_cut_is_described_as_it_was(recorded: Path, way: str) -> None:
    run = open_run(recorded / way)
    check_model(run)
    batch = {"input_shape": [2, 4], "input_is_embedded": False, "forwards_per_step": 1}
    assert run.info.job == {"sharding": "fsdp", **batch, **JOBS[way]}
    assert run.info.layout == (Layout(dp=2, cp=2) if way == "context" else Layout(dp=4))


def test_parameters_may_be_cut_over_meshes_of_their_own(recorded: Path, ranks: Any) -> None:
    if ranks.torch() < (2, 13):
        pytest.skip("torch 2.13 brought meshes by parameter")
    check_model(open_run(recorded / "by-parameter"))
