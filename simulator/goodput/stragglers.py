"""GPUs that compute slower than they should without breaking: everybody waits for the slowest of all.

Users know quantiles of single GPUs, from a burn-in or from recorded runs: "99 % take at most 2 % longer". The
slowest of n that are independent of each other lies at a far higher quantile of that: Q(u^(1/n)), where Q
gives those of one (David and Nagaraja, Order Statistics, 3rd ed. 2003, section 2.1).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from foretrace.simulator.errors import GoodputError
from foretrace.traces.report.format import format_share

_POINT: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*%\s*:\s*([0-9]+(?:\.[0-9]+)?)")
_Factor = TypeVar("_Factor", float, NDArray[np.float64])
_FORM: Final = "e.g. '50%:1, 99%:1.02, 99.9%:1.15'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stragglers:
    """How much longer the compute of single GPUs takes than in the run, as a distribution.

    Attributes:
        at: quantiles, ascending within 0 to 1; from 0, where nothing is slower, to 1, the worst there is.
        factors: time of compute over that of the run at these, ascending from 1; in between it is linear.
    """

    at: tuple[float, ...]
    factors: tuple[float, ...]

    def slowest(self, quantile: float | NDArray[np.float64], n_gpus: int) -> NDArray[np.float64]:
        """Return the *quantile* of the factor of the slowest of *n_gpus* that are independent."""
        return np.interp(np.power(quantile, 1 / n_gpus), self.at, self.factors)

    def expected_slowest(self, n_gpus: int) -> float:
        """Return the mean factor of the slowest of *n_gpus*: the worst less the integral of F(x)^n."""
        points = list(zip(self.at, self.factors, strict=True))
        below = 0.0
        for (low, x), (high, y) in pairwise(points):
            below += (y - x) * (high ** (n_gpus + 1) - low ** (n_gpus + 1)) / ((n_gpus + 1) * (high - low))
        return self.factors[-1] - below


@dataclass(frozen=True, slots=True)
class SlowGpus:
    """What the slowest GPU does to every step, at most.

    No path through a step holds more of a GPU's compute than there is: a step gets longer by at most what
    that gets longer, and by less where something hides it: a fuller stage of the pipeline, or launches.

    Attributes:
        one: the distribution of single GPUs; None: none is slow.
        n_gpus: how many there are.
        compute_share: share of the step in which the GPU that does most computes.
    """

    one: Stragglers | None
    n_gpus: int
    compute_share: float

    @property
    def mean(self) -> float:
        """Mean factor on a step."""
        return 1.0 if self.one is None else self._of_step(self.one.expected_slowest(self.n_gpus))

    def stretch(self, quantile: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the factor on a step at each *quantile* of all worlds."""
        return (
            np.ones_like(quantile)
            if self.one is None
            else self._of_step(self.one.slowest(quantile, self.n_gpus))
        )

    def slowest(self, quantiles: Sequence[float]) -> dict[str, float] | None:
        """Return the factor on the compute of the slowest GPU, mean and *quantiles*; None: none is slow."""
        if self.one is None:
            return None
        at = {f"{q:.0%}": float(self.one.slowest(q, self.n_gpus)) for q in quantiles}
        return {"mean": self.one.expected_slowest(self.n_gpus), **at}

    def notes(self, quantiles: Sequence[float]) -> list[str]:
        """Return in words what this rests on, from the first to the last of *quantiles*."""
        if (found := self.slowest(quantiles)) is None:
            return []
        _, low, *_, high = found.values()
        said = (
            f"the slowest of {self.n_gpus:,} GPUs computes {found['mean']:.3f} times as long ({low:.3f} to "
            f"{high:.3f}), if they are independent, to the end of training; everybody waits for all of that: "
            f"{format_share(self.compute_share, '.0f')} of a step is compute"
        )
        return [said]

    def _of_step(self, factor: _Factor) -> _Factor:
        return 1 + self.compute_share * (factor - 1)


def parse_stragglers(text: str) -> Stragglers:
    """Return ``"50%:1, 99%:1.02"`` as a distribution; none is slower than the last that is said.

    >>> parse_stragglers("99%:1.02").factors
    (1.0, 1.02, 1.02)

    Raises:
        GoodputError: that are no quantiles, or they do not ascend.
    """
    points = [(0.0, 1.0)]
    for part in text.split(","):
        match = _POINT.fullmatch(part.strip())
        if match is None:
            raise GoodputError(f"slow GPUs: {part.strip()!r} is not percent:factor, {_FORM}")
        points.append((float(match[1]) / 100, float(match[2])))
    if points[1][0] == 0:
        del points[0]
    if points[-1][0] < 1:
        points.append((1.0, points[-1][1]))
    _check(text, points)
    return Stragglers(at=tuple(at for at, _ in points), factors=tuple(factor for _, factor in points))


def _check(text: str, points: Sequence[tuple[float, float]]) -> None:
    """Refuse what is no distribution of slowdowns.

    Raises:
        GoodputError: quantiles that do not ascend, or are over 100 %; factors that fall, or are below 1.
    """
    at, factors = zip(*points, strict=True)
    if at[-1] > 1 or any(low >= high for low, high in pairwise(at)):
        raise GoodputError(f"slow GPUs: {text!r}: percentages have to rise, up to 100, {_FORM}")
    if factors[0] < 1 or list(factors) != sorted(factors):
        raise GoodputError(f"slow GPUs: {text!r}: factors have to rise, from 1 on, {_FORM}")
