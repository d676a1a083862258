"""Trainings that ask tensors for their device: ``placed.py NAME...``, each of one step."""

import copy
import os
import random
import sys
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

WIDTH, ROWS, SEEDS, LENGTH, MOST_KEPT = 64, 8, 40, 40, 12


def _by_default(made: Callable[[list[float]], Tensor], device: torch.device) -> Tensor:
    """Return what *made* has made of four numbers where *device* is the default."""
    with device:
        return made([1.0, 2.0, 3.0, 4.0])


STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "made": lambda x, y: torch.zeros(4),
    "made_there": lambda x, y: torch.ones(4, device=x.device),
    "made_on_cpu": lambda x, y: torch.empty(4, device="cpu"),
    "made_on_gpu": lambda x, y: torch.full((4,), 2.0, device="cuda"),
    "counted": lambda x, y: torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "counted_there": lambda x, y: torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device),
    "taken": lambda x, y: torch.as_tensor(x),
    "taken_there": lambda x, y: torch.as_tensor(x, device=y.device),
    "like": lambda x, y: torch.zeros_like(x),
    "like_there": lambda x, y: torch.zeros_like(x, device=y.device),
    "new": lambda x, y: x.new_zeros(4),
    "to_gpu": lambda x, y: x.to("cuda:0"),
    "to_cpu": lambda x, y: x.cpu(),
    "to_said": lambda x, y: x.to("cpu"),
    "to_there": lambda x, y: x.to(y.device),
    "to_type": lambda x, y: x.to(y.device, torch.float64).float(),
    "to_other": lambda x, y: x.to(y),
    "type_as": lambda x, y: x.type_as(y),
    "twice": lambda x, y: x * 2,
    "summed": lambda x, y: x + y.sum() if y.device.type == "cpu" else y + x.to("cuda:0"),
    "added": lambda x, y: x + y if x.device == y.device else x,
    "joined": lambda x, y: torch.cat([x, y.to(x.device)]).narrow(0, 0, 4),
    "viewed": lambda x, y: x.view(2, 2).t().reshape(4),
    "detached": lambda x, y: x.detach(),
    "copied": lambda x, y: x.clone(),
    "counted_here": lambda x, y: torch.tensor([1.0, 2.0, 3.0, 4.0], device="cpu"),
    "taken_here": lambda x, y: torch.as_tensor([1.0, 2.0, 3.0, 4.0], device="cpu"),
    "chosen": lambda x, y: x.index_select(0, torch.tensor([0, 1, 2, 3], device=x.device)),
    "bare": lambda x, y: nn.Parameter(x),
    "drawn": lambda x, y: torch.empty(4).normal_(),
    "placed": lambda x, y: torch.ops.aten.index.Tensor(x, [torch.arange(4)]),
    "scaled": lambda x, y: x * torch.tensor(2.0),
    "shifted": lambda x, y: torch.tensor(1.0) + y.sum() + torch.zeros(4, device=y.device),
    "overwritten": lambda x, y: torch.ops.aten.copy_.default(torch.zeros_like(x), y),
    "of_array": lambda x, y: torch.from_numpy(np.zeros(4, np.float32)).to(y.device),
    "split": lambda x, y: x.chunk(2)[0].repeat(2),
    "where": lambda x, y: torch.where(x > 0, x, 0.0),
    "counted_by_default": lambda x, y: _by_default(torch.tensor, x.device),
    "taken_by_default": lambda x, y: _by_default(torch.as_tensor, y.device),
    "of_list_by_default": lambda x, y: _by_default(torch.asarray, y.device),
    "product": lambda x, y: nn.functional.linear(x, torch.eye(4, device=x.device, dtype=x.dtype)),
}
"""What can be made of two tensors of four numbers."""


def devices(seed: int, held: Callable[[Sequence[Tensor]], int]) -> list[str]:
    """Return each step of a random program and where its result is, and what the device holds then.

    Args:
        seed: of the program.
        held: returns the bytes that a device has for tensors.
    """
    draw, found = random.Random(seed), []
    pool = [torch.zeros(4), torch.zeros(4, device="cuda")]
    for _ in range(LENGTH):
        name, x, y = draw.choice(sorted(STEPS)), draw.choice(pool), draw.choice(pool)
        pool.append(STEPS[name](x, y))
        found.append(f"{name} {x.device.type} {y.device.type} {held(pool)}: {pool[-1].device}")
        if len(pool) > MOST_KEPT:  # some go
            pool.pop(draw.randrange(2, len(pool)))
    return found


def say(*words: object) -> None:
    """Write *words* to the output."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")


def step(model: nn.Module, x: Tensor) -> None:
    """Train *model* on *x* once."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(x).square().mean().backward()
    weight = next(model.parameters())
    say("grad", weight.grad.device, weight.grad.is_cuda)
    optimizer.step()
    say("states", *(optimizer.state[weight][name].device for name in ("step", "exp_avg")))


