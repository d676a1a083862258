"""Whether recording costs more the longer it goes on, or keeps memory: a recorded process beside its twin.

    python benchmarks/record_drift.py --steps 100000

Both train the same tiny model and reduce a tensor in each step, in turns of some milliseconds, one at a time,
so that whatever else the machine does meets both alike. What is compared is the processor time of the thread
that trains: the recorded step less the plain one, for each tenth of the run.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

import foretrace

BLOCK = 100
"""Steps of a turn."""


def train(pipe: Connection, path: str) -> None:
    """Train a turn whenever asked, recorded into *path* unless it is empty; answer with what it took.

    The answer is the processor time of the thread in nanoseconds, and the resident memory in bytes.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model, x, reduced = torch.nn.Linear(2, 2), torch.ones(1, 2), torch.ones(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with foretrace.record(path) if path else contextlib.nullcontext():
        while pipe.recv():
            began_ns = time.thread_time_ns()
            for _ in range(BLOCK):
                model(x).sum().backward()
                dist.all_reduce(reduced)
                optimizer.step()
            pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
            pipe.send((time.thread_time_ns() - began_ns, pages * 4096))
    dist.destroy_process_group()


def main() -> None:
    """Let both take turns and print a line for each tenth."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000)
    n_turns = parser.parse_args().steps // BLOCK // 10
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ends = []
        for path in (str(Path(folder) / "run"), ""):
            near, far = context.Pipe()
            context.Process(target=train, args=(far, path)).start()
            ends.append(near)
        print("to step  recorded   plain  difference, µs of the thread a step (median)  memory, MB")
        for tenth in range(1, 11):
            turns = []
            for _ in range(n_turns):
                for end in ends:  # one after the other
                    end.send(1)
                    turns.append(end.recv())
            recorded, plain = turns[::2], turns[1::2]
            a, b = ([ns / BLOCK / 1e3 for ns, _ in own] for own in (recorded, plain))
            extra = median(x - y for x, y in zip(a, b, strict=True))
            memory = f"{recorded[-1][1] / 1e6:.0f} {plain[-1][1] / 1e6:.0f}"
            done = tenth * n_turns * BLOCK
            print(f"{done:7,} {median(a):9.1f} {median(b):7.1f} {extra:11.1f}  {memory:>40}", flush=True)
        for end in ends:
            end.send(0)
        for process in multiprocessing.active_children():
            process.join()


if __name__ == "__main__":
    main()
