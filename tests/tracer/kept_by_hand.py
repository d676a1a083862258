"""Trainings that keep on the host by hand: ``kept_by_hand.py hooks``, ``types``, ``table`` or ``named``."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH, ROWS, WORDS = 64, 8, 1000
HOW = sys.argv[1]


class Kept(torch.autograd.graph.saved_tensors_hooks):  # type: ignore[misc]
    """What is saved goes to pinned memory and comes back, on a stream of its own."""

    def __init__(self, stream: Any) -> None:
        def pack(tensor: Tensor) -> Any:
            kept = torch.empty(tensor.size(), dtype=tensor.dtype, device="cpu", pin_memory=True)
            with torch.cuda.stream(stream):
                kept.copy_(tensor, non_blocking=True)
                tensor.record_stream(stream)
            return kept

        def unpack(kept: Tensor) -> Tensor:
            with torch.cuda.stream(stream):
                found = kept.to("cuda", non_blocking=True)
            torch.cuda.current_stream().wait_stream(stream)
            return found

        super().__init__(pack, unpack)


class Hooked(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A product and a nonlinearity whose saved tensors are kept on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.stream = nn.Linear(WIDTH, WIDTH, bias=False), torch.cuda.Stream()

    def forward(self, x: Tensor) -> Tensor:
        """Return what becomes of *x*."""
        with Kept(self.stream):
            return self.linear(x).sigmoid()


class Narrowed(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Copies between buffers of two types, each way, waiting and not."""

    def __init__(self) -> None:
        super().__init__()
        self.above = torch.zeros(WIDTH, WIDTH, dtype=torch.bfloat16, device="cuda")
        self.below = torch.zeros(WIDTH, WIDTH, pin_memory=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return *x*."""
        for is_free in (False, True):
            self.above.copy_(self.below, non_blocking=is_free)
            self.below.copy_(self.above, non_blocking=is_free)
        return x


class Looked(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A table that is too large for the device; its places are made without one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH).to("cuda").to("cpu")

    def forward(self, x: Tensor) -> Tensor:
        """Return rows of the table, where *x* is."""
        return self.table(torch.zeros(ROWS, dtype=torch.int64)).to(x.device, non_blocking=True)


dist.init_process_group("nccl")
torch.cuda.set_device(0)
part: Any = {"hooks": Hooked, "types": Narrowed, "table": Looked}[HOW]()
layer = nn.Linear(WIDTH, WIDTH, bias=False).cuda()
if HOW == "hooks":
    part.cuda()
optimizer = torch.optim.SGD([*layer.parameters(), *part.parameters()], lr=0.1, foreach=True)
for _ in range(3):
    layer(part(torch.ones(ROWS, WIDTH, device="cuda"))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
