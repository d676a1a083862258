"""How many tokens go to each expert, since routers are not computed.

A number is the tokens sent to the experts of a rank, as a multiple of an even share (``Stated``). A shape
says more: the share of each expert, either listed or by Zipf's law, where expert ``e`` has a share
proportional to ``(e + 1) ** -s`` (G. K. Zipf, Human Behavior and the Principle of Least Effort, 1949). The
choices of routers are then made up so that the shares are right to a token, and everything that a script
counts, sorts and exchanges is computed from them.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Final

from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.traces.report.format import format_share

ROUTERS: Final = re.compile(r"moe|router|routing|gate$|gating|experts?|mixture|switch", re.IGNORECASE)
"""What the class of a module that chooses experts is called, by Zipf's law; a list of shares is for every
choice among so many."""

MOST_EXPERTS: Final = 4096
"""Experts of a layer, by Zipf's law, above which a choice is one of something else, as of the next word."""

MOST_EXPONENT: Final = 10.0
"""Largest exponent of Zipf's law: the second expert then has a thousandth of what the first has."""

_SHOWN: Final = 60
"""Characters of a list of shares that are shown."""

_WAYS: Final = "a number from 1, zipf:S, shares of the experts with commas between them, or a file of them"

_SLACK: Final = 1e-9
"""By how much a share may be above what is possible: what is left of decimal fractions in a float."""


@dataclass(frozen=True)
class Loads:
    """Shares of the tokens that go to each expert of a layer.

    Attributes:
        text: as ``parsed`` takes it.
        shares: of each expert, adding up to one; empty if ``exponent`` tells them.
        exponent: of Zipf's law; 0 means even.
    """

    text: str
    shares: tuple[float, ...] = ()
    exponent: float = 0.0

    @property
    def shown(self) -> str:
        """What to call them in messages."""
        return self.text if len(self.text) <= _SHOWN else f"{len(self.shares)} shares"

    def is_of(self, n_experts: int, n_tokens: int, module: str) -> bool:
        """Return whether *n_tokens* choices among *n_experts*, in a class called *module*, are of experts.

        By Zipf's law they are not where few choose among more, as where experts choose tokens, nor where
        there are as many as words.
        """
        if self.shares:
            return len(self.shares) == n_experts
        return n_experts <= min(n_tokens, MOST_EXPERTS) and ROUTERS.search(module) is not None

    @functools.lru_cache(maxsize=64)  # noqa: B019 - there is one of these in a process
    def counts(self, n_tokens: int, top_k: int, n_experts: int) -> tuple[int, ...]:
        """Return the tokens of each expert; they add up to ``n_tokens * top_k``.

        Shares are rounded down, and what is left goes to those that lost most (the largest remainders).

        By Zipf's law an expert has all tokens at most, and others share what is left.

        Raises:
            RehearsalError: by a list, a token would have to visit an expert twice.
        """
        shares = self.shares or _zipf(self.exponent, n_experts, 1 / top_k)
        if max(shares) * top_k > 1 + _SLACK:
            raise RehearsalError(
                f"--expert-load {self.shown}: {format_share(max(shares))} of all choices cannot go to one of "
                f"{n_experts} experts: a token chooses {top_k} different ones, so at most "
                f"{format_share(1 / top_k)} can"
            )
        total = sum(map(Fraction, shares))
        exact = [Fraction(share) * n_tokens * top_k / total for share in shares]
        counts = [min(math.floor(one), n_tokens) for one in exact]
        order = sorted(range(n_experts), key=lambda expert: (counts[expert] - exact[expert], expert))
        for expert in [one for one in order if counts[one] < n_tokens][: n_tokens * top_k - sum(counts)]:
            counts[expert] += 1
        return tuple(counts)

    def said(self, counts: tuple[int, ...]) -> str:
        """Return in words how *counts* are spread; imbalance is standard deviation over mean."""
        mean = sum(counts) / len(counts)
        if not mean:
            return self.shown
        spread = math.sqrt(sum((one - mean) ** 2 for one in counts) / len(counts)) / mean
        return (
            f"{self.shown}, the fullest {max(counts) / mean:.2f} times its even share, imbalance {spread:.2f}"
        )


def parsed(text: str | float) -> float | Loads:
    """Return the value of ``--expert-load``: a number, or a shape.

    Raises:
        RehearsalError: it is none of these.
    """
    words = str(text).strip()
    if words.startswith("zipf:"):
        exponent = _number(words.removeprefix("zipf:"), words)
        if not 0 <= exponent <= MOST_EXPONENT:
            raise RehearsalError(
                f"--expert-load {words}: an exponent from 0, which is even, to {MOST_EXPONENT:g}"
            )
        return Loads(words, exponent=exponent)
    if "," in words:
        return _listed(words, words)
    if _is_file(words):
        try:
            found = Path(words).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RehearsalError(f"--expert-load {words}: a file that cannot be read as text") from error
        return _listed(",".join(found.replace("[", " ").replace("]", " ").replace(",", " ").split()), words)
    number = _number(words, words)
    if number < 1:
        raise RehearsalError(f"--expert-load {words}: from 1, which is even, or a shape: {_WAYS}")
    return number


def _zipf(exponent: float, n: int, most: float) -> tuple[float, ...]:
    """Return *n* shares by Zipf's law, of which none is above *most*."""
    weights = [(at + 1) ** -exponent for at in range(n)]
    for n_full in range(n):
        left, rest = 1 - n_full * most, math.fsum(weights[n_full:])
        if weights[n_full] / rest * left <= most + _SLACK:
            return (*[most] * n_full, *(left * weight / rest for weight in weights[n_full:]))
    return (1 / n,) * n


def _listed(text: str, shown: str) -> Loads:
    shares = [_number(one, shown) for one in text.split(",")]
    if len(shares) < 2:
        raise RehearsalError(f"--expert-load {shown}: {len(shares)} share, where experts are two or more")
    if min(shares) < 0 or not 0 < sum(shares) < math.inf:
        raise RehearsalError(
            f"--expert-load {shown}: shares from 0 that add up to more than 0, not {min(shares):g} as the "
            f"smallest and {sum(shares):g} in all"
        )
    return Loads(text, shares=tuple(_normal(shares)))


def _normal(shares: list[float]) -> list[float]:
    total = math.fsum(shares)
    return [share / total for share in shares]


def _number(text: str, shown: str) -> float:
    try:
        found = float(text)
    except ValueError as error:
        raise RehearsalError(
            f"--expert-load {shown}: {text.strip()!r} is not a number; give {_WAYS}"
        ) from error
    if not math.isfinite(found):
        raise RehearsalError(f"--expert-load {shown}: {found} is not a finite number; give {_WAYS}")
    return found


def _is_file(words: str) -> bool:
    try:
        return Path(words).is_file()
    except OSError:  # too long for a name
        return False
