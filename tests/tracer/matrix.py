"""Trainings of every strategy that runs on gloo, each as it is and then recorded, by the same processes.

Usage: matrix.py FOLDER HOOKS STRATEGY ...; HOOKS is ``python``, or ``python,compiled`` to record with both
kinds in turn. Writes the losses of all to ``losses-RANK.json``. Every model is made
of layers without biases of 8 x 8 numbers, 256 bytes each, so that what is sent can be counted by hand.
"""

import contextlib
import functools
import gc
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import foretrace

WIDTH, LAYERS, STEPS, MICROBATCHES = 8, 4, 3, 4
Step = Callable[[], Tensor]


def layers(n: int = LAYERS) -> nn.Sequential:
    """Return the model, with the same weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(n)))


def batch() -> Tensor:
    """Return other numbers on every rank."""
    return torch.linspace(-1, 1 + dist.get_rank(), 4 * WIDTH).reshape(4, WIDTH)


def trained(model: Callable[[Tensor], Tensor], parameters: Iterator[nn.Parameter]) -> Step:
    """Return one step of plain training."""
    optimizer = torch.optim.SGD(parameters, lr=0.01)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = model(batch()).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def ddp_buckets() -> Step:
    """DDP with buckets of two layers."""
    model = DistributedDataParallel(layers(), bucket_cap_mb=2 * 4 * WIDTH**2 / 2**20)
    return trained(model, model.parameters())


def ddp_no_sync() -> Step:
    """DDP that reduces every second gradient only."""
    model = DistributedDataParallel(layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> Tensor:
        optimizer.zero_grad()
        for is_last in (False, True):
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = model(batch()).square().mean()
                loss.backward()
        optimizer.step()
        return loss

    return step


class Recomputed(nn.Module):  # type: ignore[misc]
    """A stack of layers whose forward is run again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers())

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def recompute() -> Step:
    """Activation checkpointing under DDP."""
    model = DistributedDataParallel(Recomputed())
    return trained(model, model.parameters())


def fsdp1(strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD, mesh: object = None) -> Step:
    """The first FSDP, each layer a unit."""
    model = FullyShardedDataParallel(
        layers(),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        sharding_strategy=strategy,
        device_id=torch.device("cpu"),
        device_mesh=mesh,
    )
    return trained(model, model.parameters())


def hsdp1() -> Step:
    """The first FSDP: shards over pairs, replicas of pairs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return fsdp1(ShardingStrategy.HYBRID_SHARD, mesh)


def hsdp2() -> Step:
    """FSDP2: shards over pairs, replicas of pairs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = layers()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return trained(model, model.parameters())


class Experts(nn.Module):  # type: ignore[misc]
    """Tokens go to the rank of their expert and come back."""

    def __init__(self, group: object) -> None:
        super().__init__()
        self.expert, self.group = layers(1), group

    def forward(self, x: Tensor) -> Tensor:
        exchange = functools.partial(functional.all_to_all_single_autograd, group=self.group)
        there = exchange(x, None, None)
        return exchange(self.expert(there), None, None)


def ep() -> Step:
    """Experts on every rank: two exchanges forward, two backward."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    model = nn.Sequential(layers(1), Experts(mesh.get_group()))
    return trained(model, model.parameters())


def cp() -> Step:
    """Context parallelism of Ulysses: sequences for heads and back, by the classic all-to-all."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model = layers(1)

    def exchanged(x: Tensor) -> Tensor:
        found = torch.empty_like(x)
        dist.all_to_all_single(found, x.contiguous(), group=mesh.get_group())
        return found

    return trained(lambda x: model(exchanged(exchanged(x))), model.parameters())


