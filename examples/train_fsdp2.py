"""Fully sharded data parallelism: each layer is gathered for its forward and backward, and freed again.

torchrun --nproc-per-node 2 examples/train_fsdp2.py
"""

from __future__ import annotations

from model import loss_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from training import batch, build, flags, join, optimizer_of, train


def main() -> None:
    """Train."""
    args = flags(__doc__).parse_args()
    world = join()
    mesh = init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("dp",))
    model = build(args, world)
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = optimizer_of(model, args)

    def step(number: int) -> float | None:
        tokens, targets = batch(args, world, number, world.rank, args.micro_batch)
        optimizer.zero_grad()
        loss = loss_of(model(tokens), targets)
        loss.backward()
        optimizer.step()
        return loss.item() if world.rank == 0 else None

    train(args, world, step)


if __name__ == "__main__":
    main()
