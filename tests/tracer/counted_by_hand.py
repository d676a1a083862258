"""Choices of experts that are told apart and counted, as ``unique`` does, before rows are sent by them.

``counted_by_hand.py FOLDER``: where tensors are real, the router chooses as ``Routing`` has routers choose.
Each rank writes to FOLDER how many rows each expert has.
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
even = parsed("zipf:0")
assert isinstance(even, Loads)
rows: list[list[int]] = []


class Router(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Experts that each rank has all of."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of what the experts make of *x*."""
        chosen = self.gate(x).topk(TOP_K, -1)[1] if isinstance(x, FakeTensor) else balanced()
        which, counts = chosen.flatten().unique(sorted=True, return_counts=True)
        rows.append(counts.tolist())
        by_expert = x.repeat_interleave(TOP_K, 0)[chosen.flatten().argsort()].split(rows[-1])
        made = [self.experts[e](part).sum() for e, part in zip(which.tolist(), by_expert, strict=True)]
        return torch.stack(made).sum()


def balanced() -> Tensor:
    """Return even choices; shape ``(TOKENS, TOP_K)``."""
    assert isinstance(even, Loads)
    return Routing._made(even.counts(TOKENS, TOP_K, EXPERTS), TOKENS, TOP_K, (TOKENS, TOP_K))


dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Router())
for _ in range(2):
    model.zero_grad()
    model(torch.randn(TOKENS, WIDTH)).backward()
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
    (Path(sys.argv[1]) / f"{dist.get_rank()}.json").write_text(json.dumps(rows[-1]), encoding="utf-8")
dist.destroy_process_group()
