"""A small convolutional training under autocast: ``pictures.py nchw|nhwc DTYPE [norm]``."""

import sys

import torch
from torch import nn
from torch.nn import functional

LAYOUT = torch.channels_last if sys.argv[1] == "nhwc" else torch.contiguous_format
DTYPE = getattr(torch, sys.argv[2])
NORM = "norm" in sys.argv


class Net(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Two convolutions, one of them by groups, and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(16, 32, 3, padding=1, bias=False)
        self.second = nn.Conv2d(32, 32, 3, padding=1, groups=4, bias=False)
        self.norm = nn.GroupNorm(4, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return shares of places."""
        x = self.second(self.first(x))
        if NORM:
            x = self.norm(x)
            assert x.is_contiguous()
        return functional.softmax(x.permute(0, 2, 3, 1).flatten(1), dim=-1)


model = Net().to("cuda", memory_format=LAYOUT)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
assert model.first.weight.is_contiguous(memory_format=LAYOUT)
pictures = torch.randn(4, 16, 8, 8, device="cuda").contiguous(memory_format=LAYOUT)
for _ in range(3):
    with torch.autocast("cuda", dtype=DTYPE):
        shares = model(pictures)
        assert shares.dtype == torch.float32
        loss = (shares * shares).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
