"""Trains two matrices over a mesh whose dimension has no name: ``unnamed.py tp|cut|columns|dp|dp2``."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import Linear, ReLU, Sequential

ROWS = 4
PLANS = {
    "tp": {"0": ColwiseParallel(), "2": RowwiseParallel()},
    "cut": {"0": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel(output_layouts=Shard(0))},
    "columns": {"0": ColwiseParallel(output_layouts=Replicate())},
}


def main() -> None:
    """Cut the model as the first argument says, and take three steps."""
    way = sys.argv[1]
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    model = Sequential(Linear(16, 32), ReLU(), Linear(32, 16)).cuda()
    if way in {"dp", "dp2"}:  # by rows, or by the second dimension
        fully_shard(
            model, mesh=mesh, shard_placement_fn=lambda one: Shard(int(way == "dp2" and one.dim() == 2))
        )
    else:
        parallelize_module(model, mesh, PLANS[way])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for _ in range(3):
        rows = torch.rand(ROWS, 16, device="cuda")
        if way == "dp":
            rows = DTensor.from_local(rows, mesh, [Shard(0)]).to_local()
        model(rows).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
