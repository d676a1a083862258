"""Trainings of unlike models, one after the other: ``unlike_trainings.py STEPS-OF-DDP STEPS-OF-FSDP2``."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


class Small(nn.Sequential):  # type: ignore[misc]  # torch is untyped here
    """A model of one layer."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 64))


class Large(nn.Sequential):  # type: ignore[misc]
    """A model of four layers."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(128, 128) for _ in range(4)))


def train(model: Any, n_steps: int, optimizer: Any) -> None:
    """Train *model*."""
    made = optimizer(model.parameters(), lr=0.1)
    width = next(model.parameters()).shape[1]
    for _ in range(n_steps):
        model(torch.randn(8, width, device="cuda")).sum().backward()
        made.step()
        made.zero_grad()


if __name__ == "__main__":
    of_ddp, of_fsdp2 = map(int, sys.argv[1:])
    dist.init_process_group("nccl")
    if of_ddp:
        train(DistributedDataParallel(Small().cuda()), of_ddp, torch.optim.SGD)
    if of_fsdp2:
        train(fully_shard(Large().cuda()), of_fsdp2, torch.optim.AdamW)