def ring() -> Step:
    """A ring that passes on keys and values in batches of transfers."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    group, n = mesh.get_group(), dist.get_world_size()
    model = layers(1)

    def passed_on(x: Tensor) -> Tensor:
        rank = dist.get_rank()
        for _ in range(n - 1):
            found = torch.empty_like(x)
            transfers = [
                dist.P2POp(dist.isend, x, (rank + 1) % n, group),
                dist.P2POp(dist.irecv, found, (rank - 1) % n, group),
            ]
            for work in dist.batch_isend_irecv(transfers):
                work.wait()
            x = found
        return x

    return trained(lambda x: model(passed_on(x)), model.parameters())


def objects() -> Step:
    """Collectives of Python objects, and a barrier."""
    model, n = layers(1), dist.get_world_size()
    plain = trained(model, model.parameters())

    def step() -> Tensor:
        loss = plain()
        everything: list[object] = [None] * n
        dist.all_gather_object(everything, {"loss": 1.0})
        dist.broadcast_object_list([1, "two"])
        mine: list[object] = [None]
        dist.scatter_object_list(mine, list(range(n)) if dist.get_rank() == 0 else None)
        dist.gather_object("x", everything if dist.get_rank() == 0 else None)
        dist.barrier()
        return loss

    return step


def classic() -> Step:
    """The collectives of ``torch.distributed`` itself, and several in one."""
    model, n = layers(1), dist.get_world_size()
    plain = trained(model, model.parameters())

    def step() -> Tensor:
        loss = plain()
        x, xs = torch.ones(16), torch.ones(16 * n)
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        dist.reduce(x, 0)
        dist.all_gather([torch.empty(16) for _ in range(n)], x)
        dist.all_gather_into_tensor(xs, x)
        dist.reduce_scatter_tensor(x, xs)
        dist.scatter(x, list(xs.chunk(n)) if dist.get_rank() == 0 else None)
        dist.gather(x, [torch.empty(16) for _ in range(n)] if dist.get_rank() == 0 else None)
        dist.all_reduce(x, async_op=True).wait()
        functional.all_reduce(x, "sum", dist.group.WORLD) + 0
        functional.all_gather_tensor(x, 0, dist.group.WORLD) + 0
        functional.reduce_scatter_tensor(xs, "sum", 0, dist.group.WORLD) + 0
        return loss

    return step


def compiled() -> Step:
    """Functional collectives inside of a compiled graph, in which no Python calls them."""
    model, group = layers(1), dist.group.WORLD
    plain = trained(model, model.parameters())

    def exchanged(x: Tensor) -> Tensor:
        everywhere = functional.all_gather_tensor(functional.all_reduce(x, "sum", group), 0, group)
        return functional.reduce_scatter_tensor(everywhere * 2, "sum", 0, group) + 1

    graph: Callable[[Tensor], Tensor] = torch.compile(exchanged, backend="aot_eager", fullgraph=True)

    def step() -> Tensor:
        return plain() + graph(batch()).mean()

    return step


def cp_split() -> Step:
    """Context parallelism of torch: sequences are split for each step; its ring of attention needs a GPU."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model = layers(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> Tensor:
        optimizer.zero_grad()
        x = torch.linspace(-1, 1, 16 * WIDTH).reshape(1, 16, WIDTH)
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
            y = model(x)
            loss = y.square().mean()
            loss.backward()
            context_parallel_unshard(mesh, [y.detach()], [1])
        optimizer.step()
        return loss

    return step


SCHEDULES = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "looped-bfs": pipelining.ScheduleLoopedBFS,
    "interleaved-1f1b": pipelining.ScheduleInterleaved1F1B,
    "interleaved-zb": pipelining.ScheduleInterleavedZeroBubble,
    "zb-v": pipelining.ScheduleZBVZeroBubble,
    "dualpipe-v": pipelining.ScheduleDualPipeV,
}


def stages_of(schedule: str, rank: int, n_ranks: int) -> list[int]:
    """Return the stages of a rank: one, or two in a loop, or two in a V."""
    if schedule in {"gpipe", "1f1b"}:
        return [rank]
    second = 2 * n_ranks - 1 - rank if schedule in {"zb-v", "dualpipe-v"} else rank + n_ranks
    return [rank, second]


def pipeline(schedule: str, n_ranks: int = 2, dp: object = None, group: object = None) -> Step:
    """A pipeline of ``torch.distributed.pipelining``; each stage is one layer, sharded over *dp* if given."""
    rank = dist.get_rank(group)
    numbers = stages_of(schedule, rank, n_ranks)
    n_stages, parts = len(numbers) * n_ranks, list(layers(len(numbers) * n_ranks))
    for i in numbers if dp is not None else ():
        fully_shard(parts[i], mesh=dp)
    stages = [
        pipelining.PipelineStage(parts[i], i, n_stages, torch.device("cpu"), group=group) for i in numbers
    ]
    schedules = SCHEDULES[schedule](
        stages if len(stages) > 1 else stages[0], MICROBATCHES, loss_fn=nn.functional.mse_loss
    )
    chosen = itertools.chain.from_iterable(parts[i].parameters() for i in numbers)
    optimizer = torch.optim.SGD(chosen, lr=0.01)
    x = torch.linspace(-1, 1, 4 * MICROBATCHES * WIDTH).reshape(-1, WIDTH)

    def step() -> Tensor:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        inputs = [x] if 0 in numbers else []
        last = {"target": x, "losses": losses} if n_stages - 1 in numbers else {}
        schedules.step(*inputs, **last)
        optimizer.step()
        return torch.stack(losses).mean() if losses else torch.zeros(())

    return step


def pp_fsdp() -> Step:
    """Two stages, each sharded over two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    return pipeline("1f1b", dp=mesh["dp"], group=mesh.get_group("pp"))


MADE = {
    "ddp_buckets": ddp_buckets,
    "ddp_no_sync": ddp_no_sync,
    "recompute": recompute,
    "fsdp1": fsdp1,
    "hsdp1": hsdp1,
    "hsdp2": hsdp2,
    "ep": ep,
    "cp": cp,
    "ring": ring,
    "objects": objects,
    "classic": classic,
    "compiled": compiled,
    "cp_split": cp_split,
    "pp_fsdp": pp_fsdp,
} | {name: functools.partial(pipeline, name) for name in SCHEDULES}


def main() -> None:
    """Train every strategy that is asked for."""
    folder, *names = sys.argv[1:]
    dist.init_process_group("gloo")
    found: dict[str, dict[str, list[float]]] = {}
    for name in names:
        for way in ("plain", "recorded"):
            gc.collect()  # a mesh of the strategy before still names the group of the whole world
            recording = foretrace.record(f"{folder}/{way}/{name}")
            with contextlib.nullcontext() if way == "plain" else recording:
                step = MADE[name](*([dist.get_world_size()] if name in SCHEDULES else []))
                found.setdefault(name, {})[way] = [step().item() for _ in range(STEPS)]
            del step
    Path(folder, f"losses-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
