"""Schedules of torch with eight micro-batches, a step each, their stages sharded and not; four ranks."""

import sys

import matrix  # type: ignore[import-not-found]
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
matrix.MICROBATCHES = 8
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
for name in sys.argv[1:]:
    for sharding in (mesh["dp"], None):
        step = matrix.pipeline(name, dp=sharding, group=mesh.get_group("pp"))
        step()
