"""What DTensor costs the host: a step of the example model whole, and cut over two ranks that do not exist.

    PYTHONPATH=examples python benchmarks/dtensor_host.py [--micro-batch 1 --seq-len 16]

torch's fake process group answers every collective at once, so that only the work of this process is
measured: processor time, the least of some repetitions. With few tokens nearly all of it is the host's work
per operation.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
import torch.distributed as dist
from fsdp_host import least_s
from model import Config, Llama, loss_of
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from train_tp import parallelize
from training import TINY

N_RANKS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=16)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=N_RANKS, store=FakeStore())
    config = Config.read(TINY)
    tokens = torch.randint(0, config.vocab_size, (args.micro_batch, args.seq_len))
    whole, cut = Llama(config), Llama(config)
    parallelize(cut, init_device_mesh("cpu", (N_RANKS,)))
    print(f"{args.micro_batch} x {args.seq_len} tokens{'forward':>12}{'backward':>12}{'optimizer':>12}")
    for name, model in (("whole", whole), ("cut over 2", cut)):
        took = least_s(model, partial(_loss, model, tokens))
        figures = "".join(f"{seconds * 1e3:9.1f} ms" for seconds in took)
        print(f"{name:12}{figures}")


def _loss(model: Llama, tokens: torch.Tensor) -> torch.Tensor:
    return loss_of(model(tokens), tokens)


if __name__ == "__main__":
    main()
