"""A training: ``on_cpus.py BACKEND ddp|fsdp2 cpu|where``, on the processor, or a GPU where there is one."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

WIDTH, STEPS = 16, 2


def main(backend: str, how: str, device: str) -> None:
    """Train a layer."""
    dist.init_process_group(backend or None)
    model: Any = nn.Linear(WIDTH, WIDTH)
    if device == "where" and torch.cuda.is_available():
        model = model.cuda()
    model = fully_shard(model) if how == "fsdp2" else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    where = next(model.parameters()).device
    for _ in range(STEPS):
        model(torch.ones(WIDTH, WIDTH).to(where)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(*sys.argv[1:])
