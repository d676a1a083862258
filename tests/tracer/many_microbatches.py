"""Schedules of torch with eight micro-batches, a step each, their stages sharded and not; four ranks."""

import gc
import sys

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def train(schedules: list[str]) -> None:
    """Take a step of each of *schedules*, sharded and whole."""
    import matrix  # type: ignore[import-not-found]  # noqa: PLC0415 - beside this script, where it is run

    gc.disable()  # when the collector runs depends on what the rehearsal does, and torch's stages are cycles
    dist.init_process_group("gloo")
    matrix.MICROBATCHES = 8
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    for name in schedules:
        for sharding in (mesh["dp"], None):
            step = matrix.pipeline(name, dp=sharding, group=mesh.get_group("pp"))
            step()


if __name__ == "__main__":
    train(sys.argv[1:])
