"""Trainings that keep on the host what they can: ``kept_on_host.py HOW [offload] [mixed]``."""

import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

WIDTH, ROWS, LAYERS = 64, 8, 3
HOW, OFFLOADS = sys.argv[1], "offload" in sys.argv


class Layer(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A product and a nonlinearity."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return what becomes of *x*."""
        return self.linear(x).sigmoid()


dist.init_process_group("cpu:gloo,cuda:nccl")
model: nn.Module = nn.Sequential(*(Layer() for _ in range(LAYERS)))
if HOW == "fsdp2":
    policy = CPUOffloadPolicy() if OFFLOADS else OffloadPolicy()
    for layer in (*model, model):
        fully_shard(layer, offload_policy=policy)
elif HOW == "fsdp1":
    model = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Layer}),
        cpu_offload=CPUOffload(offload_params=OFFLOADS),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16) if "mixed" in sys.argv else None,
        device_id=torch.cuda.current_device(),
    )
else:
    model.cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
for _ in range(3):
    saving = torch.autograd.graph.save_on_cpu(pin_memory=True) if HOW == "save_on_cpu" else nullcontext()
    with saving:
        loss = model(torch.randn(ROWS, WIDTH, device="cuda")).square().mean()
    loss.backward()
    if HOW == "by_hand":  # to the host and back, once waiting and once not, in half of the bytes
        kept = model[0].linear.weight.detach().cpu()
        twice = kept * 2
        twice.pin_memory().to("cuda", torch.bfloat16, non_blocking=True).add_(1)
    optimizer.step()
    optimizer.zero_grad()
