"""A mixture of experts, dealt out over all ranks, whose routers choose by the loads that are asked for.

``loaded.py LOAD FOLDER [lists]``: where tensors are real, routers choose as ``Routing`` has them choose, so
that a run on gloo has the loads that a rehearsal is told of. Each rank writes the splits of its exchanges to
FOLDER. With ``lists`` they are of lists of tensors, of which gloo takes none but those of one size.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from foretrace.tracer.rehearse.data.experts import Loads, parsed

EXPERTS, TOP_K, WIDTH, TOKENS = 8, 2, 16, 48
LOAD, FOLDER, *HOW = sys.argv[1:]
splits: list[list[list[int]]] = []


class Exchanged(torch.autograd.Function):  # type: ignore[misc]
    """Rows to each rank and from each, by one tensor or by a tensor for each of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, received: list[int], sent: list[int]) -> Tensor:
        """Return what comes; shape ``(sum(received), WIDTH)``."""
        ctx.splits = received, sent
        out = x.new_empty(sum(received), *x.shape[1:])
        if HOW:
            dist.all_to_all(list(out.split(received)), list(x.split(sent)))
        else:
            dist.all_to_all_single(out, x, received, sent)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradients of what was sent."""
        received, sent = ctx.splits
        return Exchanged.apply(grad.contiguous(), sent, received), None, None


def exchanged(x: Tensor, received: list[int], sent: list[int]) -> Tensor:
    """Return what comes where *sent* rows of *x* go to each rank.

    Functional collectives load a compiler, for which real ranks have no time.
    """
    if HOW or not isinstance(x, FakeTensor):
        return Exchanged.apply(x, received, sent)
    return all_to_all_single_autograd(x, received, sent, dist.group.WORLD)


class MoE(nn.Module):  # type: ignore[misc]
    """Tokens go to the ranks of their experts and come back, one expert after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.n_ranks = dist.get_world_size()
        self.n_local = EXPERTS // self.n_ranks
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(self.n_local))

    def forward(self, x: Tensor) -> Tensor:
        """Return what the experts make of *x*; shape ``(TOKENS, WIDTH)``."""
        chosen = scored(self.gate(x)).topk(TOP_K, -1)[1].view(-1)
        counts = torch.bincount(chosen, minlength=EXPERTS)
        theirs = torch.empty_like(counts)
        if HOW:
            dist.all_to_all(list(theirs.chunk(self.n_ranks)), list(counts.chunk(self.n_ranks)))
        else:
            dist.all_to_all_single(theirs, counts)
        sent = counts.view(self.n_ranks, -1).sum(1).tolist()
        received = theirs.view(self.n_ranks, -1).sum(1).tolist()
        rows = theirs.view(self.n_ranks, -1).sum(0).tolist()
        splits.append([sent, received, rows])
        order = chosen.argsort(stable=True)
        there = exchanged(x[order // TOP_K], received, sent)
        owners = torch.arange(self.n_local, device=x.device).repeat(self.n_ranks).repeat_interleave(theirs)
        by_expert = owners.argsort(stable=True)
        parts = there[by_expert].split(rows)
        made = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        made = torch.empty_like(there).index_copy(0, by_expert, made)
        back = exchanged(made, sent, received)
        return x.index_add(0, order // TOP_K, back)


def scored(scores: Tensor) -> Tensor:
    """Return *scores* with those made high that are to be chosen, where tensors are real."""
    load = parsed(LOAD)
    if isinstance(scores, FakeTensor) or not isinstance(load, Loads):
        return scores
    counts = load.counts(TOKENS, TOP_K, EXPERTS)
    listed = [expert for expert, n in enumerate(counts) for _ in range(n)]
    chosen = torch.tensor(listed).reshape(TOP_K, TOKENS).t()
    return scores.scatter(1, chosen, float(scores.detach().abs().max()) + 1.0)


dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(WIDTH, WIDTH), MoE(), MoE())
is_real = not isinstance(model[0].weight.data, FakeTensor)
optimizer = None if is_real else torch.optim.SGD(model.parameters(), lr=0.01)  # which loads a compiler
for _ in range(2):
    model.zero_grad()
    model(torch.randn(TOKENS, WIDTH)).sum().backward()
    if optimizer is not None:
        optimizer.step()
    written = Path(FOLDER) / f"{dist.get_rank()}.json"
    written.write_text(json.dumps(splits[-2:]), encoding="utf-8")
dist.destroy_process_group()
