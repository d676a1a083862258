"""Trainings of ``matrix.py``, one after the other: in a real world over gloo, or in one that is not there.

Usage: every_strategy.py FOLDER STRATEGY ...; a real world records each into FOLDER/STRATEGY, and writes the
FLOPs that torch counts in the third step of each to FOLDER/flops-RANK.json. A rehearsal only trains.
"""

import contextlib
import functools
import gc
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from matrix import MADE, SCHEDULES, Step, batch, layers, trained  # type: ignore[import-not-found]
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

import foretrace

STEPS = 4
"""DDP makes its buckets anew after the first step, and tells others in the second; the third is like all
later ones. What a strategy does after its optimizer belongs to the next step, so that there has to be one."""


class Branches(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Layers of which the last, whose bucket comes first, is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = layers(), layers(1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x)
        return out


def lists() -> Step:
    """Sequences for heads and back, by lists of tensors: gloo takes those of one size."""
    model, n = layers(1), dist.get_world_size()

    def exchanged(x: Tensor) -> Tensor:
        parts = [part.contiguous() for part in x.chunk(n)]
        found = [torch.empty_like(part) for part in parts]
        dist.all_to_all(found, parts)
        return torch.cat(found)

    return trained(lambda x: model(exchanged(exchanged(x))), model.parameters())


def ddp_unused() -> Step:
    """DDP that asks which parameters were used, with a bucket for each few."""
    model = DistributedDataParallel(Branches(), find_unused_parameters=True, bucket_cap_mb=1e-4)
    return trained(model, model.parameters())


class Reused(Branches):
    """Two layers, the first of which is used twice, and one that is never used."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(self.used[0](x))
        return out


class Reentrant(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Layers that are computed again, each in a backward of its own within the one of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


def ddp_reentrant() -> Step:
    """DDP over such layers, with a bucket for each few parameters, in which gradients lie."""
    model = DistributedDataParallel(Reentrant(), bucket_cap_mb=1e-4, gradient_as_bucket_view=True)
    return trained(model, model.parameters())


def ddp_static() -> Step:
    """DDP over a graph that is the same in every step, with a bucket for each few parameters."""
    model = DistributedDataParallel(Reused(), static_graph=True, bucket_cap_mb=1e-4)
    return trained(model, model.parameters())


def taught() -> Step:
    """DDP that learns of a larger model in shards, which is called without gradients."""
    teacher = layers().requires_grad_(False)
    for layer in (*teacher, teacher):
        fully_shard(layer)
    model = DistributedDataParallel(layers(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> Tensor:
        with torch.no_grad():
            aim = teacher(batch())
        optimizer.zero_grad()
        loss: Tensor = nn.functional.mse_loss(model(batch()), aim)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return step


def sharded_states() -> Step:
    """DDP whose optimizer has another one inside, for the states of its shard."""
    model = DistributedDataParallel(layers())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(batch()).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def pictures() -> Step:
    """Convolutions of both kinds, with a stride."""
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 1, 1), nn.ConvTranspose2d(8, 4, 4, 2, 1)
    )
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(torch.ones(2, 4, 8, 8)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def fsdp2_pairs() -> Step:
    """FSDP2 that keeps parameters in shards over pairs of ranks between forward and backward."""
    model = layers()
    for layer in model:
        fully_shard(layer, reshard_after_forward=2)
    fully_shard(model)
    return trained(model, model.parameters())


def fsdp2() -> Step:
    """FSDP2, each layer a unit, with the norm of all gradients."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = layers()
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(batch()).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return step


class Norm(nn.RMSNorm):  # type: ignore[misc]  # torch is untyped here
    """A norm that is cut along the sequence."""


def tensor_parallel(n_replicas: int = 1) -> Step:
    """Two matrices cut by columns and rows, behind a norm cut by tokens; replicas share them out."""
    n = dist.get_world_size() // n_replicas
    mesh = init_device_mesh("cpu", (n_replicas, n), mesh_dim_names=("dp", "tp"))
    up, down = layers(2)
    model = nn.Sequential(Norm(8), nn.Sequential(up, down))
    plan = {
        "0": SequenceParallel(sequence_dim=0),
        "1": PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()),
        "1.0": ColwiseParallel(),
        "1.1": RowwiseParallel(output_layouts=Shard(0)),
    }
    parallelize_module(model, mesh["tp"], plan)
    if n_replicas > 1:
        fully_shard(model, mesh=mesh["dp"])
    return trained(model, model.parameters())


def pretraining(pp: int) -> Step:
    """The loop of ``examples/rehearse/pretrain.py``, small: everything of a large training at once."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "rehearse"))
    import pretrain  # noqa: PLC0415 - only where it is trained

    # Torch works out how each layer is cut, which takes most of the time: two for each rank of a pipeline.
    words = f"--layers {2 * pp} --tp 2 --pp {pp} --hidden 16 --ffn 32 --heads 4 --kv-heads 2 --vocab 32 "
    words += "--seq-len 8 --compile 0 --workers 0 --stages-per-rank 2"
    sys.argv = ["pretrain.py", *words.split()]
    trainer, numbers = pretrain.Trainer(pretrain.settings()), itertools.count(1)
    return lambda: trainer.step(next(numbers))


MADE |= {f"pretraining_pp{pp}": functools.partial(pretraining, pp) for pp in (1, 2)}
MADE |= {
    "ddp_unused": ddp_unused,
    "lists": lists,
    "ddp_static": ddp_static,
    "ddp_reentrant": ddp_reentrant,
    "taught": taught,
    "zero": sharded_states,
    "pictures": pictures,
}
MADE["fsdp2_pairs"] = fsdp2_pairs
MADE |= {"fsdp2": fsdp2, "tp": tensor_parallel, "fsdp_tp": functools.partial(tensor_parallel, 2)}


class Flops(TorchDispatchMode):  # type: ignore[misc]  # torch is untyped here
    """Adds up what torch's own formulas say; its ``FlopCounterMode`` breaks split backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):  # comes again with its part of this rank
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if (formula := flop_registry.get(func._overloadpacket)) is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=out)
        return out


def main() -> None:
    """Train every strategy that is asked for."""
    folder, *names = sys.argv[1:]
    dist.init_process_group("gloo")
    is_real = os.environ.get("TORCHELASTIC_RUN_ID") != "rehearsal"
    flops: dict[str, int] = {}
    for name in names:
        gc.collect()  # a mesh of the strategy before still names the group of the whole world
        with foretrace.record(f"{folder}/{name}") if is_real else contextlib.nullcontext():
            step = MADE[name](*([dist.get_world_size()] if name in SCHEDULES else []))
            for number in range(STEPS):
                counts = is_real and number == STEPS - 2
                with Flops() if counts else contextlib.nullcontext() as counter:
                    step()
                if counter is not None:
                    flops[name] = counter.total
        del step
    if is_real:
        Path(folder, f"flops-{dist.get_rank()}.json").write_text(json.dumps(flops))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
