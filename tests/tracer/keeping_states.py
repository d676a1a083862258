"""FSDP1 that collects its states: ``keeping_states.py HOW FOLDER``; see ``main`` for HOW.

Two steps. The largest parameter is more than half of all, so that a rank of two has no part of some others.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)

WIDTH = 64


def main(how: str, folder: Path) -> None:
    """Train. A step gathers states (``collected``)."""
    dist.init_process_group("nccl")
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    model = FullyShardedDataParallel(layers, device_id=torch.cuda.current_device(), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters())
    if how == "shared":
        shared = torch.tensor(1).share_memory_()
        nn.Linear(WIDTH, WIDTH).share_memory()
        sys.stdout.write(f"{shared.item()}\n")
    if how == "mapped":
        (folder / "weights").write_bytes(bytes(4 * WIDTH))
        storage = torch.UntypedStorage.from_file(str(folder / "weights"), False, 4 * WIDTH)
        read = nn.ParameterList([torch.asarray(storage, dtype=torch.uint8).view(torch.float32)])
        places = [str(next(read.to(device).parameters()).device) for device in ("cpu", "cuda")]
        sys.stdout.write(f"{places} {read[0].numel()}\n")
    for _ in range(2):
        model(torch.randn(2, WIDTH, device="cuda")).sum().backward()
        optimizer.step()
        if how == "collected":
            with FullyShardedDataParallel.state_dict_type(
                model,
                StateDictType.FULL_STATE_DICT,
                FullStateDictConfig(rank0_only=True),
                FullOptimStateDictConfig(rank0_only=True),
            ):
                found = FullyShardedDataParallel.optim_state_dict(model, optimizer)
            sys.stdout.write(f"{sorted(found.get('state', ()))}\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
