"""A Llama-shaped transformer of any size, built from a Hugging Face ``config.json``.

Module names are those of ``LlamaForCausalLM`` without its outer ``model.``. A pipeline stage is the same
class with some of the layers, so that its names and layer numbers are those of the whole model.

Shapes: B sequences, S tokens, D hidden, H heads, K key-value heads, E elements per head, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The shape of a model, in the words of its ``config.json``."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    tie_word_embeddings: bool = False

    @classmethod
    def read(cls, path: Path) -> Config:
        """Return the config in *path*; keys that the model here does not use are left out."""
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{key: value for key, value in values.items() if key in cls.__slots__})

    @property
    def head_size(self) -> int:
        """Elements per attention head."""
        return self.hidden_size // self.num_attention_heads


class Rotary(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Rotary position embedding, with its tables computed once.

    The tables are no buffers: every rank has them already, and DDP need not send them.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        half = torch.arange(0, config.head_size, 2, dtype=torch.float32) / config.head_size
        positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
        angles = torch.outer(positions, config.rope_theta**-half).repeat(1, 2)
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, x: Tensor) -> Tensor:
        """Rotate *x* of shape (B, H, S, E) by the position of each token."""
        if self.cos.device != x.device:
            self.cos, self.sin = self.cos.to(x.device), self.sin.to(x.device)
        first, second = x.chunk(2, dim=-1)
        n_tokens = x.shape[-2]
        turned = torch.cat((-second, first), dim=-1)
        return x * self.cos[:n_tokens] + turned * self.sin[:n_tokens]


class Attention(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Causal attention with grouped key-value heads."""

    def __init__(self, config: Config, rotary: Rotary) -> None:
        super().__init__()
        hidden, self.head_size = config.hidden_size, config.head_size
        self.repeats = config.num_attention_heads // config.num_key_value_heads
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * self.head_size, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * self.head_size, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * self.head_size, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_size, hidden, bias=False)
        self._rotary = [rotary]  # shared by all layers, so part of none

    def forward(self, x: Tensor) -> Tensor:
        """Return attention over *x* of shape (B, S, D), in its shape."""
        rotate = self._rotary[0]
        q, k, v = (self._heads(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        k, v = (rotate(k).repeat_interleave(self.repeats, dim=1), v.repeat_interleave(self.repeats, dim=1))
        mixed = functional.scaled_dot_product_attention(rotate(q), k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        """Return (B, S, H * E) as (B, H, S, E), with the heads that this rank has."""
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


class MLP(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Gated feed-forward network with SiLU."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the network's output for *x* of shape (B, S, D), in its shape."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """One transformer layer: attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, config: Config, rotary: Rotary) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config, rotary)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output for *x* of shape (B, S, D), in its shape."""
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """The model, or the part of it that one pipeline stage holds.

    Args:
        config: the shape of the whole model.
        layers: numbers of the layers to hold, None for all.
        first: whether this part begins with the embedding.
        last: whether it ends with norm and head.
    """

    def __init__(
        self, config: Config, layers: Sequence[int] | None = None, *, first: bool = True, last: bool = True
    ) -> None:
        super().__init__()
        numbers = range(config.num_hidden_layers) if layers is None else layers
        self.rotary = Rotary(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if first else None
        self.layers = nn.ModuleDict({str(i): Layer(config, self.rotary) for i in numbers})
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps) if last else None
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False) if last else None
        if config.tie_word_embeddings and self.embed_tokens is not None and self.lm_head is not None:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, S, V) for tokens (B, S); a stage takes or returns hidden states (B, S, D)."""
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        for layer in self.layers.values():
            x = layer(x)
        return self.lm_head(self.norm(x)) if self.lm_head is not None and self.norm is not None else x


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of *logits* (B, S, V) against *targets* (B, S)."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
