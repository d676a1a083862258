"""Trains a small model: ``saved.py MODEL HOW [bf16|autocast]``; HOW as at the end: eager, compiled...

It ends with an error that says what the second forward has left in memory. ``built`` makes model and input,
so that a test can have PyTorch's own partitioner look at the same model.
"""

import gc
import sys
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

if TYPE_CHECKING or __name__ != "__main__":
    from tests.tracer.saved_more import Vision, sharded
else:  # a script is in no package
    from saved_more import Vision, sharded

WIDTH, TOKENS, HEADS, VOCABULARY = 256, 128, 4, 4096


class Llama(nn.Module):  # type: ignore[misc]
    """RMSNorms, rotary positions, grouped queries, SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = nn.Linear(WIDTH, WIDTH // 2, bias=False), nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.register_buffer("cos", torch.rand(TOKENS, WIDTH // HEADS))
        self.register_buffer("sin", torch.rand(TOKENS, WIDTH // HEADS))

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return (x * self.cos + torch.cat((-second, first), -1) * self.sin).to(x.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return hidden states of the shape of *x*, ``(batch, tokens, WIDTH)``."""
        y = self.norms[0](x)
        q, k, v = (
            one(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for one in (self.q, self.k, self.v)
        )
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        seen = functional.scaled_dot_product_attention(self._turned(q), self._turned(k), v, is_causal=True)
        x = x + self.o(seen.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class GPT2(nn.Module):  # type: ignore[misc]
    """LayerNorms, dropout, and the GELU written out as the tanh of a polynomial."""

    def __init__(self, rate: float = 0.1) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.rate = rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return hidden states of the shape of *x*, ``(batch, tokens, WIDTH)``."""
        parts = self.qkv(self.norms[0](x)).split(WIDTH, 2)
        q, k, v = (part.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for part in parts)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        seen = self.out(seen.transpose(1, 2).contiguous().view(x.shape))
        x = x + functional.dropout(seen, self.rate)
        y = self.up(self.norms[1](x))
        y = 0.5 * y * (1 + torch.tanh(0.8 * (y + 0.04 * torch.pow(y, 3.0))))
        return x + functional.dropout(self.down(y), self.rate)


class Bottleneck(nn.Module):  # type: ignore[misc]
    """Three convolutions with batch norms, ReLUs and a sum."""

    def __init__(self) -> None:
        super().__init__()
        wide, narrow = 64, 16
        self.convolutions = nn.ModuleList(
            [
                nn.Conv2d(wide, narrow, 1, bias=False),
                nn.Conv2d(narrow, narrow, 3, padding=1, bias=False),
                nn.Conv2d(narrow, wide, 1, bias=False),
            ]
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (narrow, narrow, wide))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return channels of the shape of *x*."""
        y = x
        for at, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            y = norm(convolution(y))
            y = functional.relu(y + x if at == 2 else y)
        return y


class Gelu(nn.Module):  # type: ignore[misc]
    """An MLP with GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return hidden states of the shape of *x*."""
        return self.down(functional.gelu(self.up(x)))


class Loss(nn.Module):  # type: ignore[misc]
    """The loss of logits in their own dtype, computed in fp32, as torchtitan has it compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("target", torch.zeros(8 * TOKENS, dtype=torch.int64))

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the loss of *logits*, ``(batch, tokens, vocabulary)``."""
        return functional.cross_entropy(logits.flatten(0, 1).float(), self.target)


class Head(nn.Module):  # type: ignore[misc]
    """The projection to a vocabulary, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("target", torch.zeros(8 * TOKENS, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss of hidden states *x*."""
        logits = self.out(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), self.target)


class Norms(nn.Module):  # type: ignore[misc]
    """LayerNorms and RMSNorms in turn, with activations between them."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return numbers of the shape of *x*."""
        for norm in self.norms:
            x = torch.sigmoid(norm(x)) + x
        return x


class Chain(nn.Module):  # type: ignore[misc]
    """Element-wise operators, one after the other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return numbers of the shape of *x*."""
        for _ in range(8):
            x = torch.sin(x) * 2 + 1
        return x


class Scores(nn.Module):  # type: ignore[misc]
    """Attention over all scores, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return hidden states of the shape of *x*."""
        q, k, v = (one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        scores = (q @ k.transpose(-2, -1) / 8).softmax(-1)
        return self.out((scores @ v).transpose(1, 2).flatten(2))


class Recomputed(nn.Module):  # type: ignore[misc]
    """A block of which the compiled part recomputes the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inside, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return hidden states of the shape of *x*."""
        y = functional.gelu(self.first(x))
        y = checkpoint(lambda z: functional.gelu(self.inside(z)) * z, y, use_reentrant=False)
        return self.last(y)


def _chosen(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Return that products are kept, and everything else is computed again."""
    del context, args, kwargs
    products = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
    return CheckpointPolicy.MUST_SAVE if operator in products else CheckpointPolicy.PREFER_RECOMPUTE


class Chosen(nn.Module):  # type: ignore[misc]
    """Blocks that recompute everything but their products (selective checkpoints)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Llama() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return hidden states of the shape of *x*."""
        contexts = partial(create_selective_checkpoint_contexts, _chosen)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return x


class Blocks(nn.Module):  # type: ignore[misc]
    """Several blocks, compiled as one."""

    def __init__(self, kind: Any, n: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the last one returns."""
        for block in self.blocks:
            x = block(x)
        return x


KINDS: dict[str, Any] = {
    "llama": Llama,
    "gpt2": GPT2,
    "bottleneck": Bottleneck,
    "gelu": Gelu,
    "loss": Loss,
    "head": Head,
    "norms": Norms,
    "chain": Chain,
    "scores": Scores,
    "recomputed": Recomputed,
    "chosen": Chosen,
    "vision": Vision,
    "llamas": lambda: Blocks(Llama),
    "gpt2s": lambda: Blocks(GPT2),
    "gelus": lambda: Blocks(Gelu),
    "bottlenecks": lambda: Blocks(Bottleneck),
}


def built(name: str, how: str = "") -> tuple[nn.Module, torch.Tensor]:
    """Return the model *name* and its input, in bf16 if *how* says so."""
    shape: tuple[int, ...] = (8, TOKENS, WIDTH)
    if name.startswith("bottleneck"):
        shape = (8, 64, 32, 32)
    if name == "vision":
        shape = (8, 3, 64, 64)
    if name == "loss":
        shape = (8, TOKENS, VOCABULARY)
    model: nn.Module = KINDS[name]()
    data = torch.randn(shape)
    return (model.bfloat16(), data.bfloat16()) if how == "bf16" else (model, data)


def context(how: str) -> Any:
    """Return the context in which the model is called."""
    return torch.autocast("cuda", torch.bfloat16) if how == "autocast" else nullcontext()


if __name__ == "__main__":
    name, way, how = sys.argv[1:4]
    model, data = built(name, how)
    model.to("cuda")
    data = nn.Parameter(data.to("cuda"))
    ways: dict[str, Any] = {
        "eager": lambda: model,
        "compiled": lambda: torch.compile(model),
        "function": lambda: torch.compile(model.forward),
        "aot_eager": lambda: torch.compile(model, backend="aot_eager"),
        "sharded": lambda: sharded(model),
        "inference": lambda: torch.compile(model),
        "around": lambda: lambda x: checkpoint(torch.compile(model), x, use_reentrant=False),
    }
    called = ways[way]()
    torch.set_grad_enabled(way != "inference")
    optimizer = torch.optim.SGD([*model.parameters(), data], lr=0.0, foreach=False)
    for step in range(2):
        gc.collect()  # what compiling leaves in circles is no memory of a forward, whenever it is collected
        before = torch.cuda.memory_allocated()
        with context(how):
            out = called(data)
        gc.collect()
        left = (
            torch.cuda.memory_allocated() - before - (out.numel() * out.element_size() if out.dim() else 512)
        )
        torch.cuda.reset_peak_memory_stats()
        begun = torch.cuda.memory_allocated()
        if out.requires_grad:
            out.sum().backward()
        del out
        most = torch.cuda.max_memory_allocated() - begun
        if step:
            raise RuntimeError(f"left {left} most {most} after {torch.cuda.memory_allocated() - before}")
        optimizer.step()
        optimizer.zero_grad()
