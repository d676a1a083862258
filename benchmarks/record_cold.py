"""What hooks take where products of matrices have emptied the caches: a block's forward, and a collective.

    python benchmarks/record_cold.py

One process, alone in its group of gloo. Ten products of 24 rows by 512 x 512 come before each call, whose
processor time is taken alone; ways of calling in random order, with hooks and without, within one process.
``empty`` are two hooks of modules that do nothing. Medians, and the middle half of
the calls behind them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from statistics import quantiles
from typing import Any

from recording_alone import recording_alone

ROUNDS, CALLS = 30, 10
WAYS = ("plain", "again", "empty", "recorded")


def main() -> None:
    """Measure, and print."""
    torch, chance = import_module("torch"), random.Random(0)
    with recording_alone() as (session, _):
        calls = {"block": computing(torch), "collective": reducing(torch)}
        taken: dict[tuple[str, str], list[float]] = {(name, way): [] for name in calls for way in WAYS}
        for call in calls.values():
            call()
        session.unhook()
        for _ in range(ROUNDS):
            for way in chance.sample(WAYS, len(WAYS)):
                with hooked(way, session):
                    for name, call in calls.items():
                        call()
                        taken[name, way] += [call() / 1e3 for _ in range(CALLS)]
    for (name, way), values in taken.items():
        low, middle, high = quantiles(values, n=4)
        print(f"{name:10} {way:8}: {middle:.1f} us ({low:.1f} to {high:.1f})")


@contextmanager
def hooked(way: str, session: Any) -> Iterator[None]:
    """Have the hooks of *way* in place."""
    modules, handles = import_module("torch.nn.modules.module"), []
    if way == "empty":
        handles = [
            modules.register_module_forward_pre_hook(lambda module, args: None),
            modules.register_module_forward_hook(lambda *call: None, with_kwargs=True, always_call=True),
        ]
    elif way == "recorded":
        import_module("foretrace.tracer.hooks").install(session)
    yield
    for handle in handles:
        handle.remove()
    if way == "recorded":
        session.unhook()


def emptying(torch: Any) -> Callable[[], None]:
    """Return what puts everything else out of the caches: products with 10 MB of weights."""
    weights, rows = [torch.ones(512, 512) for _ in range(10)], torch.ones(24, 512)

    def empty() -> None:
        found = rows
        for weight in weights:
            found = found @ weight * 1e-3

    return empty


def reducing(torch: Any) -> Callable[[], int]:
    """Return what takes the time of an all-reduce of four numbers, ns."""
    all_reduce, numbers, empty = import_module("torch.distributed").all_reduce, torch.ones(4), emptying(torch)

    def call() -> int:
        empty()
        began = time.thread_time_ns()
        all_reduce(numbers)
        return time.thread_time_ns() - began

    return call


def computing(torch: Any) -> Callable[[], int]:
    """Return what takes the time of calling a block that computes nothing, within a model, ns."""
    empty, took = emptying(torch), [0]

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.block = torch.nn.Identity()

        def forward(self, x: Any) -> Any:
            empty()
            began = time.thread_time_ns()
            found = self.block(x)
            took[0] = time.thread_time_ns() - began
            return found

    model, x = Model(), torch.ones(4, requires_grad=True) * 1

    def call() -> int:
        model(x)
        return took[0]

    return call


if __name__ == "__main__":
    main()
