"""Trains two plain tensors without a module: ``unmoduled.py WAY STEPS [MICRO_BATCHES]``.

By ``adamw`` or by ``hand``; by ``two`` optimizers one after the other, each of which has a tensor and asks
for the loss itself.
"""

import sys

import torch
import torch.distributed as dist

ROWS, WIDTH, HIDDEN = 64, 16, 128


def main(way: str, n_steps: int, n_micro_batches: int = 1) -> None:
    dist.init_process_group("nccl")
    first = torch.randn(WIDTH, HIDDEN, device="cuda", requires_grad=True)
    second = torch.randn(HIDDEN, WIDTH, device="cuda", requires_grad=True)
    tensors = [first, second]
    optimizer = torch.optim.AdamW(tensors) if way == "adamw" else None
    both = [torch.optim.SGD([first]), torch.optim.Adagrad([second])] if way == "two" else []

    def loss() -> torch.Tensor:
        rows = torch.randn(ROWS, WIDTH, device="cuda")
        if not rows.untyped_storage().nbytes():  # no tensor, and it has a size of elements all the same
            raise ValueError("no rows")
        rows.clamp_(-3, 3)
        found = (torch.matmul(input=rows, other=first).relu() @ second).square().mean()
        found.backward()
        return found

    for _ in range(n_steps):
        for one in both:
            one.step(loss)
            one.zero_grad()
        if both:
            continue
        for _ in range(n_micro_batches):
            loss()
        for tensor in tensors:
            dist.all_reduce(tensor.grad)
        if optimizer is None:
            for tensor in tensors:
                tensor.data -= 0.1 * tensor.grad
                tensor.grad = None
        else:
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
