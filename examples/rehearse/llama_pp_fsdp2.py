"""A Llama of any size as an interleaved pipeline whose stages are sharded by FSDP2, written for GPUs.

foretrace rehearse --world-size 512 --ranks 0 -o runs/pipeline -- examples/rehearse/llama_pp_fsdp2.py --pp 8
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from llama_fsdp2_tp import Block, flags
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn import functional


class Stage(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Some layers of the model, with the embedding before the first and the head behind the last."""

    def __init__(self, args: argparse.Namespace, number: int, n_stages: int) -> None:
        super().__init__()
        settings = vars(args)
        hidden, vocab = settings["hidden"], settings["vocab"]
        share = settings["layers"] // n_stages
        self.embedding = nn.Embedding(vocab, hidden) if number == 0 else None
        numbers = range(number * share, (number + 1) * share)
        self.layers = nn.ModuleDict({str(i): Block(args) for i in numbers})
        is_last = number == n_stages - 1
        self.norm = nn.RMSNorm(hidden) if is_last else None
        self.output = nn.Linear(hidden, vocab, bias=False) if is_last else None
        width = hidden // settings["heads"]
        steps = 5e5 ** -(torch.arange(0, width, 2) / width)
        angles = torch.outer(torch.arange(settings["seq_len"]), steps)
        self.register_buffer("angles", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return hidden states, or logits on the last stage."""
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x, self.angles)
        return self.output(self.norm(x)) if self.output is not None and self.norm is not None else x


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def main() -> None:
    """Train on random tokens."""
    args = flags(pp=8, microbatches=64, stages_per_rank=2)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    device = torch.device("cuda", torch.cuda.current_device())
    mesh = init_device_mesh("cuda", (args.pp, dist.get_world_size() // args.pp), mesh_dim_names=("pp", "dp"))
    rank, n_stages = mesh.get_local_rank("pp"), args.pp * args.stages_per_rank
    numbers = range(rank, n_stages, args.pp)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    parts = []
    for number in numbers:
        with torch.device("cuda"):
            part = Stage(args, number, n_stages)
        for layer in part.layers.values():
            fully_shard(layer, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=False)
        parts.append(fully_shard(part, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=False))
    group = mesh.get_group("pp")
    stages = [PipelineStage(p, n, n_stages, device, group=group) for p, n in zip(parts, numbers, strict=True)]
    name = "Interleaved1F1B" if args.stages_per_rank > 1 else "1F1B"
    schedule = get_schedule_class(name)(
        stages if len(stages) > 1 else stages[0], args.microbatches, loss_fn=loss_of
    )
    optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=3e-4, fused=True)
    for _ in range(args.steps):
        n_rows = args.micro_batch * args.microbatches
        tokens = torch.randint(0, args.vocab, (n_rows, args.seq_len + 1), device="cuda")
        inputs = [tokens[:, :-1]] if 0 in numbers else []
        last = {"target": tokens[:, 1:], "losses": []} if n_stages - 1 in numbers else {}
        optimizer.zero_grad()
        schedule.step(*inputs, **last)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
