"""Records itself and ends its steps itself: each is so many steps of its optimizer."""

import sys

import torch
import torch.distributed as dist
from torch import nn

import foretrace

N_STEPS = 5
WIDTH, ROWS = 32, 8

if __name__ == "__main__":
    path, rounds, is_model, begins = (
        sys.argv[1],
        int(sys.argv[2]),
        sys.argv[3] == "model",
        "begins" in sys.argv,
    )
    dist.init_process_group("nccl")
    with foretrace.record(path):
        if is_model:
            layer = nn.Linear(WIDTH, WIDTH, bias=False, device="cuda")
            weight = layer.weight
        else:
            weight = torch.randn(WIDTH, WIDTH, device="cuda", requires_grad=True)
            layer = weight.__rmatmul__
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(N_STEPS):
            if begins:
                foretrace.step()
            for _ in range(rounds):
                layer(torch.randn(ROWS, WIDTH, device="cuda")).sum().backward()
                dist.all_reduce(weight.grad)
                optimizer.step()
                optimizer.zero_grad()
            if not begins:
                foretrace.step()
    dist.destroy_process_group()
