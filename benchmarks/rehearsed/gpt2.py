"""Steps of GPT-2 (124M) as public walk-throughs speed it up: ``gpt2.py NAME=VALUE ...``, see ``DEFAULTS``.

Model, loss and optimizer of karpathy/build-nanogpt (train_gpt2.py, whose rungs are chapters of a lecture),
of karpathy/nanoGPT (train.py) and of rasbt/LLMs-from-scratch (ch05/10_llm-training-speed). Tokens are random.
"""

import os
import sys
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

DEFAULTS = {
    "precision": "fp32",  # tf32; autocast: bf16 where autocast has it; bf16: weights, too
    "attention": "written",  # fused
    "parts": "torch",  # written: layer norms and GELU line by line
    "compiled": "no",
    "mask": "anew",  # in_place
    "vocabulary": "50257",
    "batch": "16",
    "micro_batches": "1",
    "dropout": "0",
    "bias": "yes",
    "tied": "yes",
    "clips": "no",
    "optimizer": "foreach",  # fused
}
WIDTH, HEADS, LAYERS, TOKENS, STEPS = 768, 12, 12, 1024, 3

asked = DEFAULTS | dict(word.split("=") for word in sys.argv[1:])
BIAS, DROPOUT = asked["bias"] == "yes", float(asked["dropout"])


class WrittenNorm(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A layer norm, line by line."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return *x* with mean 0 and variance 1 along its last dimension, scaled and shifted."""
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return self.scale * ((x - mean) / torch.sqrt(variance + 1e-5)) + self.shift


class WrittenGelu(nn.Module):  # type: ignore[misc]
    """The tanh approximation of GELU, line by line."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the activation of *x*."""
        root = torch.sqrt(torch.tensor(2.0 / torch.pi))
        return 0.5 * x * (1 + torch.tanh(root * (x + 0.044715 * torch.pow(x, 3))))


def norm() -> nn.Module:
    """Return a layer norm as asked for."""
    return WrittenNorm(WIDTH) if asked["parts"] == "written" else nn.LayerNorm(WIDTH, bias=BIAS)


class Attention(nn.Module):  # type: ignore[misc]
    """Causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=BIAS), nn.Linear(WIDTH, WIDTH, bias=BIAS)
        self.dropout = nn.Dropout(DROPOUT)
        if asked["attention"] == "written":
            self.register_buffer("hidden", torch.ones(TOKENS, TOKENS).triu(1).bool(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return hidden states of the shape of *x*, ``(batch, TOKENS, WIDTH)``."""
        parts = self.qkv(x).split(WIDTH, 2)
        q, k, v = (part.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for part in parts)
        if asked["attention"] == "fused":
            seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=DROPOUT)
        else:
            scores = (q @ k.transpose(2, 3)) * q.shape[-1] ** -0.5
            fill = scores.masked_fill_ if asked["mask"] == "in_place" else scores.masked_fill
            scores = fill(self.hidden, -torch.inf)
            seen = self.dropout(functional.softmax(scores, -1)) @ v
        return self.out(seen.transpose(1, 2).contiguous().view_as(x))


class Block(nn.Module):  # type: ignore[misc]
    """Attention and MLP, with norms before."""

    def __init__(self) -> None:
        super().__init__()
        self.norms, self.attention = nn.ModuleList([norm(), norm()]), Attention()
        gelu = WrittenGelu() if asked["parts"] == "written" else nn.GELU(approximate="tanh")
        up, down = nn.Linear(WIDTH, 4 * WIDTH, bias=BIAS), nn.Linear(4 * WIDTH, WIDTH, bias=BIAS)
        self.mlp, self.dropout = nn.Sequential(up, gelu, down), nn.Dropout(DROPOUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return hidden states of the shape of *x*."""
        x = x + self.dropout(self.attention(self.norms[0](x)))
        return x + self.dropout(self.mlp(self.norms[1](x)))


class Gpt2(nn.Module):  # type: ignore[misc]
    """The model with its loss."""

    def __init__(self) -> None:
        super().__init__()
        vocabulary = int(asked["vocabulary"])
        self.tokens, self.places = nn.Embedding(vocabulary, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.dropout, self.blocks = nn.Dropout(DROPOUT), nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = norm(), nn.Linear(WIDTH, vocabulary, bias=False)
        if asked["tied"] == "yes":
            self.tokens.weight = self.head.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        x = self.tokens(tokens) + self.places(torch.arange(TOKENS, device=tokens.device))
        logits = self.head(self.norm(self.blocks(self.dropout(x))))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    """Train for a few steps."""
    world_size, local_rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(local_rank)
    torch.set_float32_matmul_precision("highest" if asked["precision"] == "fp32" else "high")
    model = Gpt2().cuda().to(torch.bfloat16 if asked["precision"] == "bf16" else torch.float32)
    trained = torch.compile(model) if asked["compiled"] == "yes" else model
    if world_size > 1:
        torch.distributed.init_process_group("nccl")
        trained = DistributedDataParallel(trained, device_ids=[local_rank])
    fused = asked["optimizer"] == "fused"
    optimizer = torch.optim.AdamW(trained.parameters(), lr=3e-4, weight_decay=0.1, fused=fused)
    is_cast = asked["precision"] == "autocast"
    micro_batches = int(asked["micro_batches"])
    for _ in range(STEPS):
        for number in range(micro_batches):
            tokens = torch.randint(0, 50257, (int(asked["batch"]), TOKENS + 1)).cuda()
            if world_size > 1:
                trained.require_backward_grad_sync = number == micro_batches - 1
            with torch.autocast("cuda", torch.bfloat16) if is_cast else nullcontext():
                loss = trained(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) / micro_batches
            loss.backward()
        if asked["clips"] == "yes":
            torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
