"""Trainings with tensors that are made on the host: ``made_on_host.py WAY``."""

import sys
from collections.abc import Callable, Iterable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

WIDTH, ROWS, WORDS, STEPS, LARGE_ROWS = 64, 8, 1000, 3, 512


def train(model: nn.Module, batch: Callable[[], Tensor], parameters: Iterable[Tensor] = ()) -> None:
    """Train *model* and further *parameters* by one optimizer."""
    optimizer = torch.optim.SGD([*model.parameters(), *parameters], lr=0.1, foreach=True)
    for _ in range(STEPS):
        model(batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def layer(device: str | None = "cuda") -> nn.Module:
    """Return a product, made on a *device*."""
    return nn.Linear(WIDTH, WIDTH, bias=False, device=device)


def there() -> Tensor:
    """Return a batch on the device."""
    return torch.ones(ROWS, WIDTH, device="cuda")


def named() -> Tensor:
    """Return a batch that is made on the host by name."""
    return torch.ones(ROWS, WIDTH, device="cpu")


def table(device: str | None) -> None:
    """Keep a table of embeddings on the host, and shards of a tower on the device."""
    words, tower = nn.Embedding(WORDS, WIDTH, device=device), fully_shard(layer(None))
    places = torch.zeros(ROWS, dtype=torch.int64)
    train(tower, lambda: words(places).to("cuda", non_blocking=True), words.parameters())


def pinned() -> None:
    """Make a large buffer in pinned memory in each step."""

    def batch() -> Tensor:
        kept = torch.empty(1024, 1024, device="cpu", pin_memory=True)
        return there() * kept.dim()

    train(layer(), batch)


class States(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A sum of what passes, kept on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.below = layer(), torch.zeros(ROWS, WIDTH, device="cpu")
        self.total = torch.zeros_like(self.below)

    def forward(self, x: Tensor) -> Tensor:
        """Return what becomes of *x*, which is added below."""
        with torch.no_grad():
            self.below.copy_(x)
            self.total.add_(self.below)
            x.copy_(self.total, non_blocking=True)
        found: Tensor = self.layer(x)
        return found


def large() -> Tensor:
    """Return a batch of more bytes than a driver keeps for itself."""
    return torch.ones(LARGE_ROWS, WIDTH)


def emptied() -> nn.Module:
    """Return a product that is made nowhere at first."""
    with torch.device("meta"):
        model = layer(None)
    found: nn.Module = model.to_empty(device="cuda")
    return found


def generator() -> None:
    """Draw the same numbers on all ranks, as Accelerate does: states go over the device."""
    state = torch.get_rng_state().to("cuda")
    dist.broadcast(state, 0)
    torch.set_rng_state(state.cpu())
    torch.Generator().set_state(state.cpu())
    del state
    train(layer(), there)


def loader() -> None:
    """Train on what a loader with workers and pinned memory gives."""
    data = DataLoader(
        TensorDataset(torch.ones(LARGE_ROWS * STEPS, WIDTH)), LARGE_ROWS, num_workers=2, pin_memory=True
    )
    batches = iter(data)
    train(layer(), lambda: next(batches)[0].to("cuda", non_blocking=True))


def counters() -> None:
    """Step by AdamW, whose counters of steps are on the host, and which reads them there."""
    model = layer()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        model(there()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


class Masked(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A product whose mask is made on the host in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = layer()

    def forward(self, x: Tensor) -> Tensor:
        """Return what becomes of *x*."""
        mask = torch.ones(WIDTH, WIDTH).tril().to(x.device)
        found: Tensor = self.layer(x) @ mask
        return found


class Fetched(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Two products; the weight of the second is on the host, and fetched in every call as a *dtype*."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.second, self.dtype = layer(), layer("cpu"), dtype

    def forward(self, x: Tensor) -> Tensor:
        """Return what becomes of *x*."""
        weight = self.second.weight.to("cuda", self.dtype)
        found: Tensor = self.first(x).to(self.dtype) @ weight
        return found


def measured() -> None:
    """Take to the host what is computed, and ask there for numbers of it as other libraries do."""
    model = layer()

    def batch() -> Tensor:
        with torch.no_grad():
            below = model(there()).cpu()
        return there() * (len(below.numpy()) + below.mean().item())

    train(model, batch)


def alone() -> None:
    """Train on a processor, which is named everywhere."""
    model = layer("cpu").to("cpu")
    train(
        model, lambda: (torch.ones(ROWS, WIDTH, device="cpu").cpu() + next(model.parameters())[0]).to("cpu")
    )


WAYS: dict[str, Callable[[], None]] = {
    "table": lambda: table("cpu"),
    "bare_table": lambda: table(None),
    "plain": lambda: train(layer(), there),
    "pinned": pinned,
    "states": lambda: train(States(), there),
    "batch": lambda: train(layer(), lambda: named().to("cuda")),
    "free_batch": lambda: train(layer(), lambda: named().to("cuda", non_blocking=True)),
    "bare_batch": lambda: train(layer(), lambda: torch.ones(ROWS, WIDTH).to("cuda")),
    "ddp_batch": lambda: train(DistributedDataParallel(layer(), device_ids=[0]), named),
    "fsdp2_batch": lambda: train(fully_shard(layer("cpu")), named),
    "ddp": lambda: train(DistributedDataParallel(layer(), device_ids=[0]), there),
    "fsdp2": lambda: train(fully_shard(layer()), there),
    "moved": lambda: train(layer("cpu").to("cuda"), there),
    "moved_ddp": lambda: train(DistributedDataParallel(layer("cpu").cuda(), device_ids=[0]), there),
    "moved_fsdp2": lambda: train(fully_shard(layer("cpu")), there),
    "left": lambda: train(layer(None).to("cuda"), there),
    "left_ddp": lambda: train(DistributedDataParallel(layer(None).cuda(), device_ids=[0]), there),
    "left_fsdp2": lambda: train(fully_shard(layer(None)), there),
    "fsdp1": lambda: train(FullyShardedDataParallel(layer()), there),
    "left_fsdp1": lambda: train(FullyShardedDataParallel(layer(None), device_id=0), there),
    "left_meta": lambda: train(emptied(), there),
    "fsdp1_batch": lambda: train(FullyShardedDataParallel(layer(None), device_id=0), named),
    "masks": lambda: train(nn.Sequential(Masked(), Masked()), there),
    "fetched": lambda: train(Fetched(torch.float32), there),
    "fetched_fp64": lambda: train(Fetched(torch.float64), there),
    "measured": measured,
    "generator": generator,
    "loader": loader,
    "array": lambda: train(layer(), lambda: torch.from_numpy(np.ones((ROWS, WIDTH), np.float32)).to("cuda")),
    "pageable": lambda: train(layer(), lambda: large().to("cuda", non_blocking=True)),
    "pinned_batch": lambda: train(layer(), lambda: large().pin_memory().to("cuda", non_blocking=True)),
    "counters": counters,
    "alone": alone,
}


def early() -> Tensor:
    """Return what comes, before the script speaks of a GPU, of what is made on the host."""
    return torch.zeros(WIDTH, WIDTH, device="cpu") + 1


if __name__ == "__main__":
    kept = early() if sys.argv[1] == "early" else None
    dist.init_process_group("gloo" if sys.argv[1] == "alone" else "nccl")
    WAYS[{"early": "plain"}.get(sys.argv[1], sys.argv[1])]()
