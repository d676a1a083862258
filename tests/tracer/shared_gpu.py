"""A training whose ranks choose a GPU in the *WAY* that is told, or none: ``shared_gpu.py WAY``."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

WIDTH, STEPS = 16, 2
LOCAL_RANK = int(os.environ["LOCAL_RANK"])


def device_of(way: str) -> object:
    """Choose a GPU, and return the device that the model is moved to."""
    if way == "set":
        torch.cuda.set_device(LOCAL_RANK)
    elif way == "mesh":
        init_device_mesh("cuda", (dist.get_world_size(),))
    elif way == "visible":
        os.environ["CUDA_VISIBLE_DEVICES"] = str(LOCAL_RANK)
    return {"named": torch.device("cuda", LOCAL_RANK), "first": "cuda:0"}.get(way, "cuda")


def main(way: str) -> None:
    """Train a layer whose gradients are summed."""
    dist.init_process_group("gloo" if way == "gloo" else "nccl")
    device = device_of(way)
    model = nn.Linear(WIDTH, WIDTH)
    model = model.cuda() if way == "moved" else model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        model(torch.ones(WIDTH, WIDTH).to(device)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()


if __name__ == "__main__":
    main(sys.argv[1])
