"""What differs from one rank or one step to the next: stragglers, and jitter with a seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Final

from foretrace.simulator.engine.changes import Throttle
from foretrace.simulator.errors import JobError
from foretrace.simulator.program import to_ns
from foretrace.topologies.errors import UnitError
from foretrace.topologies.units import parse_time

MOST_SAMPLES: Final = 1_000_000
"""Most steps that are drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """How ranks and steps of a run differ from one another.

    Jitter is a random factor of mean 1 with a log-normal distribution. The number given is the standard
    deviation of its logarithm, which is about the relative spread.

    Attributes:
        stragglers: ``rank:factor[@time]`` separated by commas; compute of that rank takes that much longer,
            from that time on if one is given: a GPU that throttles, and recovers with a factor of 1. They are
            part of the timeline, jitter is not.
        link_changes: ``rank:tier:capacity[@time]`` separated by commas: what is left of a rank's links from
            then on (``simulator.network.uplinks``). They are part of the timeline, too.
        rank_jitter: drawn once per rank and step: clocks, temperature, neighbours on the host.
        samples: steps to draw for the distribution of the step time.
        seed: the same seed gives the same samples.
    """

    stragglers: str = ""
    link_changes: str = ""
    compute_jitter: float = 0.0
    network_jitter: float = 0.0
    rank_jitter: float = 0.0
    samples: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("compute_jitter", "network_jitter", "rank_jitter"):
            if not 0 <= (value := getattr(self, name)) <= 1:
                raise JobError(f"{name}={value}: between 0 (none) and 1; 0.02 is a spread of about 2 %")
        if not 1 <= self.samples <= MOST_SAMPLES:
            raise JobError(f"samples={self.samples}: from 1 to {MOST_SAMPLES:,}")
        if self.seed < 0:
            raise JobError(f"seed={self.seed}: at least 0")
        # Only to be read: a mistake is found here, not in the midst of a simulation.
        _ = self.factors

    @property
    def factors(self) -> dict[int, float]:
        """By rank, the factor by which its compute takes longer during the whole run.

        Raises JobError if ``stragglers`` is not of the form ``rank:factor[@time]``.
        """
        return {rank: factor for rank, factor, at_ns in _stragglers(self.stragglers) if at_ns is None}

    @property
    def throttles(self) -> list[Throttle]:
        """What happens to GPUs at some time: ``3:1.5@2ms,3:1@5ms`` is slow for 3 ms."""
        return [
            Throttle(at_ns, rank, factor)
            for rank, factor, at_ns in _stragglers(self.stragglers)
            if at_ns is not None
        ]

    @property
    def is_random(self) -> bool:
        """Whether steps differ from each other."""
        return max(self.compute_jitter, self.network_jitter, self.rank_jitter) > 0

    def settings(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults."""
        return {
            field.name: value
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default
        }


MOST_FACTOR: Final = 1_000_000
"""Times that a rank may be as slow as others; a day instead of a tenth of a second."""


def _stragglers(text: str) -> Iterator[tuple[int, float, int | None]]:
    """Yield rank, factor and time in ns (None: all the time) of each part of *text*."""
    for part in text.split(","):
        if not part.strip():
            continue
        what, _, when = part.partition("@")
        rank, _, factor = what.partition(":")
        try:
            found = int(rank), float(factor), to_ns(parse_time(when)) if "@" in part else None
        except (ValueError, UnitError):
            raise JobError(
                f"stragglers: {part.strip()!r} is not rank:factor or rank:factor@time, e.g. 3:1.25@2ms"
            ) from None
        if found[0] < 0 or not 0 < found[1] <= MOST_FACTOR:
            raise JobError(
                f"stragglers: {part.strip()!r}: a rank of at least 0 and a factor above 0, at most "
                f"{MOST_FACTOR:,}"
            )
        yield found
