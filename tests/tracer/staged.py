"""Two stages of an engine that read shapes out of a message: ``staged.py FOLDER ROWS``."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

ENGINE = """
from types import SimpleNamespace

import torch
import torch.distributed as dist

TENSOR_META_SIZE = 256
p2p = SimpleNamespace(send=dist.send, recv=dist.recv)


class PipelineEngine:
    def __init__(self, stage, device):
        self.stage_id, self.device = stage, device
        stages, replicas = dist.new_group([0, 1]), [dist.new_group([rank]) for rank in (0, 1)]
        self.grid = SimpleNamespace(
            get_pipe_parallel_group=lambda: stages, get_data_parallel_group=lambda: replicas[stage]
        )
        self.total_loss = torch.zeros((), device=device)

    def reduced_loss(self):
        dist.broadcast(self.total_loss, src=1, group=self.grid.get_pipe_parallel_group())

    def _allocate_or_extend_buffers(self, number, shape, dtype):
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _send_tensor_meta(self, buffer, stage):
        meta = torch.empty(TENSOR_META_SIZE, dtype=torch.int32, device=self.device)
        numbers = [0, 0, buffer.dim(), *buffer.shape]
        meta[: len(numbers)].copy_(torch.tensor(numbers, dtype=torch.int32))
        p2p.send(meta, stage)

    def _recv_tensor_meta(self, stage):
        meta = torch.empty(TENSOR_META_SIZE, dtype=torch.int32, device=self.device)
        p2p.recv(meta, stage)
        n_dims = meta[2].item()
        return self._allocate_or_extend_buffers(0, meta[3 : 3 + n_dims].tolist(), torch.float32)
"""
"""What DeepSpeed's engine of pipelines does about shapes, as short as it goes."""


def engine(folder: Path) -> Any:
    """Return the module of the engine, which lies in *folder*."""
    path = folder / "deepspeed" / "runtime" / "pipe"
    path.mkdir(parents=True, exist_ok=True)
    for package in (path, path.parent, path.parent.parent):
        (package / "__init__.py").write_text("")
    (path / "engine.py").write_text(ENGINE)
    sys.path.insert(0, str(folder))
    return importlib.import_module("deepspeed.runtime.pipe.engine")


def main(folder: Path, n_rows: int) -> None:
    """Take three steps, in which the first rank sends rows and gets their gradients."""
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    module = engine(folder / str(rank))
    pipeline = module.PipelineEngine(rank, "cuda")
    model = nn.Linear(32, 32, device="cuda")
    optimizer = torch.optim.SGD(model.parameters())
    state = SimpleNamespace(buffer=None)
    for _ in range(3):
        rows = torch.randn(n_rows, 32, device="cuda")
        if rank:
            state.buffer = pipeline._recv_tensor_meta(0) if state.buffer is None else state.buffer
            module.p2p.recv(state.buffer, 0)
            rows = state.buffer.clone().requires_grad_()
        out = model(rows)
        if rank:
            out.square().mean().backward()
            module.p2p.send(rows.grad, 0)
        else:
            if state.buffer is None:
                pipeline._send_tensor_meta(out, 1)
                state.buffer = torch.empty_like(out)
            module.p2p.send(out.detach(), 1)
            module.p2p.recv(state.buffer, 1)
            out.backward(state.buffer)
        pipeline.reduced_loss()
        optimizer.step()
        optimizer.zero_grad()


main(Path(sys.argv[1]), int(sys.argv[2]))
