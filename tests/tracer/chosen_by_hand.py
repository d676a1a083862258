"""Experts by hand: lists of choices, rows and where they come from gathered of all ranks, masks of both.

``chosen_by_hand.py LOAD FOLDER [silent]``: where tensors are real, the router chooses as ``Routing`` has
routers choose. Each rank writes to FOLDER how many rows it has picked, of each expert, and taken back. With
``silent`` the router is of a class whose name says nothing.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from foretrace.tracer.rehearse.data.experts import Loads, Routing, parsed

EXPERTS, TOP_K, WIDTH, TOKENS = 4, 2, 16, 24
LOAD, FOLDER, *HOW = sys.argv[1:]
rows: list[list[int]] = []


def gathered(x: Tensor) -> Tensor:
    """Return what all ranks have; shape ``(n_ranks * len(x), ...)``."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


class Layer(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Every rank picks the rows of its experts out of all, and takes its own back."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.n_local = dist.get_rank(), EXPERTS // dist.get_world_size()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(self.n_local))

    def forward(self, x: Tensor) -> Tensor:
        """Return what the experts make of *x*; shape ``(TOKENS, WIDTH)``."""
        chosen = self.gate(x).topk(TOP_K, -1)[1] if isinstance(x, FakeTensor) else balanced()
        listed = [(t, e, self.rank) for t, row in enumerate(chosen.tolist()) for e in row]
        where = gathered(torch.tensor(listed))
        theirs = gathered(x.detach()[[t for t, _, _ in listed]])
        is_mine = where[:, 1] // self.n_local == self.rank
        picked, where = theirs[is_mine], where[is_mine]
        kept = torch.empty(self.n_local, len(where), 3, dtype=torch.int64)
        counts = torch.zeros(self.n_local, dtype=torch.int64)
        for at in range(len(where)):
            local = int(where[at, 1].item()) % self.n_local
            kept[local, counts[local]] = where[at]
            counts[local] += 1
        order = torch.cat([kept[at, : int(n)] for at, n in enumerate(counts)])
        made = torch.cat(
            [e(part) for e, part in zip(self.experts, picked.split(counts.tolist()), strict=True)]
        )
        size = gathered(torch.tensor([len(made)])).max().item()
        order = torch.cat([order, order.new_full((size - len(order), 3), -1)])
        back = gathered(torch.cat([made.detach(), made.new_zeros(size - len(made), WIDTH)]))
        is_own = gathered(order)[:, 2] == self.rank
        rows.append([len(picked), *counts.tolist(), len(back[is_own])])
        return x.index_add(0, gathered(order)[is_own][:, 0], back[is_own]) + made.sum() * 0


class Router(Layer):
    """Is called after what it does."""


def balanced() -> Tensor:
    """Return choices of the load that is asked for; shape ``(TOKENS, TOP_K)``."""
    load = parsed(LOAD if LOAD != "1.0" else "zipf:0")
    assert isinstance(load, Loads)
    return Routing._made(load.counts(TOKENS, TOP_K, EXPERTS), TOKENS, TOP_K, (TOKENS, TOP_K))


dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Layer() if HOW else Router())
is_real = not isinstance(model[0].weight.data, FakeTensor)
optimizer = None if is_real else torch.optim.SGD(model.parameters(), lr=0.01)  # which loads a compiler
for _ in range(2):
    model.zero_grad()
    model(torch.randn(TOKENS, WIDTH)).sum().backward()
    if optimizer is not None:
        optimizer.step()
    (Path(FOLDER) / f"{dist.get_rank()}.json").write_text(json.dumps(rows[-1]), encoding="utf-8")
dist.destroy_process_group()
