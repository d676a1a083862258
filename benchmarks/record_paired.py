"""What recording costs, step against step: pairs in one process, one recorded, one not, in random order.

    torchrun --nproc-per-node 2 benchmarks/record_paired.py fsdp2
    torchrun --nproc-per-node 2 benchmarks/record_paired.py ddp --pairs 300 --step-ms 60
    torchrun --nproc-per-node 2 benchmarks/record_paired.py ddp --depth kernels

A step has 30 collectives, or transfers of a pipeline. Each measured step follows one that is not, in which
caches and allocators get used to what has been switched. Others who use the machine slow both steps of a
pair alike, and the median leaves out the pairs where they did not; what is said is the median of the
differences within pairs and its 95 % confidence interval, by order statistics (Conover, Practical
Nonparametric Statistics, section 3.2). Processor time is that of the whole process, and of the training's
own thread; what the thread that writes takes is counted beside it. A third step is not recorded either:
against the first it shows the noise. With ``--depth kernels`` a fourth one runs under torch.profiler alone.
Rank 0 prints.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from math import ceil, floor, sqrt
from pathlib import Path
from statistics import median
from typing import Any

from foretrace.traces.report.format import format_share

ROOT = Path(__file__).resolve().parents[1]
WIDTH, BLOCKS = 512, 10
"""Size of a layer and number of them: 10 layers of FSDP2 make 30 collectives, as do 30 buckets of DDP."""
MICROBATCHES = 15
"""Of a pipeline, unless told: 15 activations and 15 gradients go from each rank to the next and back."""

Step = Callable[[], Any]
Times = dict[str, list[tuple[float, ...]]]

CLOCKS: dict[str, Callable[[], float]] = {
    "wall": time.perf_counter,
    "processor": time.process_time,
    "training": time.thread_time,
}
"""What a step takes: time, processor time of the process, and of the thread that trains."""


def main() -> None:
    """Measure, and print on rank 0."""
    sys.path.insert(0, str(ROOT / "src"))
    parser = argparse.ArgumentParser()
    parser.add_argument("strategy", choices=["ddp", "fsdp2", "tp", "pp"])
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--step-ms", type=float, default=55)
    parser.add_argument("--microbatches", type=int, default=MICROBATCHES)
    parser.add_argument("--depth", choices=["light", "kernels"], default="light")
    args = parser.parse_args()
    torch, distributed = import_module("torch"), import_module("torch.distributed")
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    step = sized(args.strategy, args.step_ms, args.microbatches)
    run = [tempfile.mkdtemp()]
    distributed.broadcast_object_list(run)
    with import_module("foretrace").record(f"{run[0]}/run") as recording:
        taken, n_recorded = measured(step, recording.session, args.pairs, args.depth)
        clock = time.pthread_getcpuclockid(recording.session.sink.thread_id)
        writer_s = time.clock_gettime(clock) / n_recorded
    distributed.barrier()
    if distributed.get_rank() == 0:
        report(f"{args.strategy}, {args.depth}", taken, writer_s, Path(run[0]) / "run")
    distributed.barrier()
    distributed.destroy_process_group()


def sized(strategy: str, step_ms: float, microbatches: int = MICROBATCHES) -> Step:
    """Return a step of *strategy* in which the training's thread works for *step_ms* or somewhat longer.

    The number of rows of its batch decides, which a pipeline cuts into *microbatches*. Time in which that
    thread waits for gloo does not count.
    """
    distributed = import_module("torch.distributed")
    rows = 32
    while True:
        step = training(strategy, rows, microbatches)
        times = []
        for _ in range(6):
            began = time.thread_time()
            step()
            times.append((time.thread_time() - began) * 1e3)
        took = [min(times)]
        distributed.broadcast_object_list(took)
        if took[0] >= step_ms:
            return step
        rows = ceil(rows * min(max(step_ms / took[0], 1.1), 4))


def training(strategy: str, rows: int, microbatches: int) -> Step:
    """Return a step of a stack of linear layers."""
    torch = import_module("torch")
    torch.manual_seed(0)
    if strategy == "pp":
        return pipeline(rows, microbatches)
    n = BLOCKS if strategy == "fsdp2" else 3 * BLOCKS
    model: Any = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(n)))
    if strategy == "ddp":
        wrap = import_module("torch.nn.parallel").DistributedDataParallel
        model = wrap(model, bucket_cap_mb=4 * WIDTH**2 / 2**20)
    elif strategy == "tp":
        split_over_ranks(model)
    else:
        shard = import_module("torch.distributed.fsdp").fully_shard
        for layer in model:
            shard(layer)
        shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.ones(rows, WIDTH)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def split_over_ranks(model: Any) -> None:
    """Split the layers over the ranks, by columns and by rows in turn: an all-reduce for each."""
    n_ranks = import_module("torch.distributed").get_world_size()
    mesh = import_module("torch.distributed.device_mesh").init_device_mesh(
        "cpu", (n_ranks,), mesh_dim_names=("tp",)
    )
    parallel = import_module("torch.distributed.tensor.parallel")
    ways = (parallel.ColwiseParallel, parallel.RowwiseParallel)
    parallel.parallelize_module(model, mesh, {str(i): ways[i % 2]() for i in range(len(model))})


def pipeline(rows: int, microbatches: int) -> Step:
    """Return a step of as many stages as ranks, one on each."""
    torch, pipelining = import_module("torch"), import_module("torch.distributed.pipelining")
    distributed = import_module("torch.distributed")
    rank, n_ranks = distributed.get_rank(), distributed.get_world_size()
    model: Any = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.ones(max(rows // microbatches, 1) * microbatches, WIDTH)
    stage = pipelining.PipelineStage(model, rank, n_ranks, torch.device("cpu"))
    schedule = pipelining.Schedule1F1B(
        stage, microbatches, loss_fn=lambda output, target: (output - target).square().mean()
    )

    def step() -> None:
        schedule.step(*((x,) if rank == 0 else ()), **({"target": x} if rank == n_ranks - 1 else {}))
        optimizer.step()
        optimizer.zero_grad()

    return step


def measured(step: Step, session: Any, n_pairs: int, depth: str) -> tuple[Times, int]:
    """Return the times of the steps of every way, pair by pair; and how many were recorded."""
    profiler = import_module("torch.profiler")
    ways = ["plain", "again", "recorded"] + (["profiler"] if depth == "kernels" else [])
    barrier = import_module("torch.distributed").barrier
    chance = random.Random(0)  # the same on all ranks
    taken: Times = {way: [] for way in ways}
    session.unhook()
    for _ in range(n_pairs):
        for way in chance.sample(ways, len(ways)):
            running = None
            if way == "recorded":
                import_module("foretrace.tracer.hooks").install(session)
            if way == "profiler" or (way == "recorded" and depth == "kernels"):
                running = profiler.profile(activities=[profiler.ProfilerActivity.CPU], record_shapes=True)
                running.start()
            step()
            barrier()
            began = [clock() for clock in CLOCKS.values()]
            step()
            taken[way].append(tuple(clock() - t for clock, t in zip(CLOCKS.values(), began, strict=True)))
            barrier()
            if running is not None:
                running.stop()
            if way == "recorded":
                session.unhook()
    return taken, 2 * n_pairs


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and the bounds of its 95 % confidence interval."""
    ordered, n = sorted(values), len(values)
    low, high = floor((n - 1.96 * sqrt(n)) / 2), ceil((n + 1.96 * sqrt(n)) / 2)
    return median(ordered), ordered[max(low - 1, 0)], ordered[min(high, n - 1)]


