"""Pre-training as large trainings are written, everything at once; on processors where there are no GPUs.

A mesh of pipeline x replicas x shards x tensor parallelism; a model that is built without memory; blocks that
are recomputed and compiled; several micro-batches per step; the norm of all gradients; checkpoints; metrics.

foretrace rehearse --world-size 512 -o runs/pretrain -- examples/rehearse/pretrain.py --tp 8 --dp-replicate 2
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from llama_fsdp2_tp import flags
from pretrain_model import Decoder, parallelized
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._random import manual_seed
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

AXES = ("pp", "dp_replicate", "dp_shard", "tp")


class Words(IterableDataset[Tensor]):  # type: ignore[misc]  # torch is untyped here
    """Rows of random words, others on every replica."""

    def __init__(self, replica: int, vocab: int, n_tokens: int) -> None:
        self._replica, self._vocab, self._n_tokens = replica, vocab, n_tokens

    def __iter__(self) -> Iterator[Tensor]:
        """Yield rows without an end."""
        generator = torch.Generator().manual_seed(self._replica)
        while True:
            yield torch.randint(0, self._vocab, (self._n_tokens + 1,), generator=generator)


class Optimizers(Stateful):  # type: ignore[misc]  # torch is untyped here
    """One optimizer and its schedule for every part of the model, as if they were one.

    Args:
        parts: parts of the model that this rank holds.
        n_warmup: steps until the learning rate is whole.
    """

    def __init__(self, parts: list[Decoder], n_warmup: int) -> None:
        self._parts = parts
        self._all = [torch.optim.AdamW(part.parameters(), lr=3e-4, fused=True) for part in parts]
        rate: Callable[[int], float] = lambda step: min(1.0, (step + 1) / n_warmup)  # noqa: E731
        self._rates = [torch.optim.lr_scheduler.LambdaLR(optimizer, rate) for optimizer in self._all]

    def step(self) -> None:
        """Step all, and their schedules."""
        for one in (*self._all, *self._rates):
            one.step()

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for optimizer in self._all:
            optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of them, by names of parameters."""
        found = [get_optimizer_state_dict(*pair) for pair in zip(self._parts, self._all, strict=True)]
        return {key: value for part in found for name in part.values() for key, value in _items(name)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take nothing: this example never goes on from a checkpoint."""


def _items(found: Any) -> list[tuple[str, Any]]:
    return list(found.items()) if isinstance(found, dict) else []


class Trainer:
    """What a rank does.

    Args:
        args: flags.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.kind = device_kind()
        shards = dist.get_world_size() // (args.pp * args.dp_replicate * args.tp)
        self.mesh = init_device_mesh(
            self.kind, (args.pp, args.dp_replicate, shards, args.tp), mesh_dim_names=AXES
        )
        self.data: DeviceMesh = self.mesh["dp_replicate", "dp_shard"]._flatten("dp")  # noqa: SLF001
        self._seed()
        self.numbers = range(self.mesh.get_local_rank("pp"), args.pp * args.stages_per_rank, args.pp)
        self.n_stages = args.pp * args.stages_per_rank if args.pp > 1 else 1
        self.parts = self._made()
        self.optimizers = Optimizers(self.parts, n_warmup=2)
        self.schedule = self._schedule() if args.pp > 1 else None
        rows = Words(self.data.get_local_rank(), args.vocab, args.seq_len)
        n_rows = args.micro_batch * (args.microbatches if args.pp > 1 else 1)
        self.batches = iter(DataLoader(rows, batch_size=n_rows, num_workers=args.workers))
        self.saving: Any = None

    def _seed(self) -> None:
        """Take the seed of rank 0, one further for every stage, and set it for every mesh."""
        found = torch.get_rng_state()[:8].to(self.kind)
        dist.broadcast(found, src=0)
        seed = int(found.cpu().view(torch.int64).item()) % 2**31 + self.mesh.get_local_rank("pp")
        torch.manual_seed(seed)
        os.environ["PYTHONHASHSEED"] = str(seed)
        if self.args.tp > 1:
            manual_seed(seed, self.mesh["tp"])

    def _made(self) -> list[Decoder]:
        """Return the parts of the model that this rank holds, with weights."""
        with torch.device("meta"):
            whole = Decoder(self.args)
        parts = []
        for number in self.numbers if self.args.pp > 1 else [0]:
            part = copy.deepcopy(whole)
            part.keep(number, self.n_stages)
            part = parallelized(part, self.mesh, self.args)
            part.to_empty(device=self.kind)
            with torch.no_grad():
                part.init_weights()
            part.train()
            parts.append(part)
        return parts

    def _schedule(self) -> Any:
        device, group = torch.device(self.kind, self._index()), self.mesh.get_group("pp")
        pairs = zip(self.parts, self.numbers, strict=True)
        stages = [PipelineStage(part, n, self.n_stages, device, group=group) for part, n in pairs]
        is_looped = len(stages) > 1
        kind = get_schedule_class("Interleaved1F1B" if is_looped else "1F1B")
        n = self.args.microbatches
        return kind(stages if is_looped else stages[0], n, loss_fn=self._loss, scale_grads=False)

    def _index(self) -> int:
        return torch.cuda.current_device() if self.kind == "cuda" else 0

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        total = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        return total / (self.args.seq_len * self.args.micro_batch * self.args.microbatches)

    def _forward_backward(self) -> Tensor:
        """Run all micro-batches of a step; return their loss, or -1 where another stage has it."""
        with self._parallel_loss():
            if self.schedule is None:
                losses = [self._one() for _ in range(self.args.microbatches)]
                return torch.stack(losses).sum()
            tokens = next(self.batches).to(self.kind)
            inputs = [tokens[:, :-1]] if 0 in self.numbers else []
            if self.n_stages - 1 not in self.numbers:
                self.schedule.step(*inputs)
                return torch.tensor([-1.0], device=self.kind)
            losses = []
            self.schedule.step(*inputs, target=tokens[:, 1:], losses=losses)
            return torch.stack([_whole(loss.detach()) for loss in losses]).sum()

    def _one(self) -> Tensor:
        tokens = next(self.batches).to(self.kind, non_blocking=True)
        loss = self._loss(self.parts[0](tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        return _whole(loss.detach())

    def _parallel_loss(self) -> AbstractContextManager[None]:
        return loss_parallel() if self.args.tp > 1 else nullcontext()

    def _clip(self) -> Tensor:
        """Clip all gradients by their norm over all ranks, which is returned."""
        parameters = [p for part in self.parts for p in part.parameters()]
        norm = _whole(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
        if self.args.pp > 1:
            norm **= 2
            dist.all_reduce(norm, group=self.mesh.get_group("pp"))
            norm **= 0.5
        nn.utils.clip_grads_with_norm_(parameters, 1.0, norm)
        return norm

    def _save(self, step: int) -> None:
        """Write a checkpoint; an asynchronous one waits for the one before it."""
        if self.saving is not None:
            self.saving.result()
        model = {name: value for part in self.parts for name, value in get_model_state_dict(part).items()}
        state = {"model": model, "optimizer": self.optimizers, "step": torch.tensor(step)}
        folder = f"{self.args.checkpoints}/step-{step}"
        if not self.args.async_save:
            dcp.save(state, checkpoint_id=folder)
            return
        self.saving = dcp.async_save(
            state, checkpoint_id=folder, process_group=dist.new_group(backend="gloo")
        )

    def _report(self, step: int, loss: Tensor, norm: Tensor, began_s: float) -> None:
        """Print the mean and largest loss of all replicas, the speed, and the memory."""
        n, group = self.data.size(), self.data
        mean = collectives.all_reduce(loss, reduceOp="sum", group=group).item() / n
        most = collectives.all_reduce(loss, reduceOp="max", group=group).item()
        tokens = self.args.micro_batch * self.args.microbatches * self.args.seq_len * n
        speed = tokens / max(time.perf_counter() - began_s, 1e-9)
        used = 0.0
        if self.kind == "cuda":
            stats = torch.cuda.memory_stats()
            used = stats["reserved_bytes.all.peak"] / torch.cuda.get_device_properties(0).total_memory
            torch.cuda.reset_peak_memory_stats()
        text = f"{step}: loss {mean:.3f}, at most {most:.3f}; norm {norm.item():.3f}"
        print(f"{text}; {speed:.0f} tokens/s, {100 * used:.0f} % of the memory")

    def step(self, number: int) -> None:
        """Do step *number*, from 1."""
        began_s = time.perf_counter()
        if number % 50 == 1:
            gc.collect(1)
        self.optimizers.zero_grad()
        loss = self._forward_backward()
        norm = self._clip()
        self.optimizers.step()
        self._report(number, loss, norm, began_s)
        if self.args.save_every and number % self.args.save_every == 0:
            self._save(number)
        if number == 1:
            self._hurry()

    def _hurry(self) -> None:
        """Wait less long for others once everything has been made."""
        dist.barrier()
        if self.kind == "cuda":
            torch.cuda.synchronize()
        for group in (None, *(self.mesh.get_group(axis) for axis in AXES)):
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=100), group)  # noqa: SLF001


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def device_kind() -> str:
    """Return what to train on."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def settings() -> argparse.Namespace:
    """Return the flags."""
    args = flags(
        pp=1, stages_per_rank=1, dp_replicate=1, tp=1, microbatches=2, recompute=1, compile=1,
        save_every=0, async_save=0, workers=2,
    )  # fmt: skip
    args.checkpoints = os.environ.get("CHECKPOINTS", "checkpoints")
    return args


def main() -> None:
    """Train on random words."""
    args = settings()
    if device_kind() == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "cpu:gloo,cuda:nccl" if device_kind() == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=5))
    gc.disable()  # ranks that collect at different times hold each other up
    trainer = Trainer(args)
    for number in range(1, args.steps + 1):
        trainer.step(number)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
