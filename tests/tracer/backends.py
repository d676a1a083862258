"""A training that sends a tensor where its group may have no backend: ``backends.py BACKEND WHAT``.

*BACKEND* is ``none``, or what ``init_process_group`` is given.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

WIDTH, ROWS, STEPS = 8, 2, 3


def layer(device: str | None = "cuda") -> nn.Module:
    """Return a product, made on a *device*."""
    return nn.Linear(WIDTH, WIDTH, bias=False, device=device)


def send(what: str) -> None:
    """Send *what* between ranks once."""
    here, there = torch.ones(ROWS), torch.ones(ROWS, device="cuda")
    world = dist.get_world_size()
    if what == "here":
        dist.all_reduce(here)
    elif what == "there":
        dist.all_reduce(there)
    elif what == "gathered":
        dist.all_gather_into_tensor(torch.empty(ROWS * world), here)
    elif what == "peer":
        dist.isend(here, (dist.get_rank() + 1) % world)
    elif what == "gloo group":
        dist.all_reduce(here, group=dist.new_group(backend="gloo"))
    elif what == "nccl group":
        dist.all_reduce(here, group=dist.new_group(list(range(world)), backend="nccl"))
    elif what == "gloo group there":
        dist.all_reduce(there, group=dist.new_group(backend="gloo"))
    elif what == "objects":
        found: list[object] = [None] * world
        dist.all_gather_object(found, {"rank": dist.get_rank()})
        dist.broadcast_object_list(found)
        dist.barrier()
    elif what == "monitored":
        dist.monitored_barrier()


def made(what: str) -> nn.Module:
    """Return a model that is sharded or copied as *what* says."""
    if what == "copied":
        return DistributedDataParallel(layer(None))
    if what == "copied there":
        return DistributedDataParallel(layer(None).cuda(), device_ids=[0])
    if what == "clipped":
        init_device_mesh("cuda", (dist.get_world_size(),))
        return fully_shard(layer(None), offload_policy=CPUOffloadPolicy())
    if what == "sharded":
        return FullyShardedDataParallel(layer(None), device_id=torch.cuda.current_device())
    return layer()


def main(backend: str, what: str) -> None:
    """Train, after something has been sent."""
    dist.init_process_group(**({} if backend == "none" else {"backend": backend}))
    if what.startswith("unmet"):  # nobody has spoken of a GPU
        dist.all_reduce(
            torch.ones(ROWS), group=dist.new_group(backend="nccl") if what == "unmet nccl" else None
        )
    torch.cuda.set_device(0)
    send(what)
    model = made(what)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(STEPS):
        model(torch.ones(ROWS, WIDTH, device="cuda")).sum().backward()
        if what in {"clipped", "sharded"}:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
