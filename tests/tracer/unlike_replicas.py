"""Two stages in three replicas, of which the last does more in its step, as one that clips a larger shard."""

import os

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

STAGES, REPLICAS, SIDE = 2, 3, 1024

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank % 8)
dist.init_process_group("nccl")
mesh = init_device_mesh("cuda", (STAGES, REPLICAS), mesh_dim_names=("pp", "dp"))
pipeline, replicas = mesh["pp"].get_group(), mesh["dp"].get_group()
stage, replica = divmod(rank, REPLICAS)
peer = rank + REPLICAS if stage == 0 else rank - REPLICAS
model = torch.nn.Linear(SIDE, SIDE, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    x = torch.ones(64, SIDE, device="cuda", requires_grad=True)
    if stage:
        dist.recv(x.detach(), peer, group=pipeline)
    y = model(x)
    if not stage:
        dist.send(y.detach(), peer, group=pipeline)
        gradient = torch.empty_like(y)
        dist.recv(gradient, peer, group=pipeline)
        y.backward(gradient)
    else:
        y.sum().backward()
        dist.send(x.grad, peer, group=pipeline)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=replicas)
    if replica == REPLICAS - 1:
        for _ in range(20):
            model.weight.grad @ model.weight.grad
    optimizer.step()
    optimizer.zero_grad()
