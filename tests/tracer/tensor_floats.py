"""A convolution, a recurrent layer, a product in fp32 and one in bf16: ``tensor_floats.py HOW``."""

import sys

import torch
from torch import nn


def ask(how: str) -> None:
    """Tell PyTorch of TensorFloat-32, or leave it as it is (``nothing``)."""
    torch.backends.cudnn.allow_tf32 = how != "never"
    if how == "switch":
        torch.backends.cuda.matmul.allow_tf32 = True
    if how == "precision":
        torch.set_float32_matmul_precision("high")


def main() -> None:
    """Do two steps; the second forbids in products what *HOW* allowed, if that is ``switch_off``."""
    how = sys.argv[1]
    ask("switch" if how == "switch_off" else how)
    picture = nn.Conv2d(3, 8, 3).cuda()
    series, last = nn.LSTM(8, 16).cuda(), nn.Linear(16, 4).cuda()
    weights = [weight for layer in (picture, series, last) for weight in layer.parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    for _ in range(2):
        rows = picture(torch.randn(2, 3, 6, 6, device="cuda")).flatten(2).permute(2, 0, 1)
        loss = last(series(rows)[0]).sum()
        narrow = torch.ones(4, 4, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        (loss + (narrow @ narrow).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if how == "switch_off":
            torch.backends.cuda.matmul.allow_tf32 = False


if __name__ == "__main__":
    main()
