"""What the example trainings share: flags, the process group, data, and the loop."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from model import Config, Llama, loss_of
from torch import Tensor, nn

TINY = Path(__file__).with_name("tiny-llama.json")


def flags(description: str | None) -> argparse.ArgumentParser:
    """Return the flags that every example takes."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--config", type=Path, default=TINY, help="Hugging Face config.json of the model")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps")
    parser.add_argument("--micro-batch", type=int, default=4, help="sequences per forward and rank")
    parser.add_argument("--seq-len", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data")
    return parser


@dataclass(frozen=True, slots=True)
class World:
    """This process among the others.

    Attributes:
        rank: global rank.
        size: number of ranks.
        device: what it computes on.
    """

    rank: int
    size: int
    device: torch.device


def join() -> World:
    """Join the process group that torchrun describes: NCCL if every local process has a GPU, else gloo."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    n_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= n_local
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    return World(dist.get_rank(), dist.get_world_size(), device)


def batch(
    args: argparse.Namespace, world: World, step: int, replica: int, n_sequences: int
) -> tuple[Tensor, Tensor]:
    """Return tokens and their successors, (n_sequences, seq_len) each, that *replica* sees in *step*.

    Each sequence starts anywhere and goes on by one rule, which a model can learn.
    """
    vocab = Config.read(args.config).vocab_size
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step * 1_009 + replica)
    start = torch.randint(0, vocab, (n_sequences, 1), generator=generator)
    tokens = ((start + 7 * torch.arange(args.seq_len + 1)) % vocab).to(world.device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def build(args: argparse.Namespace, world: World) -> Llama:
    """Return the whole model, with the same weights on every rank."""
    torch.manual_seed(args.seed)
    model = Llama(Config.read(args.config))
    model.to(world.device)
    return model


def optimizer_of(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    """Return AdamW over the parameters of *model*."""
    return torch.optim.AdamW(model.parameters(), lr=args.lr)


def train_model(args: argparse.Namespace, world: World, model: nn.Module, *, replica: int) -> None:
    """Train *model* on the batches of *replica*: forward, backward, update; rank 0 prints the loss."""
    optimizer = optimizer_of(model, args)

    def step(number: int) -> float | None:
        tokens, targets = batch(args, world, number, replica, args.micro_batch)
        optimizer.zero_grad()
        loss = loss_of(model(tokens), targets)
        loss.backward()
        optimizer.step()
        return loss.item() if world.rank == 0 else None

    train(args, world, step)


def train(args: argparse.Namespace, world: World, step: Callable[[int], float | None]) -> None:
    """Run *step* for every step; a rank to which it returns a loss prints it. Then leave the group."""
    for number in range(args.steps):
        began = time.perf_counter()
        loss = step(number)
        if loss is not None:
            elapsed_ms = (time.perf_counter() - began) * 1e3
            # nine digits tell every float32 from its neighbours: equal lines are equal losses
            print(f"step {number:3d}  loss {loss:#.9g}  {elapsed_ms:7.1f} ms", flush=True)
    dist.destroy_process_group()
