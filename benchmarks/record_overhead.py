"""What recording costs: steps of one training, recorded and not in turns, in the same processes.

    torchrun --nproc-per-node 2 benchmarks/record_overhead.py train_fsdp2.py

Takes an example and trains it in many short spells, half of them recorded, in the order plain, recorded,
recorded, plain. Wall time on a machine that others use says little, so the processor time of the process
stands beside it: it holds all that the recorder does, on whatever thread.
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

ROOT = Path(__file__).resolve().parents[1]
ROUNDS, STEPS, WARM_UP = 6, 4, 2


def main() -> None:
    """Train, and print the cost of recording."""
    sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
    name = Path(sys.argv.pop(1)).stem
    example: Any = import_module(name)
    example.train = lambda args, world, step: compare(name, world.rank, step)
    example.main()


def compare(name: str, rank: int, step: Callable[[int], float | None]) -> None:
    """Run *step* in spells with and without a recording; rank 0 prints the cost."""
    foretrace, distributed = import_module("foretrace"), import_module("torch.distributed")
    run = [f"{tempfile.gettempdir()}/foretrace-overhead-{name}-{time.time_ns()}"]
    distributed.broadcast_object_list(run)
    taken: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for i in range(ROUNDS):
        for j, is_recorded in enumerate((False, True, True, False)):
            with foretrace.record(f"{run[0]}/{i}-{j}") if is_recorded else nullcontext():
                taken[is_recorded] += timed(step, distributed.barrier)
    distributed.destroy_process_group()
    for column, unit in enumerate(("wall", "processor")) if rank == 0 else ():
        plain, recorded = (median(row[column] for row in taken[flag]) * 1e3 for flag in (False, True))
        print(
            f"{name:12} {unit:9} {plain:7.1f} ms plain, {recorded:7.1f} recorded: {recorded / plain - 1:+.1%}"
        )


def timed(step: Callable[[int], float | None], barrier: Callable[[], Any]) -> list[tuple[float, float]]:
    """Return wall and processor time of each step of one spell, without the first ones."""
    found = []
    for number in range(WARM_UP + STEPS):
        barrier()
        wall, processor = time.perf_counter(), time.process_time()
        step(number)
        found.append((time.perf_counter() - wall, time.process_time() - processor))
    return found[WARM_UP:]


if __name__ == "__main__":
    main()
