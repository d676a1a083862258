"""A training of a backbone and a head: ``parts.py WAY``, of which DDP is around, and who reduces the others.

``all``: DDP is around the model. ``each``: around both parts, one by one; ``unsynced``: the head is always
under ``no_sync``. ``backbone``: around that alone; so it is with all others but ``none``, and ``hooks``,
where hooks of gradients reduce by a method of the group. ``frozen``: the head does not train. ``beside``:
the script calls one part after the other. ``hand``: it reduces the gradients of the head, ``flat``: in one
tensor. ``norm``: it sums a norm of them. ``averaged``: it averages the head after the step. ``seldom``: DDP
is around nothing, and the model is averaged after the second step alone.
"""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH, STEPS = 64, 3


class Model(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A backbone and a head."""

    def __init__(self, way: str) -> None:
        super().__init__()
        backbone, head = nn.Linear(WIDTH, WIDTH).cuda(), nn.Linear(WIDTH, 8).cuda()
        if way == "frozen":
            head.requires_grad_(False)
        is_part = way not in {"all", "none", "hooks", "seldom"}
        self.backbone = DistributedDataParallel(backbone) if is_part else backbone
        self.head = DistributedDataParallel(head) if way in {"each", "unsynced"} else head

    def forward(self, rows: Any) -> Any:
        """Return what the head makes of *rows*."""
        return self.head(self.backbone(rows))


def reduce(way: str, head: nn.Module) -> None:
    """Reduce gradients of *head* as *way* has it."""
    found = [parameter.grad for parameter in head.parameters() if parameter.grad is not None]
    if way == "hand":
        for one in found:
            dist.all_reduce(one)
    elif way == "flat":
        flat = torch.cat([one.flatten() for one in found])
        dist.all_reduce(flat)
    elif way == "norm":
        dist.all_reduce(torch.stack([one.norm() for one in found]).norm())


def reduced(gradient: Any) -> Any:
    """Return the *gradient* that ranks share."""
    dist.group.WORLD.allreduce([gradient]).wait()
    return gradient / dist.get_world_size()


def main(way: str) -> None:
    """Train."""
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    parts = Model(way)
    model = DistributedDataParallel(parts) if way == "all" else parts
    called = (lambda rows: parts.head(parts.backbone(rows))) if way == "beside" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if way == "hooks":
        for one in model.parameters():
            one.register_hook(reduced)
    if way == "unsynced":
        parts.head.require_backward_grad_sync = False  # as under no_sync
    for step in range(STEPS):
        called(torch.randn(4, WIDTH, device="cuda")).sum().backward()
        reduce(way, parts.head)
        optimizer.step()
        if way == "averaged":
            for parameter in parts.head.parameters():
                dist.all_reduce(parameter.data)
        if way == "seldom" and step == 1:
            for parameter in model.parameters():
                dist.all_reduce(parameter.data)
        optimizer.zero_grad()


if __name__ == "__main__":
    main(sys.argv[1])
