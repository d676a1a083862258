"""A training whose ranks choose a GPU in the *WAY* that is told, or none: ``shared_gpu.py WAY``."""

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

WIDTH, STEPS = 16, 2
NAMES = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
LOCAL_RANK = next(int(os.environ[name]) for name in NAMES if name in os.environ)


class Plain(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A matrix of a tensor that is made on a device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH, device=device))

    def forward(self, rows: Any) -> Any:
        """Return the products of *rows*."""
        return rows @ self.weight


def device_of(way: str) -> object:
    """Choose a GPU, and return the device that the model is moved to."""
    if way in {"set", "set, made", "set, plain", "set, sent"}:
        torch.cuda.set_device(LOCAL_RANK)
    elif way == "mesh":
        init_device_mesh("cuda", (dist.get_world_size(),))
    elif way == "visible":
        os.environ["CUDA_VISIBLE_DEVICES"] = str(LOCAL_RANK)
    elif way == "default":
        torch.set_default_device("cuda")
    own = torch.device("cuda", LOCAL_RANK)
    return {"named": own, "made, moved": own, "beside": own, "sent": own, "first": "cuda:0"}.get(way, "cuda")


def beside(device: Any) -> Any:
    """Return a layer that goes where a tensor on *device* is."""
    found = Plain("cuda")
    found.weight = nn.Parameter(found.weight.detach().to(torch.ones(1, device=device)))
    return found


def inside(context: Any, model: Callable[[], Any]) -> Any:
    """Return a *model* that is made within a *context*."""
    with context:
        return model()


def model_of(way: str, device: Any) -> Any:
    """Return a layer on *device*."""
    layer, at_once = partial(nn.Linear, WIDTH, WIDTH), partial(nn.Linear, WIDTH, WIDTH, device="cuda")
    ways: dict[str, Callable[[], Any]] = {
        **dict.fromkeys(("made", "set, made", "gloo, made"), at_once),
        **dict.fromkeys(("plain", "set, plain"), lambda: Plain("cuda")),
        "made, moved": lambda: at_once().to(device),
        "beside": lambda: beside(device),
        "empty": lambda: nn.Linear(WIDTH, WIDTH, device="meta").to_empty(device="cuda"),
        "default": layer,
        "context": lambda: inside(torch.device("cuda"), layer),
        "inside": lambda: inside(torch.cuda.device(LOCAL_RANK), lambda: layer().cuda()),
        "inside, made": lambda: inside(torch.cuda.device(LOCAL_RANK), at_once),
        "moved": lambda: layer().cuda(),
    }
    return ways.get(way, lambda: layer().to(device))()


def main(way: str) -> None:
    """Train a layer whose gradients are summed."""
    if "RANK" not in os.environ:
        rank = os.environ.get("SLURM_PROCID", os.environ.get("OMPI_COMM_WORLD_RANK"))
        size = os.environ.get("SLURM_NTASKS", os.environ.get("OMPI_COMM_WORLD_SIZE"))
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    dist.init_process_group("gloo" if way.startswith("gloo") else "nccl")
    device = device_of(way)
    model = model_of(way, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        model(torch.ones(WIDTH, WIDTH).to(next(model.parameters()).device)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        if way in {"sent", "set, sent"}:
            dist.all_reduce(torch.ones(1, device="cuda"))
        optimizer.step()


if __name__ == "__main__":
    main(sys.argv[1])
