"""A training whose step is the same by one thread or several: ``threaded.py KIND``."""

import sys
import threading
import time
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
heard: list[object] = []
threading.excepthook = heard.append


def batch() -> Tensor:
    """Return rows for the models, moved on a stream of their own and reduced over the ranks."""
    rows = torch.randn(ROWS, WIDTH).pin_memory()
    with torch.cuda.stream(aside):
        rows = rows.to("cuda", non_blocking=True)
        dist.all_reduce(rows)
    return rows


def unknown() -> None:
    """Ask for rows that a rehearsal cannot know."""
    torch.unique(torch.empty(ROWS, device="cuda").long())


def broken() -> None:
    """End as a thread of a script may."""
    raise ValueError("nothing to do")


def beside(work: Callable[[], object]) -> threading.Thread:
    """Return a thread that does *work*."""
    thread = threading.Thread(target=work)
    thread.start()
    return thread


class Asking(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Makes what a tensor is added to on its device, once another thread has ended."""

    def forward(self, x: Tensor) -> Tensor:
        thread = beside(unknown)
        while thread.is_alive():
            time.sleep(0.01)
        return x + x.new_zeros(1)


def meanwhile(loss: Tensor, forward: Callable[[], Tensor]) -> Tensor:
    """Return what *forward* does, all of it while *loss* goes backward in another thread."""
    begun, done = threading.Event(), threading.Event()

    def wait(_: Tensor) -> None:
        begun.set()
        done.wait()

    loss.register_hook(wait)
    backward = beside(loss.backward)
    begun.wait()
    later = forward()
    done.set()
    backward.join()
    return later


def step() -> None:
    """Take two losses, of which one may go backward while the other's model goes forward."""
    rows = pool.submit(batch).result() if kind == "pool" else batch()
    loss = model(rows).square().mean()
    if kind == "backward":
        later = meanwhile(loss, lambda: other(rows).square().mean())
    else:
        loss.backward()
        later = other(rows).square().mean()
    later.backward()
    if kind == "asking":
        Asking()(rows)
    if kind in {"unknown", "broken"}:
        beside(unknown if kind == "unknown" else broken).join()
        if not heard:
            raise SystemExit("nobody has heard of the error")
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
