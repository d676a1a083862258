"""Steps whose sizes ranks tell each other, in every way in which one rank tells others a number.

``told_by_others.py WAY ...``: in a chain, around a ring, from one rank to all; in tensors, objects, a store.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH, STEPS = 8, 3


def put(number: int) -> Tensor:
    """Return *number* in a tensor."""
    return torch.tensor([number])


def chained(step: int, rank: int, last: int, model: nn.Module) -> None:
    """Train in a chain: each rank sends the next what it has made, and its shape before."""
    if rank:
        shape = torch.empty(2, dtype=torch.int64)
        dist.recv(shape, rank - 1)
        rows = torch.empty(shape.tolist())
        dist.recv(rows, rank - 1)
    else:
        rows = torch.randn(step + 2, WIDTH)
    made = model(rows.requires_grad_())
    if rank < last:
        dist.send(torch.tensor(made.shape), rank + 1)
        dist.send(made.detach(), rank + 1)
    made.sum().backward()


def around(step: int, rank: int, n: int) -> None:
    """Send each next rank as many numbers as it is told before."""
    length = torch.empty(1, dtype=torch.int64)
    after, before = (rank + 1) % n, (rank - 1) % n
    mine = step + 10 * rank + 1
    for sent, got in ((put(mine), length), (torch.ones(mine), None)):
        filled = torch.empty(int(length)) if got is None else got
        transfers = [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, filled, before)]
        for work in dist.batch_isend_irecv(transfers):
            work.wait()


def to_all(step: int, rank: int, n: int) -> None:
    """Reduce as many numbers as one rank has said in a tensor, in objects for all, and for each."""
    length = put(100 + step) if rank == 1 else put(0)
    dist.broadcast(length, 1)
    heard = [200 + step] if rank == 1 else [None]
    dist.broadcast_object_list(heard, 1)
    mine: list[int] = [0]
    dist.scatter_object_list(mine, [300 + step] * n if rank == 1 else None, 1)
    for number in (int(length), heard[0], mine[0]):
        dist.all_reduce(torch.ones(number))


def by_objects(step: int, rank: int, n: int) -> None:
    """Tell the next rank in objects what is sent."""
    told: list[int] = [400 + step]
    if rank:
        told = [0]
        dist.recv_object_list(told, rank - 1)
        dist.recv(torch.empty(told[0]), rank - 1)
    if rank < n - 1:
        told = [told[0] + rank]
        dist.send_object_list(told, rank + 1)
        dist.send(torch.ones(told[0]), rank + 1)


def by_store(step: int, rank: int, n: int) -> None:
    """Reduce as many numbers as one rank has written in the store of the group."""
    del n
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.set(f"length{step}", str(500 + step))
    dist.all_reduce(torch.ones(int(store.get(f"length{step}"))))


WAYS = {"around": around, "to_all": to_all, "by_objects": by_objects, "by_store": by_store}


def main() -> None:
    """Train."""
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        chained(step, rank, n - 1, model)
        for name in sys.argv[1:]:
            WAYS[name](step, rank, n)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


main()
