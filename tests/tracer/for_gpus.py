"""Trainings that name a GPU wherever they can: ``for_gpus.py ddp|fsdp1|fsdp2|spawned|ordinal``."""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTH, ROWS, STEPS = 16, 8, 4


class Block(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Two layers, the second of which is computed again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return *x* and what the layers make of it."""

        def inside(x: torch.Tensor) -> Any:
            return self.down(functional.relu(x))

        return x + checkpoint(inside, self.norm(self.up(x)), use_reentrant=False)


def wrapped(how: str, rank: int) -> nn.Module:
    """Return a model on the GPU of *rank*, wrapped."""
    model = nn.Sequential(Block(), nn.BatchNorm1d(WIDTH), Block()).cuda(rank)
    if how == "fsdp2":
        mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("dp",))
        return fully_shard(model, mesh=mesh)
    if how == "fsdp1":
        return FullyShardedDataParallel(model, device_id=torch.cuda.current_device(), sync_module_states=True)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return DistributedDataParallel(model, device_ids=[rank], output_device=rank)


def train(how: str, rank: int) -> None:
    """Train in mixed precision, with a scaler, a side stream, averages over ranks."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    torch.manual_seed(0)
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 2 == dist.get_world_size()
    assert torch.cuda.current_device() == rank
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    with device:
        assert torch.ones(1).numel() == 1
    model: Any = torch.compile(wrapped(how, rank))
    data = TensorDataset(torch.randn(64, WIDTH), torch.randint(WIDTH, (64,)))
    n_workers = int(how != "ddp")  # those of a process that was spawned are, too, and load torch
    batches = DataLoader(data, ROWS, sampler=DistributedSampler(data), pin_memory=True, num_workers=n_workers)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda", enabled=how == "ddp")
    noise = torch.Generator(device="cuda").manual_seed(1)
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _, (pictures, classes) in zip(range(STEPS), batches, strict=False):
        begun.record()
        with torch.cuda.stream(torch.cuda.Stream()):
            x, y = pictures.to(device, non_blocking=True), classes.cuda(non_blocking=True)
        torch.cuda.current_stream().synchronize()
        x = x + torch.randn(x.shape, device=device, generator=noise)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        dist.all_gather_into_tensor(torch.empty(2 * ROWS, device=device), loss.float().repeat(ROWS, 1))
        dist.reduce_scatter_tensor(x.new_empty(ROWS), x.new_ones(2 * ROWS), op=dist.ReduceOp.AVG)
        mean = loss.detach().float()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        ended.record()
        said = (f"{mean.item():.6f}", begun.elapsed_time(ended) > 0, torch.cuda.max_memory_allocated())
        os.write(1, f"{' '.join(map(str, said))}\n".encode())  # at once: ranks share the pipe
    torch.save(model.state_dict(), os.devnull)
    dist.barrier(device_ids=[rank])
    dist.destroy_process_group()


def spawned(rank: int) -> None:
    """Be one of the processes that this script starts itself."""
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": os.environ.get("FOR_GPUS_PORT", "29500")}
    dist.init_process_group("nccl", rank=rank, world_size=torch.cuda.device_count())
    train("ddp", rank)


if __name__ == "__main__":
    if sys.argv[1] == "spawned":
        torch.multiprocessing.spawn(spawned, nprocs=torch.cuda.device_count())
    else:
        own = int(os.environ["LOCAL_RANK"])
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", own))
        train(sys.argv[1], own + 2 if sys.argv[1] == "ordinal" else own)
