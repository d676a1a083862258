"""The model of ``pretrain.py`` and how it is cut: built without memory, by parts, each part in its place."""

from __future__ import annotations

import argparse
from typing import cast

import torch
from llama_fsdp2_tp import Block
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


class Decoder(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A Llama, or a stage of one: what a stage does not hold is ``None``."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        settings = vars(args)
        self.width, self.n_tokens = settings["hidden"] // settings["heads"], settings["seq_len"]
        self.embedding: nn.Module | None = nn.Embedding(settings["vocab"], settings["hidden"])
        self.layers = nn.ModuleDict({str(i): Block(args) for i in range(settings["layers"])})
        self.norm: nn.Module | None = nn.RMSNorm(settings["hidden"])
        self.output: nn.Module | None = nn.Linear(settings["hidden"], settings["vocab"], bias=False)
        self.register_buffer("angles", self.turns(), persistent=False)

    def turns(self) -> Tensor:
        """Return the complex angles of the rotary positions (tokens, width / 2)."""
        steps = 5e5 ** -(torch.arange(0, self.width, 2) / self.width)
        angles = torch.outer(torch.arange(self.n_tokens), steps)
        return torch.polar(torch.ones_like(angles), angles)

    def keep(self, stage: int, n_stages: int) -> None:
        """Leave out what stage *stage* of *n_stages* does not hold."""
        share = len(self.layers) // n_stages
        for name in list(self.layers):
            if int(name) // share != stage:
                del self.layers[name]
        if stage > 0:
            self.embedding = None
        if stage < n_stages - 1:
            self.norm = self.output = None

    def init_weights(self) -> None:
        """Give every weight its first value, where it has got its memory."""
        where = self.get_buffer("angles").device
        with torch.device(where):
            self.angles = self.turns()
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.trunc_normal_(module.weight, std=0.02)
            elif isinstance(module, nn.RMSNorm):
                module.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (batch, tokens, vocabulary), or what the next stage wants."""
        x = self.embedding(x) if self.embedding is not None else x
        for layer in self.layers.values():
            x = layer(x, self.angles)
        x = self.norm(x) if self.norm is not None else x
        return self.output(x) if self.output is not None else x


def cut(model: Decoder, mesh: DeviceMesh) -> None:
    """Cut *model* over the tensor-parallel *mesh*; between blocks along the sequence, logits by words."""
    sequence, whole = Shard(1), Replicate()
    ends = {
        "embedding": RowwiseParallel(input_layouts=whole, output_layouts=sequence),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=sequence, output_layouts=Shard(-1), use_local_output=False),
    }
    held = {name: style for name, style in ends.items() if getattr(model, name) is not None}
    parallelize_module(model, mesh, held)
    layer = {
        "attention": PrepareModuleInput(input_layouts=(sequence, None), desired_input_layouts=(whole, None)),
        "mlp": PrepareModuleInput(input_layouts=(sequence,), desired_input_layouts=(whole,)),
        **dict.fromkeys(("attention_norm", "ffn_norm"), SequenceParallel()),
        **{f"attention.w{name}": ColwiseParallel() for name in "qkv"},
        **dict.fromkeys(("mlp.w1", "mlp.w3"), ColwiseParallel()),
        **dict.fromkeys(("attention.wo", "mlp.w2"), RowwiseParallel(output_layouts=sequence)),
    }
    for block in model.layers.values():
        parallelize_module(block, mesh, layer)


def parallelized(model: Decoder, mesh: DeviceMesh, args: argparse.Namespace) -> Decoder:
    """Return *model* cut over *mesh*, its blocks run again in the backward, compiled, and sharded."""
    settings = vars(args)
    if settings["tp"] > 1:
        cut(model, mesh["tp"])
    for name, block in list(model.layers.items()):
        model.layers[name] = checkpoint_wrapper(block) if settings["recompute"] else block
        if settings["compile"]:
            model.layers[name].compile(fullgraph=True)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    where = mesh["dp_replicate", "dp_shard"]
    frees = settings["pp"] == 1  # a pipeline would gather once more for every micro-batch
    for part in (model.embedding, *model.layers.values()):
        if part is not None:
            fully_shard(part, mesh=where, mp_policy=policy, reshard_after_forward=frees)
    if model.norm is not None and model.output is not None:
        fully_shard([model.norm, model.output], mesh=where, mp_policy=policy, reshard_after_forward=False)
    return cast("Decoder", fully_shard(model, mesh=where, mp_policy=policy, reshard_after_forward=frees))
