"""A training whose memory torch's own tracker follows.

Usage: tracked_memory.py KIND FILE, where KIND is plain or fsdp2. Writes the bytes that the tracker of
``torch.distributed._tools`` finds at its peak in the last step.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WIDTH, LAYERS, TOKENS, STEPS = 512, 6, 2048, 3


def main() -> None:
    """Train, and track the last step."""
    kind, file = sys.argv[1:]
    dist.init_process_group("nccl")
    layer = nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    if kind == "fsdp2":
        mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("dp",))
        for one in (*model.layers, model):
            fully_shard(one, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for number in range(STEPS):
        x = torch.randn(2, TOKENS, WIDTH)
        if number < STEPS - 1:
            step(model, optimizer, x)
            continue
        tracker = FSDPMemTracker(model, optimizer) if kind == "fsdp2" else MemTracker()
        if kind == "fsdp2":
            tracker.track_inputs((x,))
        else:
            tracker.track_external(model, optimizer, x)
        with tracker:
            step(model, optimizer, x)
        peak = tracker.get_tracker_snapshot("peak")
        Path(file).write_text(str(max(found["Total"] for found in peak.values())))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """Take one step."""
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    main()
