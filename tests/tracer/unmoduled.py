"""Trains two plain tensors without a module: ``adamw`` by an optimizer of torch, ``hand`` by none."""

import sys

import torch
import torch.distributed as dist

ROWS, WIDTH, HIDDEN = 64, 16, 128


def main() -> None:
    dist.init_process_group("nccl")
    first = torch.randn(WIDTH, HIDDEN, device="cuda", requires_grad=True)
    second = torch.randn(HIDDEN, WIDTH, device="cuda", requires_grad=True)
    tensors = [first, second]
    optimizer = torch.optim.AdamW(tensors) if sys.argv[1] == "adamw" else None
    for _ in range(int(sys.argv[2])):
        rows = torch.randn(ROWS, WIDTH, device="cuda")
        if not rows.untyped_storage().nbytes():  # no tensor, and it has a size of elements all the same
            raise ValueError("no rows")
        ((rows @ first).relu() @ second).square().mean().backward()
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
    main()
