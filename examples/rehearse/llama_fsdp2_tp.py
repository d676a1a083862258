"""A Llama of any size under FSDP2 and tensor parallelism, in bf16, written for GPUs as anybody would.

foretrace rehearse --world-size 512 -o runs/llama -- examples/rehearse/llama_fsdp2_tp.py --tp 8

With --own-units 1 the embedding, and norm with head, are units of FSDP2 of their own, as in torchtitan.
With --offload 1 parameters, gradients and states of the optimizer are on the host.
"""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional


class Attention(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Causal attention with grouped key-value heads and rotary positions."""

    def __init__(self, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.width, self.repeats = hidden // heads, heads // kv_heads
        self.wq = nn.Linear(hidden, heads * self.width, bias=False)
        self.wk = nn.Linear(hidden, kv_heads * self.width, bias=False)
        self.wv = nn.Linear(hidden, kv_heads * self.width, bias=False)
        self.wo = nn.Linear(heads * self.width, hidden, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Return attention over *x* (batch, tokens, hidden)."""
        q, k, v = (w(x).unflatten(-1, (-1, self.width)) for w in (self.wq, self.wk, self.wv))
        q, k = turned(q, angles), turned(k, angles)
        k, v = (t.repeat_interleave(self.repeats, dim=2) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Return heads *x* (batch, tokens, heads, width) turned by complex *angles* (tokens, width / 2)."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * angles[None, :, None]).flatten(3).type_as(x)


class MLP(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Gated feed-forward network."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, ffn, bias=False)
        self.w3 = nn.Linear(hidden, ffn, bias=False)
        self.w2 = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the network's output in the shape of *x*."""
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """One transformer layer."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(args.hidden)
        self.attention = Attention(args.hidden, args.heads, args.kv_heads)
        self.ffn_norm = nn.RMSNorm(args.hidden)
        self.mlp = MLP(args.hidden, args.ffn)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Return the layer's output in the shape of *x*."""
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.mlp(self.ffn_norm(x))


class Llama(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """The model."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.embedding = nn.Embedding(args.vocab, args.hidden)
        self.layers = nn.ModuleList(Block(args) for _ in range(args.layers))
        self.norm = nn.RMSNorm(args.hidden)
        self.output = nn.Linear(args.hidden, args.vocab, bias=False)
        self.width, self.n_tokens = args.hidden // args.heads, args.seq_len
        self.register_buffer("angles", self.turns(), persistent=False)

    def turns(self) -> Tensor:
        """Return the complex angles of the rotary positions (tokens, width / 2)."""
        steps = 5e5 ** -(torch.arange(0, self.width, 2) / self.width)
        angles = torch.outer(torch.arange(self.n_tokens), steps)
        return torch.polar(torch.ones_like(angles), angles)

    def init_weights(self) -> None:
        """Give every weight its first value, now that it has memory."""
        with torch.device("cuda"):
            self.angles = self.turns()
        for weight in self.parameters():
            if weight.ndim > 1:
                nn.init.trunc_normal_(weight, std=0.02)
            else:
                nn.init.ones_(weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, tokens, vocabulary)."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.angles)
        return self.output(self.norm(x))


def cut(model: Llama, mesh: DeviceMesh) -> None:
    """Cut *model* over the tensor-parallel *mesh*; activations between blocks along the sequence."""
    sequence, whole = Shard(1), Replicate()
    ends = {
        "embedding": RowwiseParallel(input_layouts=whole, output_layouts=sequence),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=sequence, output_layouts=Shard(-1), use_local_output=False),
    }
    layer = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(sequence, None), desired_input_layouts=(whole, None)),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=sequence),
        "ffn_norm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(sequence,), desired_input_layouts=(whole,)),
        "mlp.w1": ColwiseParallel(),
        "mlp.w3": ColwiseParallel(),
        "mlp.w2": RowwiseParallel(output_layouts=sequence),
    }
    parallelize_module(model, mesh, ends)
    for block in model.layers:
        parallelize_module(block, mesh, layer)


def flags(**others: int) -> argparse.Namespace:
    """Return the flags, with *others* and their defaults; without any they say Llama 3 70B."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in {
        "layers": 80, "hidden": 8192, "ffn": 28672, "heads": 64, "kv-heads": 8, "vocab": 128256,
        "seq-len": 4096, "micro-batch": 1, "steps": 10, **others,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    return parser.parse_args()


def main() -> None:
    """Train on random tokens."""
    args = flags(tp=8, own_units=0, offload=0)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if args.offload else "nccl")
    dp = dist.get_world_size() // args.tp
    mesh = init_device_mesh("cuda", (dp, args.tp), mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        model = Llama(args)
    if args.tp > 1:
        cut(model, mesh["tp"])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    kept = CPUOffloadPolicy() if args.offload else OffloadPolicy()
    sharding = {"mesh": mesh["dp"], "mp_policy": policy, "offload_policy": kept}
    for block in model.layers:
        fully_shard(block, **sharding)
    if args.own_units:
        fully_shard(model.embedding, **sharding)
        fully_shard([model.norm, model.output], **sharding, reshard_after_forward=False)
    fully_shard(model, **sharding)
    model.to_empty(device="cpu" if args.offload else "cuda")
    model.init_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    for step in range(args.steps):
        tokens = torch.randint(0, args.vocab, (args.micro_batch, args.seq_len + 1), device="cuda")
        with loss_parallel() if args.tp > 1 else nullcontext():
            logits = model(tokens[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {float(loss):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
