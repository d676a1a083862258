"""What one event of a recording takes of the thread that trains, called again and again.

    python benchmarks/record_per_event.py

One process, alone in its group of gloo, with hooks and without in turn: an all-reduce of four numbers that is
waited for, and a block of one addition, forward and backward. Medians of the rounds, in processor time of
the thread; and bytes of a span on disk. Caches are warm here: ``record_paired.py`` shows what is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from statistics import median
from typing import Any

from recording_alone import recording_alone

CALLS, ROUNDS = 500, 21


def main() -> None:
    """Measure, and print."""
    torch = import_module("torch")
    with recording_alone() as (session, path):
        session.unhook()
        for name, call in (("collective", reducing(torch)), ("block", computing(torch))):
            print(f"{added_us(call, session):.1f} us a {name}")
    n_spans = import_module("foretrace.traces.store").open_run(path).spans().num_rows
    n_bytes = sum(file.stat().st_size for file in (path / "spans").iterdir())
    print(f"{n_bytes / n_spans:.1f} bytes a span, of {n_spans}")


def reducing(torch: Any) -> Callable[[], None]:
    """Return what calls a small all-reduce again and again."""
    all_reduce, numbers = import_module("torch.distributed").all_reduce, torch.ones(4)

    def call() -> None:
        for _ in range(CALLS):
            all_reduce(numbers)

    return call


def computing(torch: Any) -> Callable[[], None]:
    """Return what calls a chain of blocks, each a layer of its own, forward and backward."""
    model = torch.nn.Sequential(*(torch.nn.Softshrink() for _ in range(CALLS)))
    numbers = torch.ones(4, requires_grad=True)

    def call() -> None:
        model(numbers).sum().backward()

    return call


def added_us(call: Callable[[], None], session: Any) -> float:
    """Return what hooks add to one of the calls, in microseconds."""
    taken: dict[bool, list[float]] = {False: [], True: []}
    for round_ in range(2 * ROUNDS):
        is_recorded = round_ % 2 == 1
        if is_recorded:
            import_module("foretrace.tracer.hooks").install(session)
        call()
        began = time.thread_time()
        call()
        taken[is_recorded].append((time.thread_time() - began) / CALLS * 1e6)
        if is_recorded:
            session.unhook()
    return median(taken[True]) - median(taken[False])


if __name__ == "__main__":
    main()
