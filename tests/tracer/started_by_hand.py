"""Scripts that start their own processes, or say where a module goes: ``started_by_hand.py WAY [RANKS]``."""

import os
import sys
from multiprocessing import Process, Queue, get_context

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTH, ROWS, STEPS = 64, 8, 3
CHOICES = {"chosen": torch.cuda.set_device, "accelerated": torch.accelerator.set_device_index}
PLACES = {"word": "cuda", "device": torch.device("cuda:0"), "number": 0}


def steps(model: nn.Module, device: object, *, is_summed: bool = False) -> None:
    """Train *model* on a *device*; gradients are summed one by one, or not at all."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        model(torch.ones(ROWS, WIDTH).to(device)).square().mean().backward()
        for parameter in model.parameters() if is_summed else ():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()


def layers() -> nn.Module:
    """Return two products with their biases."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def run(rank: int, n_ranks: int) -> None:
    """Train as one rank, as the tutorials of torch do."""
    del n_ranks
    steps(layers().to(f"cuda:{rank}"), f"cuda:{rank}", is_summed=True)


def joined(rank: int, n_ranks: int, then: object = run) -> None:
    """Join the group, and go on."""
    dist.init_process_group("nccl", rank=rank, world_size=n_ranks)
    then(rank, n_ranks)  # type: ignore[operator]


def through(rank: int, n_ranks: int) -> None:
    """Join the group in a function that is called by another."""
    joined(rank, n_ranks)


def after(data: object, rank: int, n_ranks: int) -> None:
    """Do the same, told some data first."""
    del data
    joined(rank, n_ranks)


def double(numbers: "Queue[int]") -> None:
    """Work beside the training, in a process that is no rank."""
    numbers.put(2 * numbers.get())


def started(n_ranks: int) -> None:
    """Start a helper, which really runs, and a process per rank."""
    numbers: Queue[int] = Queue()
    numbers.put(21)
    helper = Process(target=double, args=(numbers,))
    helper.start()
    helper.join()
    sys.stdout.write(f"helper {numbers.get()}\n")
    ranks = [multiprocessing.Process(target=through, args=(rank, n_ranks)) for rank in range(n_ranks)]
    for rank in ranks:
        rank.start()
        assert (rank.exitcode, rank.is_alive()) == (0, False)  # another's
    for rank in ranks:
        rank.join()


def alone(number: int) -> None:
    """Train one of several models, which have nothing to do with each other."""
    steps(layers().to("cuda"), f"cuda:{number}")


def pooled(n_models: int, how: str) -> None:
    """Train as many models, each in a process of a pool, which is made by *how*."""
    with get_context(how).Pool(n_models) as pool:
        pool.map(alone, range(n_models))


def named(n_ranks: int, data: object) -> None:
    """Start a process per rank that is told by name who it is; with *data*, by position behind them."""
    for rank in range(n_ranks):
        if data is None:
            one = Process(target=joined, kwargs={"rank": rank, "n_ranks": n_ranks})
        else:
            one = Process(target=after, args=(data, rank, n_ranks))
        one.start()


def beside(n_ranks: int) -> None:
    """Start all ranks, and wait for them until none is left, as scripts do that look after them meanwhile."""
    context = multiprocessing.spawn(joined, (n_ranks,), n_ranks, False)
    while not context.join():
        pass
    if context.pids():
        raise RuntimeError("processes are left")


def loaded(n_rows: int) -> None:
    """Train on a loader of *n_rows* over all ranks, which drops what fills no batch."""
    dist.init_process_group("nccl")
    rows = TensorDataset(torch.ones(n_rows, WIDTH))
    loader = DataLoader(rows, batch_size=ROWS, sampler=DistributedSampler(rows), drop_last=True)
    model = layers().to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (batch,) in loader:
        model(batch.to("cuda")).square().mean().backward()
        optimizer.step()


def main(way: str, n_ranks: int) -> None:
    """Do what the *way* says."""
    if way in PLACES:
        dist.init_process_group("nccl")
        steps(layers().to(device=PLACES[way]), "cuda")
    elif way == "plain":
        dist.init_process_group("nccl")
        steps(layers().to("cuda"), "cuda")
    elif way == "told":
        dist.init_process_group("nccl")
        said = [("run", 2 * WIDTH) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(said, src=0)
        _, width = said[0]  # type: ignore[misc]  # a rank that has not heard it ends here
        steps(nn.Sequential(nn.Linear(WIDTH, width)).to("cuda"), "cuda", is_summed=True)
    elif way in CHOICES:
        CHOICES[way](n_ranks)
        dist.init_process_group("nccl")
        steps(layers().to("cuda"), "cuda")
    elif way == "astray":
        dist.init_process_group("nccl", rank=0, world_size=int(os.environ["WORLD_SIZE"]))
        steps(layers().to("cuda"), "cuda")
    elif way == "loaded":
        loaded(n_ranks)
    elif way == "spawned":
        multiprocessing.spawn(joined, args=(n_ranks,), nprocs=n_ranks)
    elif way == "again":  # as a benchmark of several ways does; their groups end with their processes
        for _ in range(2):
            multiprocessing.spawn(joined, args=(n_ranks,), nprocs=n_ranks)
    elif way in {"fork", "forkserver", "spawn"}:
        pooled(n_ranks, way)
    elif way in {"named", "behind"}:
        named(n_ranks, None if way == "named" else torch.ones(3))
    else:
        {"beside": beside, "started": started}[way](n_ranks)


if __name__ == "__main__":
    main(sys.argv[1], int((sys.argv[2:] or ["0"])[0]))
