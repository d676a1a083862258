"""What trainings seldom do, one kind after the other: ``seldom.py KIND``."""

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import permute_tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import _ComputationType

WIDTH, ROWS, OUT, MICROBATCHES = 32, 16, 48, 8


def split(x: Tensor) -> None:
    """Sum over a half of the even and one of the odd ranks, by places in groups of them."""
    even = dist.get_rank() % 2 == 0
    groups = [dist.new_group(list(range(first, dist.get_world_size(), 2))) for first in (0, 1)]
    half = dist.split_group(groups[0 if even else 1], [[0, 1]])
    if half is not None:
        dist.all_reduce(x, group=half)


def other(x: Tensor) -> None:
    """Sum in a kernel that reads what other ranks have."""
    torch.ops.symm_mem.one_shot_all_reduce(x, "sum", dist.group.WORLD.group_name)


def gather_of_eight(x: Tensor) -> None:
    """Gather into what was made for eight ranks."""
    dist.all_gather_into_tensor(x.new_empty(8 * ROWS, WIDTH), x)


def scatter_of_eight(x: Tensor) -> None:
    """Scatter sums of what was made for eight ranks."""
    dist.reduce_scatter_tensor(x, x.new_empty(8 * ROWS, WIDTH))


def gather_as_another(x: Tensor) -> None:
    """Gather into another type."""
    dist.all_gather_into_tensor(x.new_empty(dist.get_world_size() * ROWS, WIDTH, dtype=torch.bfloat16), x)


def splits_left_over(x: Tensor) -> None:
    """Exchange all rows but the last."""
    parts = [2] * (dist.get_world_size() - 1) + [1]
    dist.all_to_all_single(x.new_empty(ROWS, WIDTH), x, [2] * dist.get_world_size(), parts)


def splits_not_there(x: Tensor) -> None:
    """Fill a row more than there are."""
    n = dist.get_world_size()
    dist.all_to_all_single(x.new_empty(ROWS, WIDTH), x, [2] * (n - 1) + [3], [2] * n)


def splits_too_few(x: Tensor) -> None:
    """Exchange with half of the ranks."""
    dist.all_to_all_single(x.new_empty(ROWS, WIDTH), x, [4] * 4, [4] * 4)


def permuted(x: Tensor) -> None:
    """Send all rows on: torch counts elements, not rows."""
    n = dist.get_world_size()
    permute_tensor(x, [(rank + 1) % n for rank in range(n)], dist.group.WORLD)


def permuted_row(x: Tensor) -> None:
    """Send the elements of one row on."""
    permuted(x[0])


def objects(x: Tensor) -> None:
    """Tell the next rank a size, and reduce what has it."""
    rank, sizes = dist.get_rank(), [WIDTH, "rows"]
    if rank % 2 == 0:
        dist.send_object_list(sizes, rank + 1)
    elif dist.recv_object_list(sizes, rank - 1) != rank - 1:
        raise ValueError("from another one")
    dist.all_reduce(x.new_empty(sizes[0]))


def heard(x: Tensor) -> None:
    """Tell all ranks a size that the first one has."""
    sizes = [WIDTH if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(sizes, 0)
    dist.all_reduce(x.new_empty(sizes[0]))


def gathered(x: Tensor) -> None:
    """Sum what is of every rank, as each has told."""
    found: list[int] = [-1] * dist.get_world_size()
    dist.all_gather_object(found, dist.get_rank())
    if len({*found}) < len(found):
        raise RuntimeError
    dist.all_reduce(x)


def dealt(x: Tensor) -> None:
    """Deal sizes out that the first rank has."""
    size = [None]
    dist.scatter_object_list(size, [WIDTH] * dist.get_world_size() if dist.get_rank() == 0 else None, 0)
    dist.all_reduce(x.new_empty(size[0]))


def size(x: Tensor) -> None:
    """Tell the next rank a size in a tensor."""
    rank, rows = dist.get_rank(), torch.full((1,), ROWS, device=x.device)
    if rank % 2 == 0:
        dist.send(rows, rank + 1)
    else:
        dist.recv(rows, rank - 1)
    x[: rows.item()].sum()


def launched(x: Tensor) -> None:
    """Take sizes out of what a launcher says in the environment."""
    n = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + int(os.environ["GROUP_WORLD_SIZE"])
    dist.all_reduce(x.new_empty(n + int(os.environ["ROLE_RANK"])))


def train(kind: str) -> None:
    """Train two steps of two layers in shards, with the part of that *kind* behind each."""
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, OUT)).cuda()
    whole = model.state_dict() if dist.get_rank() == 0 else {}
    if kind == "states":
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        x = torch.randn(ROWS, WIDTH, device="cuda")
        model(x).sum().backward()
        if kind == "states":
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_model_state_dict(model, dict(whole), options=options)  # it is filled
        else:
            globals()[kind](x)
        optimizer.step()
        optimizer.zero_grad()


def pipelined(kind: str) -> None:
    """Train two steps of two stages a rank, of whose actions one may have a function of the script's own."""
    dist.init_process_group("nccl")
    rank, device = dist.get_rank(), torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    places = (rank, rank + dist.get_world_size())
    parts = [nn.Linear(WIDTH, WIDTH).cuda() for _ in places]
    stages = [
        PipelineStage(part, place, 2 * dist.get_world_size(), device)
        for part, place in zip(parts, places, strict=True)
    ]
    schedule = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=lambda out, target: (out - target).sum())
    if kind == "own-pipeline":
        schedule.register_custom_function(_ComputationType.RESHARD, lambda action, context: None)
    optimizer = torch.optim.SGD([one for part in parts for one in part.parameters()], lr=0.1)
    for _ in range(2):
        rows = torch.randn(MICROBATCHES, WIDTH, device="cuda")
        schedule.step(*((rows,) if rank == 0 else ()), target=rows)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    pipelined(sys.argv[1]) if sys.argv[1].endswith("pipeline") else train(sys.argv[1])