def programs() -> None:
    """Say where everything is in many random programs."""
    with torch.no_grad():
        for seed in range(SEEDS):
            for line in devices(seed, lambda pool: torch.cuda.memory_allocated()):
                say(seed, line)
    step(nn.Linear(WIDTH, WIDTH, device="cuda"), torch.zeros(ROWS, WIDTH, device="cuda"))


class Branching(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Two products where its input is on a GPU, one on the host, and a square one for what *asks* says."""

    def __init__(self, asks: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.asks = asks
        self.one, self.two = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.two(self.one(x)) if self.asks(x) else self.one(x)
        return out


ASKED: dict[str, Callable[[Tensor], bool]] = {
    "type": lambda x: x.device.type == "cuda",
    "is_cuda": lambda x: x.is_cuda,
    "not_cpu": lambda x: not x.is_cpu,
    "number": lambda x: x.get_device() >= 0,
    "index": lambda x: x.device.index is not None,
    "equal": lambda x: x.device == torch.device("cuda", torch.cuda.current_device()),
    "name": lambda x: x.type() == "torch.cuda.FloatTensor",
    "text": lambda x: "cuda" in str(x.device),
}
"""Ways to ask a tensor whether it is on a GPU."""


def branches() -> None:
    """Take both branches, in each way to ask, without and with a GPU."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1, device="cuda"))])
    for name, asks in ASKED.items():
        model, x = Branching(asks), torch.zeros(ROWS, WIDTH)
        say(name, asks(x), asks(next(model.parameters())))
        model, x = model.cuda(), x.cuda()
        say(name, asks(x), asks(next(model.parameters())), asks(model(x)), asks(x.cpu()))
        model(x).sum().backward()
        optimizer.step()


def moved_by_torch() -> None:
    """Let torch put parameters on the device that were made on the host."""
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    say("mesh", mesh.device_type)
    x = torch.zeros(ROWS, WIDTH, device="cuda")
    say("sharded", distribute_tensor(torch.zeros(WIDTH, WIDTH), mesh, [Shard(0)]).device)
    step(fully_shard(nn.Linear(WIDTH, WIDTH), mesh=mesh), x)
    step(FullyShardedDataParallel(nn.Linear(WIDTH, WIDTH), device_id=x.device), x)
    step(DistributedDataParallel(nn.Linear(WIDTH, WIDTH).to(x.device), device_ids=[x.device.index]), x)
    step(parallelize_module(nn.Linear(WIDTH, WIDTH), mesh, ColwiseParallel()), x)
    offloaded = fully_shard(nn.Linear(WIDTH, WIDTH), mesh=mesh, offload_policy=CPUOffloadPolicy())
    say("before", next(offloaded.parameters()).device)
    step(offloaded, x)


def named() -> None:
    """Hand the device of a tensor on to what takes one."""
    x = torch.zeros(ROWS, WIDTH, device="cuda")
    say("generator", torch.Generator(device=x.device).device, torch.Generator().device)
    with torch.device("cuda"):
        say("default", torch.get_default_device(), torch.zeros(1).device)
    torch.set_default_device(x.device)
    say("default", torch.get_default_device(), (torch.zeros(1) + torch.zeros(1, device="cuda")).device)
    torch.set_default_device(None)
    say("default", torch.get_default_device(), torch.zeros(1).device)
    with torch.cuda.device(x.device), torch.cuda.device_of(x):
        say("current", torch.cuda.current_device())
    with torch.autocast(x.device.type):
        say("autocast", nn.Linear(WIDTH, WIDTH).to(x.device)(x).dtype, torch.get_autocast_gpu_dtype())
    model = nn.Linear(WIDTH, WIDTH).to("cuda").to(torch.device("cpu"))
    say("back", model.weight.device, model.to(x.device).weight.device, copy.deepcopy(model).weight.device)
    step(model, x)


class Scaled(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A product, by a number that the script keeps on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, device="cuda")
        self.register_buffer("scale", torch.tensor(2.0, device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        """Return what becomes of *x*."""
        found: Tensor = self.layer(x) * self.scale
        return found


def listed() -> None:
    """Make tensors of lists on the host, by name, before and after a GPU is spoken of."""
    early = [make([1.0, 2.0], device="cpu") for make in (torch.tensor, torch.as_tensor, torch.asarray)]
    model, x = Scaled(), torch.zeros(ROWS, WIDTH, device="cuda")
    say("early", *(one.device for one in early))
    step(model, x)
    say("kept", model.scale.device)


def main(names: Sequence[str]) -> None:
    """Run what has one of the *names*, one behind the other."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    for name in names:
        globals()[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
