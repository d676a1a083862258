"""Several trainings, one after the other: which parallelism, and ``keep`` if their optimizers are kept.

Writes before each of them, and at the end, how many bytes are allocated.
"""

import gc
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

TRAININGS, STEPS, WIDTH = 3, 3, 64


def wrapped(model: Any, how: str) -> Any:
    """Return *model* as *how* has it."""
    return {"ddp": DistributedDataParallel, "fsdp2": fully_shard}[how](model)


def train(how: str) -> Any:
    """Train a model of its own; return its optimizer."""
    model = wrapped(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).cuda(), how)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        model(torch.randn(8, WIDTH, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def tell() -> None:
    """Write how much is allocated of what is not in a cycle alone."""
    gc.collect()
    sys.stdout.write(f"allocated {torch.cuda.memory_allocated()}\n")


if __name__ == "__main__":
    dist.init_process_group("nccl")
    kept: list[Any] = []
    for _ in range(TRAININGS):
        tell()
        optimizer = train(sys.argv[1])
        if "keep" in sys.argv:
            kept.append(optimizer)
        del optimizer
    tell()
    dist.destroy_process_group()
