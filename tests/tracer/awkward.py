"""A script for GPUs with a scaler, autocast and compilation, and with what cannot be rehearsed as it is."""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn


@torch.library.custom_op("awkward::kernel", mutates_args=())  # type: ignore[untyped-decorator]
def kernel(x: Tensor) -> Tensor:
    """Doubles its operand, without saying what it makes."""
    return x * 2


class Custom(nn.Module):  # type: ignore[misc]
    """Calls it."""

    def forward(self, x: Tensor) -> Tensor:
        return kernel(x.detach()) + x


class Pick(nn.Module):  # type: ignore[misc]
    """Takes as many rows as the numbers say."""

    def forward(self, x: Tensor) -> Tensor:
        return x[torch.unique(x.long()[:, 0])]


class Norm(nn.Module):  # type: ignore[misc]
    """A softmax, which autocast leaves in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x, dim=-1)


def train(kind: str) -> None:
    """Train three steps of a model with the part of that *kind*."""
    dist.init_process_group("nccl")
    part = {"custom": Custom, "pick": Pick, "plain": Norm}[kind]()
    model = nn.Sequential(nn.Linear(64, 64), part).cuda()
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(3):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = compiled(torch.randn(16, 64, device="cuda")).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


if __name__ == "__main__":
    train(sys.argv[1])
