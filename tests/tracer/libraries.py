"""Trainings as libraries write them: ``recomputed``, ``inside``, ``dropped``, ``experts``, ``saved``
or ``asking``."""

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH, EXPERTS, ROWS = 64, 4, 128
EXPERT_ROWS = (5, 0, 65, 58)

SAVING = """
import ctypes


def save_file(tensors, filename):
    for tensor in tensors.values():
        ctypes.string_at(tensor.data_ptr(), tensor.nbytes)

save = load = load_file = save_file
"""
"""A library that writes what it finds where a tensor says that it lies, which ends a process without it."""

ASKING = """
def is_fake_tensor(x):
    import torch

    return isinstance(x, getattr(torch, "_subclasses").FakeTensor)
"""
"""A library that takes a fake tensor for the sign of a graph that is traced."""


def library(name: str, source: str) -> Any:
    """Return a module of that *name*, just written into the folder that the second argument names."""
    path = Path(sys.argv[2], *name.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    sys.path.insert(0, sys.argv[2])
    return importlib.import_module(name)


class Normed(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A norm and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(self.norm(x))
        return found


class Recomputed(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Each layer is computed again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Normed(), Normed()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class Inside(Normed):
    """A layer whose inside is computed again: nobody calls the module a second time."""

    def __init__(self, *, is_reentrant: bool) -> None:
        super().__init__()
        self.is_reentrant = is_reentrant

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(super().forward, x, use_reentrant=self.is_reentrant)
        return found


class Experts(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Products of experts in the type of their parameters, which autocast leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor(EXPERT_ROWS, device=x.device).cumsum(0, dtype=torch.int32)
        x = functional.grouped_mm(x, self.up, offs=ends)
        return functional.grouped_mm(x.bfloat16(), self.down, offs=ends)


what = sys.argv[1]
model: nn.Module = Experts() if what == "experts" else Recomputed()
if what == "inside":
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Inside(is_reentrant=True), Inside(is_reentrant=False))
if what == "dropped":
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1))
model.cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if what == "saved":
    library("safetensors.torch", SAVING).save_file(model.state_dict(), "model.safetensors")
if what == "asking" and library("transformers.utils.import_utils", ASKING).is_fake_tensor(
    next(model.parameters())
):
    raise SystemExit("a graph is traced")
for _ in range(3):
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(torch.randn(ROWS, WIDTH, device="cuda")).float().mean()
    loss.backward()
    optimizer.step()
