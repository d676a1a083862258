"""What full sharding of PyTorch costs the host: ``unit_calls``, ``tensor_calls``, ``update_calls``.

    python benchmarks/fsdp_host.py

Units of a few tiny tensors, as they are and sharded over two ranks that do not exist: torch's fake process
group answers every collective at once. Processor time of one thread, the least of some repetitions, over that
of an operator that stands alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

REPETITIONS = 30
N_UNITS = 12
TENSORS = (2, 8, 16)
LINKS = 100


class Scaled(nn.Module):  # type: ignore[misc]  # torch has no types here
    """A unit of some tensors that are multiplied one after another."""

    def __init__(self, n_tensors: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(n_tensors))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product."""
        for scale in self.scales:
            x = x * scale
        return x


def main() -> None:
    """Print what a unit and a tensor cost, in operators."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    operator_s = _operator_s()
    print(f"an operator: {operator_s * 1e6:.1f} us; more than without sharding, in operators:")
    for n_tensors in TENSORS:
        plain, sharded = (_least_s(n_tensors, is_sharded=is_sharded) for is_sharded in (False, True))
        more = [(b - a) / operator_s for a, b in zip(plain, sharded, strict=True)]
        forward, backward = (found / N_UNITS for found in more[:2])
        update = more[2] / N_UNITS / n_tensors
        print(f"{n_tensors:3} tensors: a unit forward {forward:.0f}, backward {backward:.0f}", end="; ")
        print(f"a tensor updated {update:.0f}")


def _operator_s() -> float:
    """Return the time of a tiny operator of a chain, as ``foretrace topology detect`` measures it."""
    chain, took = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(LINKS)), []
    for _ in range(REPETITIONS):
        start, y = time.process_time(), torch.ones(4, 16, requires_grad=True)
        for link in chain:
            y = y + link(y)
        y.sum().backward()
        took.append(time.process_time() - start)
    # A product and a sum forward, two products backward.
    return min(took) / (4 * LINKS)


def _least_s(n_tensors: int, *, is_sharded: bool) -> list[float]:
    """Return the time of forward, backward and AdamW."""
    model = nn.Sequential(*(Scaled(n_tensors) for _ in range(N_UNITS)))
    if is_sharded:
        mesh = init_device_mesh("cpu", (2,))
        for unit in model:
            fully_shard(unit, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return least_s(model, lambda: model(torch.ones(4)).sum())


def least_s(model: nn.Module, loss: Callable[[], torch.Tensor]) -> list[float]:
    """Return the processor time of forward, backward and AdamW, the least of some repetitions, in s."""
    optimizer, rows = torch.optim.AdamW(model.parameters()), []
    for _ in range(REPETITIONS):
        optimizer.zero_grad()
        marks = [time.process_time()]
        found = loss()
        marks.append(time.process_time())
        found.backward()
        marks.append(time.process_time())
        optimizer.step()
        marks.append(time.process_time())
        rows.append([after - before for before, after in pairwise(marks)])
    return [min(column) for column in zip(*rows, strict=True)]


if __name__ == "__main__":
    main()
