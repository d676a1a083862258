"""One way to do a communication, and what it costs."""

from __future__ import annotations

from typing import NamedTuple


class Way(NamedTuple):
    """One way to do a collective: what it costs before the first byte, what the bytes take, its name.

    ``near_s`` and ``far_s`` are what the bytes take inside the nodes and between them; the longer is
    ``wire_s``.
    """

    latency_s: float
    wire_s: float
    name: str
    near_s: float = 0.0
    far_s: float = 0.0

    @property
    def shares(self) -> tuple[float, float]:
        """Share of its wire time for which the way inside a node, and the way out of it, is full."""
        if not self.wire_s:
            return 0.0, 0.0
        return min(self.near_s / self.wire_s, 1.0), min(self.far_s / self.wire_s, 1.0)

    @property
    def total_s(self) -> float:
        """Time if nothing else uses the links."""
        return self.latency_s + self.wire_s


def way_of(latency_s: float, far_s: float, near_s: float, name: str, *, serial: bool = False) -> Way:
    """Return a way whose bytes flow inside nodes and between them at once, or one after the other."""
    wire_s = far_s + near_s if serial else max(far_s, near_s)
    return Way(latency_s, wire_s, name, near_s, far_s)
