"""What recording costs: steps of one training, recorded and not in turns, in the same processes.

    torchrun --nproc-per-node 2 benchmarks/record_overhead.py train_fsdp2.py
    torchrun --nproc-per-node 2 benchmarks/record_overhead.py collectives

Takes an example and trains it in many short spells, half of them recorded, in the order plain, recorded,
recorded, plain. Wall time on a machine that others use says little, so the processor time of the process
stands beside it: it holds all that the recorder does, on whatever thread. ``collectives`` trains nothing but
issues small all-reduces, waited for at once, and says what each costs. Rank 0 prints.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

from foretrace.traces.report.format import format_share

ROOT = Path(__file__).resolve().parents[1]
ROUNDS, STEPS, WARM_UP = 6, 4, 2
COLLECTIVES = 200
"""Small all-reduces that count as one step of ``collectives``."""

Step = Callable[[int], Any]
Times = dict[bool, list[tuple[float, float]]]


def main() -> None:
    """Train, and print the cost of recording."""
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "examples")]
    name = Path(sys.argv.pop(1)).stem
    if name == "collectives":
        world = import_module("training").join()
        compare(name, world.rank, all_reduces())
        return
    example: Any = import_module(name)
    example.train = lambda args, world, step: compare(name, world.rank, step)
    example.main()


def all_reduces() -> Step:
    """Return a step of nothing but small collectives, each waited for."""
    torch, distributed = import_module("torch"), import_module("torch.distributed")
    x = torch.ones(16)

    def step(_: int) -> None:
        for _ in range(COLLECTIVES):
            distributed.all_reduce(x)

    return step


def compare(name: str, rank: int, step: Step) -> None:
    """Run *step* in spells with and without a recording; rank 0 prints the cost."""
    foretrace, distributed = import_module("foretrace"), import_module("torch.distributed")
    with tempfile.TemporaryDirectory() as scratch:
        run = [scratch]
        distributed.broadcast_object_list(run)
        taken: Times = {False: [], True: []}
        for i in range(ROUNDS):
            for j, is_recorded in enumerate((False, True, True, False)):
                with foretrace.record(f"{run[0]}/{i}-{j}") if is_recorded else nullcontext():
                    taken[is_recorded] += timed(step, distributed.barrier)
        distributed.barrier()
        if rank == 0:
            report(name, taken, Path(run[0]))
        distributed.barrier()
    distributed.destroy_process_group()


def timed(step: Step, barrier: Callable[[], Any]) -> list[tuple[float, float]]:
    """Return wall and processor time of each step of one spell, without the first ones."""
    found = []
    for number in range(WARM_UP + STEPS):
        barrier()
        wall, processor = time.perf_counter(), time.process_time()
        step(number)
        found.append((time.perf_counter() - wall, time.process_time() - processor))
    return found[WARM_UP:]


def report(name: str, taken: Times, folder: Path) -> None:
    """Print the cost of a step, of an event, and the room that a span takes on disk."""
    for column, unit in enumerate(("wall", "processor")):
        plain, recorded = (median(row[column] for row in taken[flag]) * 1e3 for flag in (False, True))
        print(
            f"{name:12} {unit:9} {plain:7.1f} ms plain, {recorded:7.1f} recorded: "
            f"{format_share(recorded / plain - 1, '+.1f')}"
        )
    open_run = import_module("foretrace.traces.store").open_run
    spells = [open_run(path).spans([0]).num_rows for path in sorted(folder.iterdir())]
    n_steps = (WARM_UP + STEPS) * len(spells)
    files = [file.stat().st_size for file in folder.glob("*/spans/rank-00000.arrow")]
    extra_s = median(row[1] for row in taken[True]) - median(row[1] for row in taken[False])
    per_step = sum(spells) / n_steps
    print(
        f"{name:12} {per_step:.0f} spans per step and rank, {extra_s / per_step * 1e6:.1f} us of processor "
        f"time each, {sum(files) / sum(spells):.0f} bytes each on disk"
    )


if __name__ == "__main__":
    main()
