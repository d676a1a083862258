"""A transformer step on 512 GPUs in which every rank is simulated, 1,056 tasks each: 540,672 in all.

    python benchmarks/transformer_step.py [--gpus N] [--repeat N] [--json]

The same work was given to ASTRA-sim 2.0: tensor parallelism of 8 inside nodes, data parallelism across
them, and on every rank one chain of 32 layers times 8 micro-batches, forward 500 us and backward 1,000 us,
each with a ring all-reduce of 32 MiB over 8 GPUs, then 32 ring all-reduces of 48 MiB over the replicas. On
two cores (AMD EPYC) ASTRA-sim's analytical back end, revision 518bd513, takes 31.8 s and 670 MB for it.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from statistics import median
from typing import Final

import numpy as np

from foretrace.simulator.engine import choose
from foretrace.simulator.network.collectives import ring_steps
from foretrace.simulator.program import Label, Program, Transfer

GIB: Final = 2.0**30
TP: Final = 8
LAYERS: Final = 32
MICROBATCHES: Final = 8
FORWARD_NS: Final = 500_000
BACKWARD_NS: Final = 1_000_000
INTRA: Final = (450 * GIB, 1e-6)
"""Bytes per second and latency inside a node, as ASTRA-sim reads 450 GB/s and two hops of 500 ns."""
INTER: Final = (50 * GIB, 3e-6)
"""The same between nodes: 50 GB/s, two hops of 1,500 ns."""


def main() -> None:
    """Build and run the step, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    engine = choose("compiled", 0)
    engine.times(transformer_step(TP))  # loads the compiled code
    rows = []
    for _ in range(args.repeat):
        begin = time.process_time()
        program = transformer_step(args.gpus)
        built = time.process_time()
        table = engine.run(program)
        rows.append((built - begin, time.process_time() - built))
    build_s, run_s = (median(column) for column in zip(*rows, strict=True))
    end_ns = (table["start_ns"].to_numpy() + table["duration_ns"].to_numpy()).max()
    found = {
        "gpus": args.gpus,
        "tasks": program.n_tasks,
        "build_s": build_s,
        "run_s": run_s,
        "total_s": build_s + run_s,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "simulated_ms": end_ns / 1e6,
    }
    if args.json:
        print(json.dumps(found))
        return
    print(f"{args.gpus} GPUs, {program.n_tasks:,} tasks, every rank, to an Arrow timeline; processor time")
    print(f"  build {build_s:.3f} s, run {run_s:.3f} s, in all {build_s + run_s:.3f} s")
    print(f"  peak memory of the process {found['peak_rss_bytes'] / 1e6:,.0f} MB")
    print(f"  simulated step {end_ns / 1e6:.3f} ms")


def ring_all_reduce(size_bytes: float, n: int, link: tuple[float, float]) -> Transfer:
    """Return the cost of a ring all-reduce: ``2(n-1)`` steps of a latency and an *n*-th of the array."""
    bytes_per_s, latency_s = link
    steps = ring_steps("all_reduce", n)
    return Transfer(round(steps * latency_s * 1e9), round(steps * size_bytes / n / bytes_per_s * 1e9), "ring")


def transformer_step(n_gpus: int) -> Program:
    """Return the step: one chain of tasks per rank, on its stream ``compute``."""
    passes = LAYERS * MICROBATCHES
    replicas = n_gpus // TP
    kind = np.tile([0, 2], passes), np.tile([1, 2], passes), np.full(LAYERS, 3)  # label of each task
    one = np.concatenate(kind).astype(np.int32)
    n_each, n = len(one), len(one) * n_gpus
    rank = np.repeat(np.arange(n_gpus, dtype=np.int32), n_each)
    nth = np.concatenate([np.cumsum(one == 2) - 1, np.zeros(0, np.int64)])
    nth[one == 3] = np.arange(LAYERS)
    n_tp = 2 * passes
    instance_one = np.where(one == 2, nth, np.where(one == 3, nth, -1))
    group = np.where(one == 2, 0, 1)[None, :] * replicas + np.where(
        one[None, :] == 2, (np.arange(n_gpus) // TP)[:, None], (np.arange(n_gpus) % TP)[:, None]
    )
    base = np.where(group < replicas, group * n_tp, replicas * n_tp + (group - replicas) * LAYERS)
    instance = np.where(instance_one[None, :] >= 0, base + instance_one[None, :], -1).ravel()
    n_instances = replicas * n_tp + TP * LAYERS
    is_tp = np.arange(n_instances) < replicas * n_tp
    minus = np.full(n, -1, np.int32)
    zeros = np.zeros(n, np.int64)
    return Program(
        rank=rank,
        stream=np.zeros(n, np.int32),
        label=np.tile(one, n_gpus),
        duration_ns=np.tile(np.array([FORWARD_NS, BACKWARD_NS, 0, 0], np.int64)[one], n_gpus),
        instance=instance.astype(np.int64),
        microbatch=minus,
        layer=minus,
        stage=minus,
        virtual_stage=minus,
        step=np.zeros(n, np.int32),
        peer=minus,
        flops=zeros,
        bytes_moved=zeros,
        dep_start=np.zeros(n + 1, np.int64),
        deps=np.empty(0, np.int64),
        streams=("compute",),
        labels=(
            Label("compute", "forward", "layer"),
            Label("compute", "backward", "layer"),
            Label("collective", "all_reduce", "activations", "tp", "bf16"),
            Label("collective", "all_reduce", "gradients", "dp", "bf16"),
        ),
        instance_size_bytes=np.where(is_tp, 32 << 20, 48 << 20).astype(np.int64),
        instance_group=np.where(
            is_tp,
            np.arange(n_instances) // n_tp,
            replicas + (np.arange(n_instances) - replicas * n_tp) // LAYERS,
        ).astype(np.int32),
        instance_sequence=np.where(
            is_tp, np.arange(n_instances) % n_tp, (np.arange(n_instances) - replicas * n_tp) % LAYERS
        ).astype(np.int64),
        instance_participants=np.where(is_tp, TP, replicas).astype(np.int32),
        transfers=(ring_all_reduce(32 << 20, TP, INTRA), ring_all_reduce(48 << 20, replicas, INTER)),
        instance_transfer=(~is_tp).astype(np.int32),
    )


if __name__ == "__main__":
    main()
