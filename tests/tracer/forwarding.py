"""A model in DDP, or in FSDP1 as one unit, called as ``WAY`` says: ``forwarding.py WAY``."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

WAY = sys.argv[1]
dist.init_process_group("nccl")
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).cuda()
wrapped = FullyShardedDataParallel(model) if WAY.startswith("fsdp") else DistributedDataParallel(model)
call = wrapped.forward if WAY.endswith("forward") else wrapped
optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    call(torch.randn(4, 16, device="cuda")).sum().backward()
    optimizer.step()
dist.destroy_process_group()
