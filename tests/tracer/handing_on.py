"""Ranks that send and receive by hand in the group of all ranks: ``handing_on.py WAY``.

``line``: stages of a pipeline, each with its neighbours, four micro-batches one after the other. ``lines``:
two of them, of ranks that are two apart. ``ring``: each sends to the next one and receives from the last.
``server``: the first receives from all others, and sends to them.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

WIDTH, MICRO_BATCHES, STEPS = 32, 4, 3


def line(model: nn.Module, before: int, after: int) -> None:
    """Pass micro-batches on from the rank *before* to the one *after*, and gradients back; -1: nobody."""
    passed = []
    for _ in range(MICRO_BATCHES):
        rows = torch.randn(4, WIDTH, device="cuda")
        if before >= 0:
            dist.recv(rows, before)
        rows.requires_grad_(True)
        made = model(rows)
        passed.append((rows, made))
        if after >= 0:
            dist.send(made.detach(), after)
    for rows, made in passed:
        gradient = torch.ones_like(made)
        if after >= 0:
            dist.recv(gradient, after)
        made.backward(gradient)
        if before >= 0:
            dist.send(rows.grad, before)


def swapped(rows: Any, to: int, origin: int) -> Any:
    """Send *rows* to one rank and return what another one sends."""
    found = torch.empty_like(rows)
    asked = [dist.P2POp(dist.isend, rows, to), dist.P2POp(dist.irecv, found, origin)]
    for work in dist.batch_isend_irecv(asked):
        work.wait()
    return found


def main(way: str) -> None:
    """Train."""
    dist.init_process_group("nccl")
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    model = nn.Linear(WIDTH, WIDTH).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    apart = 2 if way == "lines" else 1
    for _ in range(STEPS):
        if way in {"line", "lines"}:
            line(model, max(rank - apart, -1), rank + apart if rank + apart < n else -1)
        else:
            rows = torch.randn(4, WIDTH, device="cuda")
            if way == "ring":
                rows = swapped(rows, (rank + 1) % n, (rank - 1) % n)
            elif way == "server":
                for other in range(1, n) if rank == 0 else [0]:
                    rows = swapped(rows, other, other)
            model(rows).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(sys.argv[1])
