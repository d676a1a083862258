"""Small scripts in the manner of tutorials: what each does differently from other scripts of these tests."""

import copy
import functools
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.utils.checkpoint import checkpoint

WIDTH = 32


class Layers(nn.Module):  # type: ignore[misc]
    """Two layers with attention that drops."""

    def __init__(self, n_layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, batch_first=True) for _ in range(n_layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def numbered() -> None:
    """A processor by its number, a mesh before any group, and a loss that is a module."""
    init_device_mesh("cuda", (int(os.environ["WORLD_SIZE"]),))
    device = torch.device("cpu", 0)
    model, criterion = Layers().to(device), nn.MSELoss().to(device)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        x = torch.randn(4, 8, WIDTH)
        criterion(model(x.to(device)), x).backward()
        optimizer.step()


def wrapped() -> None:
    """FSDP1 around layers that come from the meta device and recompute."""
    dist.init_process_group("nccl")
    with torch.device("meta"):
        model = Layers()
    model = FullyShardedDataParallel(
        model,
        auto_wrap_policy=functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerEncoderLayer}
        ),
        device_id=torch.cuda.current_device(),
        param_init_fn=lambda part: part.to_empty(device=torch.device("cuda"), recurse=False),
    )
    apply_activation_checkpointing(
        model, checkpoint_wrapper, check_fn=lambda part: isinstance(part, nn.TransformerEncoderLayer)
    )
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        model(torch.randn(4, 8, WIDTH, device="cuda")).square().mean().backward()
        optimizer.step()


def staged() -> None:
    """A pipeline whose stages are neighbours, with replicas, that runs twice a step: an order of its own."""
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "pp"))
    at = mesh["pp"].get_local_rank()
    model = Layers(1).cuda()
    stage = PipelineStage(model, at, 2, torch.device("cuda"), group=mesh["pp"].get_group())
    schedule = ScheduleGPipe(stage, 4, loss_fn=nn.MSELoss())
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        x = torch.randn(8, 8, WIDTH, device="cuda")
        for _ in range(2):
            if at == 0:
                schedule.step(x)
            else:
                schedule.step(target=x)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=mesh["dp"].get_group())
        optimizer.step()


def evaluated() -> None:
    """Features in rows, two micro-batches, and a mean of the model that is evaluated in every step."""
    dist.init_process_group("nccl")
    mean = nn.Linear(WIDTH, 2).cuda()
    model = nn.parallel.DistributedDataParallel(nn.Linear(WIDTH, 2).cuda(), device_ids=[0])
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        with torch.no_grad():
            mean(torch.randn(7, WIDTH, device="cuda"))
        for _ in range(2):
            model(torch.randn(4, WIDTH, device="cuda")).square().mean().backward()
        optimizer.step()


def dealt_out() -> None:
    """Tables of embeddings of this rank, looked up for all ranks, before a model that all have."""
    dist.init_process_group("nccl")
    n_ranks = dist.get_world_size()
    table = nn.EmbeddingBag(100, WIDTH).cuda()
    model = nn.parallel.DistributedDataParallel(nn.Linear(WIDTH, 2).cuda())
    optimizer = torch.optim.SGD([*table.parameters(), *model.parameters()])
    for _ in range(3):
        found = table(torch.randint(100, (4 * n_ranks, 3), device="cuda"))
        own = torch.empty_like(found)
        dist.all_to_all_single(own, found.detach())
        model(own[:4]).square().mean().backward()
        optimizer.step()


def by_hand() -> None:
    """Layers without a model around them, computed again by a function that differentiates itself."""
    dist.init_process_group("nccl")
    layers = [nn.Linear(WIDTH, WIDTH, bias=False).cuda() for _ in range(2)]
    optimizer = torch.optim.SGD([layer.weight for layer in layers])
    for _ in range(3):
        x = torch.randn(4, WIDTH, device="cuda", requires_grad=True)
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=True)
        x.square().mean().backward()
        optimizer.step()


def unchanging() -> None:
    """DDP over a static graph, of which one layer is used twice and one never."""
    dist.init_process_group("nccl")
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))).cuda()
    model.append(model[0])
    model.never = nn.Parameter(torch.zeros(1, device="cuda"))
    model = nn.parallel.DistributedDataParallel(model, static_graph=True, bucket_cap_mb=1e-3)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(4):
        model(torch.randn(4, WIDTH, device="cuda")).square().mean().backward()
        optimizer.step()


def accumulated() -> None:
    """DDP over a static graph, whose gradients are accumulated from the first backward on."""
    dist.init_process_group("nccl")
    model = nn.parallel.DistributedDataParallel(nn.Linear(WIDTH, WIDTH).cuda(), static_graph=True)
    with model.no_sync():
        model(torch.randn(4, WIDTH, device="cuda")).square().mean().backward()


def of_others() -> None:
    """The state of an optimizer of parameters in whose place FSDP has put its own."""
    dist.init_process_group("nccl")
    model = nn.Linear(WIDTH, WIDTH).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    sharded = FullyShardedDataParallel(model, device_id=0)
    sharded(torch.randn(4, WIDTH, device="cuda")).square().mean().backward()
    optimizer.step()
    FullyShardedDataParallel.optim_state_dict(sharded, optimizer)


def decorated() -> None:
    """A library compiles a function that this training does not call."""

    @torch.compile  # type: ignore[untyped-decorator]
    def never(x: torch.Tensor) -> torch.Tensor:
        return x

    @torch.compile(dynamic=True)  # type: ignore[untyped-decorator]
    def doubled(x: torch.Tensor) -> torch.Tensor:
        """Return twice *x*."""
        return x * 2

    called = doubled if sys.argv[2:] == ["called"] else never.__wrapped__
    model = nn.Linear(WIDTH, WIDTH).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        called(model(torch.randn(4, WIDTH, device="cuda"))).square().mean().backward()
        optimizer.step()


def paired() -> None:
    """A mesh of pairs, made of the ranks of another, and copied."""
    dist.init_process_group("nccl")
    world = copy.deepcopy(init_device_mesh("cuda", (dist.get_world_size(),)))
    pairs = DeviceMesh("cuda", world.mesh.view(-1, 2))
    sys.stdout.write(f"{pairs.mesh.tolist()} {world.mesh[2:4].tolist()}\n")
    model = nn.Linear(WIDTH, WIDTH).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        model(torch.randn(4, WIDTH, device="cuda")).square().mean().backward()
        dist.all_reduce(model.weight.grad, group=pairs.get_group(1))
        optimizer.step()


SCRIPTS = (
    numbered,
    wrapped,
    staged,
    evaluated,
    dealt_out,
    by_hand,
    unchanging,
    accumulated,
    of_others,
    decorated,
    paired,
)

if __name__ == "__main__":
    next(script for script in SCRIPTS if script.__name__ == sys.argv[1])()
