"""A script that asks of constants and of random numbers what libraries ask of masks, for tests."""

import sys

import torch
from torch import Tensor, nn

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
model = nn.Linear(16, 16).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def said(mask: Tensor) -> str:
    """Return what a script learns of a *mask*: the answers by which libraries choose an attention."""
    return f"{bool(mask.all())} {bool(mask.any())} {float(mask.sum()):g} {bool(mask.sum() == mask.numel())}"


for _ in range(2):
    activations = model(torch.randn(4, 16, device=device))
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int32):
        ones, zeros = torch.ones(2, 6, device=device).to(dtype), torch.zeros(2, 6, dtype=dtype, device=device)
        longer = torch.cat((torch.ones(2, 3, device=device), ones), dim=1)
        masks = {
            "ones": ones,
            "as truths": ones.bool(),
            "longer": longer,
            "cut": longer[:, -4:] > 0,
            "wide": ones[:, None, None, :].expand(2, 1, 6, 6),
            "inverted": 1.0 - ones,
            "filled": zeros.masked_fill(torch.arange(6, device=device) < 2, 1),
            "causal": torch.full((6, 6), -1.0, device=device).to(dtype).triu(1) == 0,
            "like": torch.full_like(ones, 3) * torch.zeros_like(ones) + 1,
            "padded": nn.functional.pad(ones, (0, 2)),
        }
        partly = torch.ones(2, 6, dtype=dtype, device=device)
        partly[:, 4:] = 0
        masks |= {"partly": partly, "emptied": torch.ones_like(partly).zero_()}
        sys.stdout.writelines(f"{dtype} {name}: {said(mask)}\n" for name, mask in masks.items())
    sys.stdout.writelines(
        f"random {p}: {bool(torch.rand(1, device=device) > p)} {bool(torch.rand((), device=device) < p)}\n"
        for p in (-1.0, 0.0, 1.0)
    )
    changed = torch.ones(4, 16, device=device).clone()
    changed.mul_(activations)
    sys.stdout.write(f"of activations: {changed.sum().item()}\n")
    activations.sum().backward()
    optimizer.step()
