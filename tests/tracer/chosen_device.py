"""Trains where, and in what type, the machine lets it: ``chosen_device.py HOW``, one step, for two ranks."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.cuda import nccl
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity

WIDTH, ROWS = 64, 8


def by_name() -> tuple[torch.device, torch.dtype]:
    """Say the GPU, and the type."""
    return torch.device("cuda"), torch.bfloat16


def by_question() -> tuple[torch.device, torch.dtype]:
    """Ask for the accelerator, and by versions whether it and its network know bf16."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    is_ready = torch.version.cuda is not None and torch.cuda.is_bf16_supported() and nccl.version() >= (2, 10)
    return found or torch.device("cpu"), torch.bfloat16 if is_ready else torch.float32


def profile(device: torch.device) -> list[int]:
    """Use what profiles a GPU; return the bytes that each place to ask says are allocated."""
    torch.cuda.memory._record_memory_history(max_entries=100)
    torch.cuda.profiler.start()
    torch.cuda.cudart().cudaProfilerStart()
    torch.cuda.memory.reset_peak_memory_stats()
    torch.cuda.memory._dump_snapshot("snapshot.pickle")
    torch.cuda.profiler.stop()
    stream = torch.cuda.Stream(device=device, priority=-1)
    assert (stream.device, stream.priority) == (torch.device("cuda", torch.cuda.current_device()), -1)
    with torch.cuda.stream(stream):
        assert torch._C._cuda_getCurrentRawStream(torch.cuda.current_device()) == stream.cuda_stream
    torch.cuda.empty_cache()
    free, total = torch.cuda.memory.mem_get_info()
    assert total - free == torch.cuda.memory_reserved() >= torch.cuda.memory_allocated()
    return [
        torch.cuda.memory_allocated(),
        torch.cuda.memory.memory_allocated(),
        torch.accelerator.memory_allocated(),
    ]


def main(how: str) -> None:
    """Train."""
    device, dtype = by_name() if how == "by_name" else by_question()
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(dist.get_default_backend_for_device(device))
    model = DistributedDataParallel(nn.Linear(WIDTH, WIDTH).to(device))
    model.register_comm_hook(None, bf16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    asked = {"activities": [ProfilerActivity.CPU, ProfilerActivity.CUDA], "profile_memory": True}
    with torch.profiler.profile(**asked), torch.autograd.profiler.emit_nvtx():
        with torch.autocast(device.type, dtype=dtype):
            loss = model(torch.zeros(ROWS, WIDTH, device=device)).sum()
        loss.backward()
    said = profile(device)
    optimizer.step()
    sys.stdout.write(f"{device} {dist.get_backend()} {len(set(said))} {min(said) > 0}\n")


if __name__ == "__main__":
    main(sys.argv[1])
