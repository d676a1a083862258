"""Where seconds become ticks."""

from __future__ import annotations


def to_ns(seconds: float) -> int:
    """Return the engine's ticks for a modelled duration. The only rounding in the simulator.

    Cost models speak float seconds, the engine counts whole nanoseconds, so that equal sums are equal.

    >>> to_ns(0.7) + to_ns(0.1) == to_ns(0.8)  # 0.7 + 0.1 == 0.8 is False
    True
    """
    return round(seconds * 1e9)
