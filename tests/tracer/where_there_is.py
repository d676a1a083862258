"""Trains on a GPU where there is one, for two ranks: ``where_there_is.py asked|named DEVICE``, two steps."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH, ROWS = 64, 8


def main(how: str, name: str) -> None:
    """Train on what is there, or on the device of that *name*."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    found = {torch.cuda.is_available(), torch.cuda.device_count() > 0, accelerator is not None}
    found |= {torch.version.cuda is not None, dist.is_nccl_available(), torch.cuda.is_bf16_supported()}
    found |= {torch._C._get_accelerator().type == "cuda", torch.get_device_module() is torch.cuda}
    found |= {torch.backends.cuda.is_built(), torch.backends.cudnn.is_available()}
    found |= {(torch.backends.cudnn.version() or 0) > 90_000}
    (is_there,) = found
    device = torch.device("cuda" if is_there else "cpu") if how == "asked" else torch.device(name)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    model = DistributedDataParallel(nn.Linear(WIDTH, WIDTH).to(device))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(torch.randn(ROWS, WIDTH, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(*sys.argv[1:])
