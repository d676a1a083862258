"""A training whose step is the same by one thread or several: ``threaded.py KIND``."""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH, ROWS = 64, 8

kind = sys.argv[1]
dist.init_process_group("nccl")
model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).cuda()
other = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).cuda()
optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
pool = ThreadPoolExecutor(1)
aside = torch.cuda.Stream()


def batch() -> Tensor:
    """Return rows for the models, moved on a stream of their own and reduced over the ranks."""
    rows = torch.randn(ROWS, WIDTH).pin_memory()
    with torch.cuda.stream(aside):
        rows = rows.to("cuda", non_blocking=True)
        dist.all_reduce(rows)
    return rows


def unknown() -> None:
    """Ask for rows that a rehearsal cannot know."""
    torch.unique(torch.randn(ROWS, device="cuda").long())


def broken() -> None:
    """End as a thread of a script may."""
    raise ValueError("nothing to do")


def beside(work: Callable[[], object]) -> threading.Thread:
    """Return a thread that does *work*."""
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def step() -> None:
    """Take two losses, of which one may go backward while the other's model goes forward."""
    rows = pool.submit(batch).result() if kind == "pool" else batch()
    loss = model(rows).square().mean()
    backward = beside(loss.backward) if kind == "backward" else None
    if backward is None:
        loss.backward()
    later = other(rows).square().mean()
    if backward is not None:
        backward.join()
    later.backward()
    if kind in {"unknown", "broken"}:
        beside(unknown if kind == "unknown" else broken).join()
    optimizer.step()
    optimizer.zero_grad()


def train() -> bool:
    """Take three steps; return that they are done."""
    for _ in range(3):
        step()
    return True


if kind == "trainer":
    beside(train).join()
elif kind == "worker":
    done: SimpleQueue[bool] = SimpleQueue()
    beside(lambda: done.put(train()))
    done.get()
else:
    train()
