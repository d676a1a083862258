"""A training whose modules have no sizes before they are called, or the same with them.

The optimizer is made before or after the first call, and the model moved to the device before or after it.
"""

import copy
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ROWS, CHANNELS, SIDE, WIDTH, STEPS = 4, 3, 8, 16, 4


def lazy() -> nn.Module:
    """Return a model that learns its sizes."""
    return nn.Sequential(
        nn.LazyConv2d(WIDTH, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(WIDTH), nn.LazyLinear(1)
    )


def sized() -> nn.Module:
    """Return the same model with its sizes."""
    flat = WIDTH * (SIDE - 2) ** 2
    return nn.Sequential(
        nn.Conv2d(CHANNELS, WIDTH, 3),
        nn.BatchNorm2d(WIDTH),
        nn.Flatten(),
        nn.Linear(flat, WIDTH),
        nn.Linear(WIDTH, 1),
    )


def main(kind: str, way: str) -> None:
    """Train a model of that *kind*."""
    dist.init_process_group("nccl")
    torch.cuda.set_device(0)
    model = (lazy if kind == "lazy" else sized)()
    if way == "copied":
        model = copy.deepcopy(model)
    batch = torch.zeros(ROWS, CHANNELS, SIDE, SIDE)
    if way == "wrapped too early":
        model = DistributedDataParallel(model.cuda())
    if way == "moved later":
        model(batch)
        model.cuda()
    else:
        model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    if way == "dry run":
        model(batch.cuda())
        model = DistributedDataParallel(model)
    for _ in range(STEPS):
        model(batch.cuda()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    shapes = [tuple(one.shape) for one in (*model.parameters(), *model.buffers())]
    sys.stdout.write(f"{shapes} {[type(one).__name__ for one in model.modules()][1:]}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
