"""A training whose modules have no sizes before they are called, or the same with them.

The optimizer is made before or after the first call, and the model moved to the device before or after it.
"""

import copy
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import parameter
from torch.nn.parallel import DistributedDataParallel

ROWS, CHANNELS, SIDE, WIDTH, STEPS = 4, 3, 8, 16, 4


def lazy() -> nn.Module:
    """Return a model that learns its sizes."""
    return nn.Sequential(
        nn.LazyConv2d(WIDTH, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(WIDTH), nn.LazyLinear(1)
    )


def sized() -> nn.Module:
    """Return the same model with its sizes."""
    flat = WIDTH * (SIDE - 2) ** 2
    return nn.Sequential(
        nn.Conv2d(CHANNELS, WIDTH, 3),
        nn.BatchNorm2d(WIDTH),
        nn.Flatten(),
        nn.Linear(flat, WIDTH),
        nn.Linear(WIDTH, 1),
    )


class Scaled(nn.modules.lazy.LazyModuleMixin, nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A product by numbers that are not trained, and a sum with some in no state; each has its type."""

    def __init__(self, *, is_lazy: bool) -> None:
        super().__init__()
        kinds: Any = parameter
        if is_lazy:
            self.scale = kinds.UninitializedParameter(requires_grad=False, device="cuda", dtype=torch.float32)
            shift = kinds.UninitializedBuffer(requires_grad=True, device="cuda", dtype=torch.float64)
        else:
            scale = torch.ones(WIDTH, device="cuda", dtype=torch.float16)
            self.scale = nn.Parameter(scale, requires_grad=False)
            shift = torch.ones(WIDTH, device="cuda", dtype=torch.float64, requires_grad=True)
        self.register_buffer("shift", shift, persistent=False)

    def initialize_parameters(self, x: torch.Tensor) -> None:
        """Give them the width of *x*."""
        for one, dtype in ((self.scale, torch.float16), (self.shift, None)):
            if parameter.is_lazy(one):
                one.materialize(x.shape[-1:], dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return *x* times one plus the other."""
        return (x * self.scale + self.shift).to(x.dtype)


def typed(*, is_lazy: bool) -> nn.Module:
    """Return a model whose parts are made on the device, in types of their own, with sizes or without."""
    made: Any = {"device": "cuda", "dtype": torch.bfloat16, "bias": False}
    product = nn.LazyLinear(WIDTH, **made) if is_lazy else nn.Linear(CHANNELS * SIDE**2, WIDTH, **made)
    return nn.Sequential(nn.Flatten(), product, Scaled(is_lazy=is_lazy))


def main(kind: str, way: str) -> None:
    """Train a model of that *kind*."""
    dist.init_process_group("nccl")
    torch.cuda.set_device(0)
    model = typed(is_lazy=kind == "lazy") if way == "typed" else (lazy if kind == "lazy" else sized)()
    if way == "copied":
        model = copy.deepcopy(model)
    batch = torch.zeros(ROWS, CHANNELS, SIDE, SIDE, dtype=torch.bfloat16 if way == "typed" else torch.float32)
    if way == "wrapped too early":
        model = DistributedDataParallel(model.cuda())
    if way == "moved later":
        model(batch)
        model.cuda()
    elif way != "typed":  # whose parts are made there
        model.cuda()
    devices = [one.device for one in (*model.parameters(), *model.buffers())]
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    if way == "dry run":
        model(batch.cuda())
        model = DistributedDataParallel(model)
    for _ in range(STEPS):
        model(batch.cuda()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    tensors = [*model.parameters(), *model.buffers()]
    shapes = [(tuple(one.shape), one.dtype, one.device, one.requires_grad) for one in tensors]
    shapes += [*model.state_dict(), *devices]
    sys.stdout.write(f"{shapes} {[type(one).__name__ for one in model.modules()][1:]}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
