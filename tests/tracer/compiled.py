"""Trains a small model: ``compiled.py MODEL HOW``; HOW as at the end: eager, module, in_place, and so on.

``built`` makes model and input, so that a test can have the compiler itself look at the same model.
"""

import sys

import torch
from torch import nn
from torch.nn import functional

WIDTH, TOKENS, VOCABULARY = 256, 128, 4096


class Attention(nn.Module):  # type: ignore[misc]
    """Pre-norm block: causal attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return hidden states of the shape of *x*, ``(batch, tokens, WIDTH)``."""
        parts = self.qkv(self.norms[0](x)).split(WIDTH, 2)
        q, k, v = (part.view(*x.shape[:2], 4, WIDTH // 4).transpose(1, 2) for part in parts)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Language(nn.Module):  # type: ignore[misc]
    """Two blocks and the loss over a vocabulary."""

    def __init__(self, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, WIDTH), nn.Linear(WIDTH, vocabulary, bias=False)
        self.blocks, self.norm = nn.Sequential(Attention(), Attention()), nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of the next token."""
        logits = self.head(self.norm(self.blocks(self.embedding(tokens[:, :-1]))))
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class Written(nn.Module):  # type: ignore[misc]
    """A norm and an activation written out, line by line, around two products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean square of what comes out."""
        norm = self.scale * (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt()
        y = self.up(norm)
        y = 0.5 * y * (1 + torch.tanh(0.8 * (y + 0.04 * y * y * y)))
        return (x + self.down(y)).square().mean()


class Gated(nn.Module):  # type: ignore[misc]
    """Block of RMSNorms, rotary positions and a gated MLP; its products give several tensors in one."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 6 * WIDTH, bias=False), nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.register_buffer("angles", torch.rand(TOKENS, WIDTH // 8))

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        cos, sin = self.angles.cos(), self.angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return hidden states of the shape of *x*, ``(batch, tokens, WIDTH)``."""
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in parts)
        seen = functional.scaled_dot_product_attention(self._turned(q), self._turned(k), v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


class Stack(nn.ModuleList):  # type: ignore[misc]
    """Modules one after the other; that of torch would be compiled module by module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what comes out."""
        for module in self:
            x = module(x)
        return x


class Chain(nn.Module):  # type: ignore[misc]
    """A product, so many element-wise operators, and another product."""

    def __init__(self, n_operators: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.n_operators = n_operators

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what comes out."""
        x = self.first(x)
        for _ in range(self.n_operators):
            x = torch.sigmoid(x)
        return self.last(x)


class Parts(nn.Module):  # type: ignore[misc]
    """A product whose halves are multiplied with each other, and another product."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what comes out."""
        first, second = self.first(x).chunk(2, -1)
        return self.last(first * second)


class Kept(nn.Module):  # type: ignore[misc]
    """Two products; what is between them is copied into a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("seen", torch.zeros(8 * TOKENS, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what comes out."""
        x = self.first(x)
        with torch.no_grad():
            self.seen.copy_(x)
        return self.last(x)


def built(name: str) -> tuple[nn.Module, torch.Tensor]:
    """Return the model *name* and its input."""
    if name in {"language", "odd"}:
        model = Language(VOCABULARY + 3 * (name == "odd"))
        return model, torch.zeros(8, TOKENS + 1, dtype=torch.int64)
    if name == "gated":
        return Stack([Gated(), Gated()]), torch.randn(8, TOKENS, WIDTH)
    plain = {"written": Written, "parts": Parts, "kept": Kept}
    other: nn.Module = plain[name]() if name in plain else Chain(int(name.removeprefix("chain")))
    return other, torch.randn(8 * TOKENS, WIDTH)


if __name__ == "__main__":
    model, data = built(sys.argv[1])
    model, data, called = model.cuda(), data.cuda(), None
    match sys.argv[2]:
        case "module":
            called = torch.compile(model)
        case "in_place":
            model.compile()
        case "blocks":
            for block in model:
                block.compile()
        case "function":
            called = torch.compile(model.forward)
        case "aot_eager":
            called = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        out = (model if called is None else called)(data)
        (out if out.dim() == 0 else out.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