def report(title: str, taken: Times, writer_s: float, path: Path) -> None:
    """Print the cost of a step by each way, against plain steps and against the profiler."""
    pairs = [("again", "plain"), ("recorded", "plain")]
    if "profiler" in taken:
        pairs += [("profiler", "plain"), ("recorded", "profiler")]
    for column, unit in enumerate(CLOCKS):
        for way, other in pairs:
            base = median(row[column] for row in taken[other])
            found = interval([a[column] - b[column] for a, b in zip(taken[way], taken[other], strict=True)])
            shares = ", ".join(format_share(value / base, "+.2f") for value in found)
            print(
                f"{title}: {unit:9} {way} against {other}: {base * 1e3:.1f} ms, {len(taken[way])} pairs, "
                f"{found[0] * 1e6:+.0f} us; median and its 95 % interval {shares}"
            )
    spans = import_module("foretrace.traces.store").open_run(path).spans([0])
    n_steps = len({*spans["step"].to_pylist()})
    n_calls = sum(category in {"collective", "p2p"} for category in spans["category"].to_pylist())
    print(
        f"{title}: {spans.num_rows / n_steps:.0f} spans a step, {n_calls / n_steps:.0f} communications; the "
        f"thread that writes: {writer_s * 1e6:.0f} us a step, which a plain step may hold as well"
    )


if __name__ == "__main__":
    main()
