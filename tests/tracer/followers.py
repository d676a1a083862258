"""Trains with gradients that are averaged by what follows their reduction: ``followers.py HOW``, three steps.

However the script waits, each rank does the same: cast, reduce, cast back, and send the result to all.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

WIDTH, ROWS, STEPS = 64, 8, 3


def follow(param: nn.Parameter, future: Any) -> torch.Tensor:
    """Take what *future* has reduced for the gradient of *param*, and have the first rank say it again."""
    assert param.grad is not None
    param.grad.copy_(future.value()[0]).div_(dist.get_world_size())
    dist.broadcast(param.grad, 0)
    return param.grad


def reduce(params: list[nn.Parameter], how: str) -> None:
    """Reduce the gradients of *params*; wait as *how* says."""
    works, futures = [], []
    for param in params:
        assert param.grad is not None
        works.append(dist.all_reduce(param.grad.bfloat16(), async_op=True))
        future = works[-1].get_future()
        if how == "told":
            future.add_done_callback(lambda future, param=param: follow(param, future))
        elif how != "by_hand":
            futures.append(future.then(lambda future, param=param: follow(param, future)))
        else:
            future.wait()
            follow(param, future)
    if how == "works":
        for work in works:
            work.wait()
    elif how == "futures":
        for future in futures:
            future.wait()
    elif how == "all":
        assert len(torch.futures.wait_all(futures)) == len(params)
        assert len(torch.futures.collect_all(futures).wait()) == len(params)
    torch.cuda.synchronize()


def main(how: str) -> None:
    """Train."""
    dist.init_process_group("nccl")
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        model(torch.randn(ROWS, WIDTH, device="cuda")).sum().backward()
        reduce(list(model.parameters()), how)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(sys.argv[1])
