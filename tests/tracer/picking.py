"""Trainings of a table of which some numbers are picked: ``picking.py WAY [twice]``.

With a second word the gradient is differentiated, as for a penalty on its size.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

WORDS, WIDTH, PICKED = 1024, 64, 8


def rows(device: str) -> Tensor:
    """Return which rows are picked."""
    return torch.zeros(PICKED, dtype=torch.int64, device=device)


PICKS: dict[str, Callable[[Tensor], Tensor]] = {
    "index": lambda table: table[rows("cuda")],
    "index_select": lambda table: table.index_select(0, rows("cuda")),
    "gather": lambda table: table.gather(0, rows("cuda")[:, None]),
    "take": lambda table: table.take(rows("cuda")),
    "topk": lambda table: table.topk(2).values,
    "max": lambda table: table.max(dim=1).values,
    "min": lambda table: table.min(dim=1).values,
    "median": lambda table: table.median(dim=1).values,
    "nanmedian": lambda table: table.nanmedian(dim=1).values,
    "kthvalue": lambda table: table.kthvalue(2, dim=1).values,
    "mode": lambda table: table.mode(dim=1).values,
}

ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "sort": lambda table: table.sort(dim=1).values,
    "stable sort": lambda table: table.sort(dim=1, stable=True).values,
    "cummax": lambda table: table.cummax(dim=1).values,
    "cummin": lambda table: table.cummin(dim=1).values,
}
"""As many numbers as the table has, each with its place in 8 bytes."""


class Copied(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """A function of the script's own, whose backward adds to a copy of its zeros."""

    @staticmethod
    def forward(ctx: Any, table: Tensor) -> Tensor:
        """Pick rows."""
        return table.index_select(0, rows("cuda"))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Put their gradient where they were."""
        return grad.new_zeros(WORDS, WIDTH).index_add(0, rows("cuda"), grad)


OWN: dict[str, Callable[[Tensor], Tensor]] = {"own": Copied.apply}


class Picked(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A table, of which some numbers are picked."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(WORDS, WIDTH, device="cuda"))

    def forward(self, way: str) -> Tensor:
        """Pick by this *way*."""
        return (PICKS | ORDERS | OWN)[way](self.table)


def step(model: Picked, way: str, *, is_twice: bool) -> None:
    """Go backward, perhaps through the gradient, too."""
    if is_twice:
        (grad,) = torch.autograd.grad(model(way).square().sum(), [model.table], create_graph=True)
        grad.sum().backward()
    else:
        model(way).sum().backward()


if __name__ == "__main__":
    dist.init_process_group("nccl")
    model = Picked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        step(model, sys.argv[1], is_twice=len(sys.argv) > 2)
        optimizer.step()
        optimizer.zero_grad()
