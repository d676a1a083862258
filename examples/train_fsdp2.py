"""Fully sharded data parallelism: each layer is gathered for its forward and backward, and freed again.

torchrun --nproc-per-node 2 examples/train_fsdp2.py
"""

from __future__ import annotations

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from training import build, flags, join, train_model


def main() -> None:
    """Train."""
    args = flags(__doc__).parse_args()
    world = join()
    mesh = init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("dp",))
    model = build(args, world)
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train_model(args, world, model, replica=world.rank)


if __name__ == "__main__":
    main()
