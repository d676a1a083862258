"""Trainings of which some is on the host and some on the device: ``partly_moved.py WAY``."""

import sys
from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
    fully_shard,
)
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel

WIDTH, ROWS, WORDS, STEPS = 64, 8, 1000, 3


def layer(device: str | None = "cuda") -> nn.Module:
    """Return a product, made on a *device*."""
    return nn.Linear(WIDTH, WIDTH, bias=False, device=device)


def there() -> Tensor:
    """Return a batch on the device."""
    return torch.ones(ROWS, WIDTH, device="cuda")


def nothing() -> None:
    """Do nothing after a step."""


def train(
    model: nn.Module,
    batch: Callable[[], Tensor] = there,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    after: Callable[[], object] = nothing,
    before: Callable[[], object] = nothing,
) -> None:
    """Train *model* by an *optimizer*, and do something *before* and *after* each of its steps."""
    found = optimizer(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        model(batch()).square().mean().backward()
        before()
        found.step()
        found.zero_grad()
        after()


class Both(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A table that nobody moves, and a tower on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.tower = nn.Embedding(WORDS, WIDTH), layer(None).to("cuda")

    def forward(self, places: Tensor) -> Tensor:
        """Look *places* up where the table is."""
        found: Tensor = self.tower(self.words(places.to(self.words.weight.device)).to("cuda"))
        return found


class Kept(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A weight that is kept on the host, and fetched in every call."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights)

    def forward(self, x: Tensor) -> Tensor:
        """Return what becomes of *x*."""
        for weight in self.weights:
            x = x @ weight.to("cuda")
        return x


def weight(device: str, n_in: int = WIDTH, n_out: int = WIDTH) -> Tensor:
    """Return a matrix."""
    return torch.ones(n_in, n_out, device=device)


def listed(*, is_clipped: bool) -> None:
    """Step by lists over matrices of unlike sizes, of which the middle one is on the device."""
    model = Kept([weight("cpu"), weight("cuda", WIDTH, WIDTH // 2), weight("cpu", WIDTH // 2, WIDTH // 4)])
    optimizer = partial(torch.optim.SGD, momentum=0.9, foreach=True)
    train(
        model,
        optimizer=optimizer,
        before=lambda: clip_grad_norm_(model.parameters(), 1.0) if is_clipped else None,
    )


def averaged(device: str | None) -> None:
    """Keep an average of a model on a *device*."""
    model = layer()
    average = AveragedModel(model, device=device)
    train(model, after=lambda: average.update_parameters(model))


def emptied(device: str) -> None:
    """Train a product beside a norm, with its running sums, that is given its memory on a *device*."""
    with torch.device("meta"):
        norm = nn.BatchNorm1d(WIDTH)
    norm.to_empty(device=device)
    train(layer(), lambda: norm(torch.ones(ROWS, WIDTH, device=device)).to("cuda"))


def moved_by_torch() -> None:
    """Let torch move a module to where it finds it."""
    model = layer()
    exec(compile("model.to(model.weight.device)", torch.nn.__file__, "exec"), {"model": model})
    train(model)


def fsdp2(*, is_saved: bool) -> None:
    """Ask for the whole state of shards on the host."""
    model = fully_shard(layer(None))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    train(model, after=lambda: get_model_state_dict(model, options=options) if is_saved else None)


def fsdp1(*, is_saved: bool) -> None:
    """Ask for the whole state of a flat parameter on the host."""
    model = FullyShardedDataParallel(layer(None), device_id=0)
    way = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)

    def save() -> None:
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, way):
            model.state_dict()

    train(model, after=save if is_saved else nothing)


WAYS: dict[str, Callable[[], None]] = {
    "plain": lambda: train(layer()),
    "both": lambda: train(Both(), lambda: torch.zeros(ROWS, dtype=torch.int64)),
    "met": lambda: train(nn.Sequential(layer(), layer(None))),
    "known": lambda: train(nn.Sequential(layer(), layer())),
    "adam": lambda: train(Kept([weight("cpu")]), optimizer=torch.optim.Adam),
    "adam_both": lambda: train(Kept([weight("cpu"), weight("cuda")]), optimizer=torch.optim.Adam),
    "listed": lambda: listed(is_clipped=False),
    "clipped": lambda: listed(is_clipped=True),
    "averaged": lambda: averaged("cpu"),
    "averaged_there": lambda: averaged(None),
    "emptied": lambda: emptied("cpu"),
    "moved_by_torch": moved_by_torch,
    "fsdp2": lambda: fsdp2(is_saved=False),
    "fsdp2_saved": lambda: fsdp2(is_saved=True),
    "fsdp1": lambda: fsdp1(is_saved=False),
    "fsdp1_saved": lambda: fsdp1(is_saved=True),
}

if __name__ == "__main__":
    dist.init_process_group("nccl")
    WAYS[sys.argv[1]]()
