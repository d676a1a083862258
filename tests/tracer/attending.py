"""Attention in the ways in which scripts ask for it: ``attending.py fused``, ``scores`` or ``context``."""

import functools
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

BATCH, HEADS, TOKENS, WIDTH = 2, 4, 64, 32


class Attention(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Queries, keys and values out of one projection; values may be narrower."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.width = width
        self.project = nn.Linear(WIDTH, HEADS * (2 * WIDTH + width))
        self.bias = nn.Parameter(torch.zeros(HEADS, TOKENS, TOKENS))

    def heads(self, x: Tensor) -> list[Tensor]:
        """Return queries, keys and values, each of shape (batch, heads, tokens, width)."""
        parts = self.project(x).view(BATCH, -1, HEADS, 2 * WIDTH + self.width).transpose(1, 2)
        return list(parts.split([WIDTH, WIDTH, self.width], dim=-1))

    def around(self, x: Tensor) -> AbstractContextManager[None]:
        """Return in what forward and backward of *x* are run."""
        del x
        return nullcontext()

    def forward(self, x: Tensor) -> Tensor:
        """Attend to what came before."""
        query, key, value = self.heads(x)
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True).mean()


class Trained(Attention):
    """With a bias that is trained, as relative positions are."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(x)
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=self.bias[None]).mean()


class Grouped(Attention):
    """Two heads of queries for each of keys and values."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(x)
        key, value = key[:, ::2], value[:, ::2]
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return found.mean()


class Chosen(Attention):
    """By a kernel that the script asks for."""

    def __init__(self, *kernels: SDPBackend) -> None:
        super().__init__()
        self.kernels = list(kernels)

    def forward(self, x: Tensor) -> Tensor:
        with sdpa_kernel(self.kernels):
            return super().forward(x)


class Cut(Attention):
    """Heads are cut over two ranks, by DTensor."""

    def forward(self, x: Tensor) -> Tensor:
        mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
        halves = (one.chunk(2, dim=1)[0] for one in self.heads(x))
        query, key, value = (DTensor.from_local(half, mesh, [Shard(1)]) for half in halves)
        found: Any = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return found.to_local().mean()


class Context(Attention):
    """Tokens are cut over four ranks."""

    def around(self, x: Tensor) -> AbstractContextManager[None]:
        mesh = init_device_mesh("cuda", (4,), mesh_dim_names=("cp",))
        found: AbstractContextManager[None] = context_parallel(mesh, buffers=[x], buffer_seq_dims=[1])
        return found


MODES = {
    "fused": (
        *(Attention, functools.partial(Attention, WIDTH // 2), Trained, Cut),
        functools.partial(Chosen, SDPBackend.EFFICIENT_ATTENTION),
        functools.partial(Chosen, SDPBackend.CUDNN_ATTENTION),
    ),
    "scores": (functools.partial(Chosen, SDPBackend.MATH),),
    "context": (Context,),
    "grouped": (Grouped,),
    "grouped_fp32": (Grouped,),
    "none": (functools.partial(Chosen, SDPBackend.FLASH_ATTENTION),),
}

torch.distributed.init_process_group("nccl")
model = nn.ModuleList([make() for make in MODES[sys.argv[1]]]).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    for one in model:
        x = torch.randn(BATCH, TOKENS, WIDTH, device="cuda")
        with (
            one.around(x),
            torch.autocast("cuda", torch.bfloat16, enabled=sys.argv[1] not in {"none", "grouped_fp32"}),
        ):
            one(x).backward()
    optimizer.step()
