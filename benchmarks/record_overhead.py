"""What recording costs: steps of one training, recorded and not in turns, in the same processes.

    torchrun --nproc-per-node 2 benchmarks/record_overhead.py train_fsdp2.py

Takes an example and trains it for many short spells; every other spell is recorded. Wall time on a machine
that others use says little, so the processor time of the whole process is shown beside it: it holds all
that the recorder does, on whatever thread.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
SPELLS, STEPS, WARM_UP = 10, 5, 2


def main() -> None:
    """Train, and print the cost of recording."""
    sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
    import torch.distributed as dist

    import foretrace
    import training

    example = sys.argv.pop(1)
    scratch = (
        Path(tempfile.gettempdir()) / f"foretrace-overhead-{Path(example).stem}-{time.time_ns() // 10**10}"
    )

    def spells(args: object, world: training.World, step: Callable[[int], float | None]) -> None:
        taken: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for spell in range(2 * SPELLS):
            recorded = spell % 2 == 1
            if recorded:
                with foretrace.record(scratch / str(spell)):
                    taken[recorded] += timed(step)
            else:
                taken[recorded] += timed(step)
        if world.rank == 0:
            for column, name in enumerate(("wall", "processor")):
                plain, with_it = (median(row[column] for row in taken[flag]) * 1e3 for flag in (False, True))
                print(
                    f"{Path(example).stem:12} {name:9} {plain:7.1f} ms plain, {with_it:7.1f} ms recorded, "
                    f"{with_it / plain - 1:+.1%}"
                )
        dist.destroy_process_group()

    training.train = spells
    module = import_module(Path(example).stem)
    module.train = spells
    module.main()


def timed(step: Callable[[int], float | None]) -> list[tuple[float, float]]:
    """Return wall and processor time of each step of one spell, without the first ones."""
    import torch.distributed as dist

    found = []
    for number in range(WARM_UP + STEPS):
        dist.barrier()
        wall, processor = time.perf_counter(), time.process_time()
        step(number)
        found.append((time.perf_counter() - wall, time.process_time() - processor))
    return found[WARM_UP:]


if __name__ == "__main__":
    main()
