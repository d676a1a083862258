"""A script for GPUs with a scaler, autocast and compilation, and with what cannot be rehearsed as it is."""

import copy
import ctypes
import sys

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel


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


def strange(number: int, n_ranks: int) -> None:
    """What a child of a script does that starts one per GPU: a hook, norms over all ranks, sizes as data."""
    dist.init_process_group("nccl", rank=number, world_size=n_ranks)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.SyncBatchNorm(4)).to(number)
    average = copy.deepcopy(model)
    modes = {getattr(p, "fake_mode", None) for one in (model, average) for p in one.parameters()}
    if len(modes) != 1:
        raise ValueError("a copied model is of a mode of its own")
    replica = DistributedDataParallel(model, device_ids=[number])
    replica.register_comm_hook(None, bf16_compress_hook)
    optimizer = torch.optim.SGD(replica.parameters())
    for _ in range(3):
        loss = replica(torch.randn(2, 3, 4, 4).to(number)).square().mean()
        loss.backward()
        optimizer.step()
        n_rows = torch.tensor([24], device=number)
        sizes = [torch.zeros_like(n_rows) for _ in range(n_ranks)]
        dist.all_gather(sizes, n_rows)
        rows = torch.zeros(max(int(size) for size in sizes), device=number)
        dist.all_gather([torch.empty_like(rows) for _ in range(n_ranks)], rows)
        loss.detach().expand(4).cpu().numpy()


def main(kind: str) -> None:
    """Do what *kind* says."""
    if kind == "killed":
        ctypes.string_at(0)
    elif kind == "strange":
        n_gpus = torch.cuda.device_count()
        multiprocessing.spawn(strange, args=(n_gpus,), nprocs=n_gpus)
    else:
        train(kind)


if __name__ == "__main__":
    main(sys.argv[1])
