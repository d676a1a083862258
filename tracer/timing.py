"""How computations are timed, on a processor by its clock and on a GPU by events on its stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Final

MIN_S: Final = 0.25
"""Least time spent on one figure, so that a busy moment of the machine does not decide it."""

FAST: Final = 0.25
"""Quantile of a computation's times: half of the quiet half, as others may use the machine, too."""

BURST_S: Final = 0.005
"""Length of a burst on a GPU: longer than a launch, shorter than its power limit takes to lower the clock."""

BURSTS: Final = 7
"""Bursts of which the middle one counts."""

PAUSE_S: Final = 0.05
"""Pause before a burst, in which a GPU cools and its clock recovers."""

Run = Callable[[], Any]


def seconds(run: Run, at_least_s: float = MIN_S) -> float:
    """Return the time of *run* when the machine is left to it: the lower quartile of many times."""
    run()
    times: list[float] = []
    while sum(times) < at_least_s or len(times) < 5:
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return sorted(times)[int(len(times) * FAST)]


def burst_s(run: Run, device: str, at_least_s: float = MIN_S) -> float:
    """Return the time of *run* in short bursts with pauses between them.

    Args:
        run: issues the work; on a GPU it need not wait for it.
        device: ``"cpu"`` or ``"cuda"``.
        at_least_s: time to spend on a processor.
    """
    if device == "cpu":
        return seconds(run, at_least_s)
    run()
    once = _events_s(run, 3)
    n = max(1, int(BURST_S / once))
    found = []
    for _ in range(BURSTS):
        time.sleep(PAUSE_S)
        found.append(_events_s(run, n))
    return median(found)


def sustained_s(run: Run, device: str, for_s: float) -> float:
    """Return the time of *run* under lasting load: the mean over the second half of *for_s*."""
    once = max(burst_s(run, device, for_s / 10), 1e-9)
    n = max(1, int(for_s / 2 / once))
    timed = _wall_s if device == "cpu" else _events_s
    timed(run, n)
    return timed(run, n)


def _wall_s(run: Run, n: int) -> float:
    began = time.perf_counter()
    for _ in range(n):
        run()
    return (time.perf_counter() - began) / n


def _events_s(run: Run, n: int) -> float:
    """Return the time of one of *n* calls on the device, from events before the first and after the last."""
    import torch

    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    began.record()
    for _ in range(n):
        run()
    ended.record()
    torch.cuda.synchronize()
    return float(began.elapsed_time(ended)) / 1e3 / n


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return slope and intercept of ``y = slope x + intercept``, least squares of the relative error.

    The intercept is at least 0; where the fit would make it negative, the line goes through the origin.
    """
    weights = [1 / y**2 for _, y in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    slope = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True)) / spread
    if (intercept := mean_y - slope * mean_x) >= 0:
        return slope, intercept
    squares = sum(w * x * x for w, (x, _) in zip(weights, points, strict=True))
    return sum(w * x * y for w, (x, y) in zip(weights, points, strict=True)) / squares, 0.0
