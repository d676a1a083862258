"""Choices of routers: how many tokens go to each expert, and what is counted, summed and sent of them."""

from __future__ import annotations

import functools
import math
import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain, repeat
from pathlib import Path
from typing import Any, Final

from foretrace.tracer import internals
from foretrace.tracer.internals import makers
from foretrace.tracer.rehearse.data.numbers import Numbers
from foretrace.tracer.rehearse.errors import RehearsalError, UnroutedError
from foretrace.traces.report.format import format_share

# How many tokens go to each expert, since routers are not computed.


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
    """Shares of the tokens that go to each expert of a layer."""

    text: str  # as ``parsed`` takes it
    shares: tuple[float, ...] = ()  # of each expert, adding up to one; empty if ``exponent`` tells them
    exponent: float = 0.0  # of Zipf's law; 0 means even

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
        # In fractions shares add up to exactly one, as floats may not.
        total = sum(map(Fraction, shares))
        exact = [Fraction(share) * n_tokens * top_k / total for share in shares]
        # A share within the slack may come to more than all tokens.
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
    total = math.fsum(shares)
    return Loads(text, shares=tuple(share / total for share in shares))


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


# Makes up the choices of routers, so that each expert gets the stated load.


class Routing:
    """Choices of experts.

    Args:
        loads: load of each expert.
        numbers: keeps the choices, and everything that is computed from them.
        tell: called with a sentence for each answer that the script got.
        told: where these sentences are kept, and removed again.

    Attributes:
        groups: members of groups that exchanged counts of choices; each member holds experts of its own.
    """

    def __init__(
        self,
        loads: Loads,
        numbers: Numbers,
        tell: Callable[[str], None],
        told: dict[str, int],
    ) -> None:
        self._loads, self._numbers, self._tell, self._told = loads, numbers, tell, told
        self._widest: weakref.WeakKeyDictionary[Any, tuple[int, list[str]]] = weakref.WeakKeyDictionary()
        self.is_even = not loads.shares and not loads.exponent  # whether all experts have the same load
        self.n_choices = 0  # number of operator calls for which experts were chosen
        self.groups: list[tuple[int, ...]] = []

    def choose(self, scores: Any, places: Any, top_k: int, asker: str, module: Any = None) -> bool:
        """Make up *places*, the indices of the *top_k* largest *scores* along the last dimension.

        Returns:
            Whether it is a choice of experts.
        """
        n_experts, n_tokens = scores.shape[-1], places.numel() // max(top_k, 1)
        name = "" if module is None else type(module).__name__
        if n_experts < 2 or not n_tokens or not self._loads.is_of(n_experts, n_tokens, name):
            return False
        before, told = self._widest.get(module, (0, [])) if module is not None else (0, [])
        # The widest choice of a module is that of its experts; a narrower one is of their groups.
        if n_experts < before:
            return False
        if places.numel() * n_experts > self._numbers.most:
            raise RehearsalError(
                f"{asker} chooses {top_k} of {n_experts} experts for {n_tokens:,} tokens, too many to count "
                f"one by one (tokens x choices x experts up to {self._numbers.most:,}): rehearse a smaller "
                "micro-batch, or give --expert-load one number"
            )
        counts = self._loads.counts(n_tokens, top_k, n_experts)
        self._numbers.keep(places, self._made(counts, n_tokens, top_k, tuple(places.shape)))
        if n_experts > before:  # those were of groups of experts, among whose members is chosen now
            for sentence in told:
                self._told.pop(sentence, None)
            told = []
        told.append(f"{asker} chooses {top_k} of {n_experts} experts: told {self._loads.said(counts)}")
        self._tell(told[-1])
        if module is not None:
            self._widest[module] = n_experts, list(dict.fromkeys(told))
        self.n_choices += 1
        return True

    def exchange(
        self, source: Any, outputs: Sequence[Any], rank: int, ranks: Sequence[int], sizes: Any
    ) -> bool:
        """Follow an all-to-all among *ranks*; return whether *outputs*, what this *rank* gets, are known."""
        group = tuple(ranks)
        known = self._numbers.fill(outputs, heard(self._numbers, source, rank, group, sizes))
        if known and group not in self.groups and len(group) > 1:
            self.groups.append(group)
        return known

    @staticmethod
    def _made(counts: Sequence[int], n_tokens: int, top_k: int, shape: tuple[int, ...]) -> Any:
        """Return choices in which each expert has its *counts*.

        The tokens of one expert follow each other, and begin again with the first token after the last, at
        its next choice: none has an expert twice (R. McNaughton, Scheduling with Deadlines and Loss
        Functions, Management Science 6(1), 1959). Which of its experts comes first changes from token to
        token, so that first choices are spread as all are.
        """
        listed = list(chain.from_iterable(repeat(expert, n) for expert, n in enumerate(counts)))
        with internals.without_fakes():
            tokens = makers().arange(n_tokens)[:, None]
            turned = (tokens + makers().arange(top_k)) % top_k
            return makers().tensor(listed)[turned * n_tokens + tokens].reshape(shape)


def heard(numbers: Numbers, source: Any, rank: int, ranks: Sequence[int], sizes: Any) -> Any | None:
    """Return what *rank* receives from an all-to-all in which each of *ranks* sends the same *source*.

    Returns:
        What it receives from all ranks, or from one of them if there is a tensor for each; None if unknown.
    """
    place, n_ranks = ranks.index(rank), len(ranks)
    if isinstance(source, list | tuple):
        return numbers.of(source[place])
    real = numbers.of(source)
    if real is None or not real.dim() or (not sizes and len(real) % n_ranks):
        return None
    rows = list(sizes or ()) or [len(real) // n_ranks] * n_ranks
    with numbers.really():
        ours = real[sum(rows[:place]) : sum(rows[: place + 1])]
        return ours.repeat(n_ranks, *[1] * (ours.dim() - 1))


# What is known of the choices of routers: how many there are of each, and what is counted, summed and sent.


COUNTS: Final = frozenset({"aten.histc", "aten.bincount"})
"""Operators that count elements by value."""

CHOOSES: Final = frozenset({"aten.topk", "aten.argmax", "aten.max", "aten.multinomial", "aten.sort"})
"""Operators whose last result is a place along a dimension of their first operand."""

SUMS: Final = frozenset({"aten.sum", "aten.count_nonzero"})

SCATTERS: Final = frozenset({"aten.scatter", "aten.scatter_"})

ABOVE: Final = frozenset({"aten.gt", "aten.ge"})
COMPARES: Final = ABOVE | {"aten.lt", "aten.le"}
"""Operators that compare numbers with a bound."""

ALL_OR_ANY: Final = frozenset({"aten.all", "aten.any"})

OF_MEANS: Final = ALL_OR_ANY | COUNTS | SUMS | COMPARES | SCATTERS | {"aten.eq"}
"""Operators that have a rule in ``made``."""

EXCHANGE: Final = "_c10d_functional.all_to_all_single"
"""Operator by which ranks tell each other how many tokens they will send."""

KEEPS: Final = frozenset(
    {
        "aten._to_copy", "aten.clone", "aten.copy_", "aten.cat", "aten.stack", "aten.index",
        "aten.index_select", "aten.gather", "aten.permute", "aten.sort", "aten.repeat", "aten.mean",
        "aten.bitwise_and", "aten.logical_and", "_c10d_functional.all_to_all_single",
        "_c10d_functional.all_gather_into_tensor",
        "_c10d_functional.wait_tensor", "aten.contiguous", "aten.view", "aten._unsafe_view", "aten.squeeze",
    }
)  # fmt: skip
"""Operators whose results have the mean of their first operand."""

PUTS_TOGETHER: Final = frozenset({"aten.cat", "aten.stack"})
"""Those of them whose results have the elements of several operands."""

COPIED: Final = frozenset(
    {"aten._to_copy", "aten.clone", "aten.contiguous", "aten.view", "aten._unsafe_view", "aten.squeeze"}
)
"""Those of them whose results have the elements of their first operand, in their order."""

COPIES: Final = frozenset({"all_gather", "broadcast", "gather", "scatter"})
"""Collectives that hand on what ranks hold, unchanged."""


@dataclass(slots=True)
class Known:
    """What is known of the elements of a storage that is not computed."""

    mean: float | None = None  # of its elements, None if unknown
    n_values: int = 0  # number of values that its elements are chosen from, 0 if unknown
    load: float = 1.0  # its elements as a multiple of an even share
    is_own: bool = False  # whether each of them is the mean, which this rank has, and has sent to others
    # the one other rank that sent them, if that rank's numbers are unknown; -1 if there is none
    sender: int = -1
    each: Any = None  # the value given for each element if their means differ; shape of the tensor
    is_routed: bool = False  # whether it depends on what routers of experts choose


def share(mean: float, at: int) -> int:
    """Return the whole count at place *at*, where counts have the mean *mean* and are as even as possible.

    >>> [share(2.5, at) for at in range(4)]
    [2, 3, 2, 3]
    """
    # Differences of running totals: the first n counts add up to n times the mean, rounded down.
    return int((at + 1) * mean) - int(at * mean)


def put_together(name: str, args: Sequence[Any], found: Sequence[Known]) -> Known | None:
    """Return what is known of the result of *name*, called with *args*, if *found* is known of its operands.

    None if the result has a single mean, or if nothing is known.
    """
    import torch

    means = [one.mean for one in found if one.mean is not None]
    if len(means) < len(found) or len(set(means)) < 2:
        return None
    counts = [
        makers().tensor([share(mean, at) for at in range(one.numel())]).reshape(one.shape)
        for one, mean in zip(args[0], means, strict=True)
    ]
    each = (torch.cat if name == "aten.cat" else torch.stack)(counts, *args[1:])
    return Known(mean=float(each.double().mean()), load=max(one.load for one in found), each=each)


def made(name: str, args: Sequence[Any], first: Any, result: Any, of: Callable[[Any], Known]) -> Known | None:
    """Return what is known of the *result* of an operator, None if nothing is known."""
    known, n_made = of(first), max(result.numel(), 1)
    n_each = first.numel() / n_made
    mean: float | None = None
    if name in COUNTS:
        mean = n_each if known.n_values else None
    elif name in SCATTERS:
        # The share of places that are written, if none is written twice.
        part = args[2].numel() / n_made
        # Of elements that stay as they were, the mean has to be known, too.
        is_number = len(args) > 3 and isinstance(args[3], int | float) and known.mean is not None
        mean = args[3] * part + (known.mean or 0.0) * (1 - part) if is_number else None
    elif name == "aten.eq":
        mean = 1 / known.n_values if known.n_values else None
    elif known.mean is None:
        return None
    elif name in SUMS:
        return replace(known, mean=known.mean * n_each)
    elif name in ALL_OR_ANY:
        mean = _of_each(name, known.mean, n_each)
    elif result.numel() == 1 and isinstance(args[1], int | float):
        mean = float(known.mean > args[1] if name in ABOVE else known.mean < args[1])
    return None if mean is None else Known(mean=mean)


def _of_each(name: str, share: float, n_each: float) -> float | None:
    """Return whether all, or any, of *n_each* truths hold, of which a *share* holds; None if that varies."""
    if name == "aten.all":
        return 1.0 if share >= 1 else 0.0 if share * n_each <= n_each - 1 else None
    return 0.0 if share <= 0 else 1.0 if share * n_each >= 1 else None


# Operators that choose among columns, as routers choose experts, and what is known of their choices.


EVEN: Final = Loads("zipf:0")
"""The shape of loads of which all experts have the same."""


def asked(name: str, args: Sequence[Any]) -> tuple[int | None, int]:
    """Return the dimension along which the operator *name*, called with *args*, chooses, and how many.

    A dimension of None means: among all elements.

    >>> asked("aten.topk", [None, 2]), asked("aten.argmax", [None]), asked("aten.multinomial", [None, 4])
    ((-1, 2), (None, 1), (-1, 4))
    """
    numbers = [arg for arg in args[1:] if isinstance(arg, int) and not isinstance(arg, bool)]
    if name in {"aten.topk", "aten.multinomial"}:
        return (numbers[1] if name == "aten.topk" and len(numbers) > 1 else -1), numbers[0]
    if name == "aten.sort":
        dim = numbers[0] if numbers else -1
        return dim, int(args[0].shape[dim]) if args[0].dim() else 1
    return (numbers[0] if numbers else None), 1


class Choices:
    """Follows operators that choose.

    Args:
        routing: makes up choices of experts; None if the expert load is one number.

    Attributes:
        inside: returns the module that runs, None outside of all modules.
    """

    def __init__(self, routing: Routing | None) -> None:
        self._routing = routing
        self.inside: Callable[[], Any] = lambda: None
        self.n_routed = 0  # choices of experts of which only even shares are known

    def choose(self, name: str, args: Sequence[Any], results: Sequence[Any], asker: str) -> Known | None:
        """Return what is known of the places that *name* chooses, the last of *results*; None if made up."""
        dim, n_chosen = asked(name, args)
        scores, places = args[0], results[-1]
        if dim is None:  # max makes the largest number then, not its place
            return Known(n_values=int(scores.numel()) if name == "aten.argmax" else 0)
        is_last = dim in (-1, scores.dim() - 1) and scores.is_floating_point() and scores.dim() > 0
        routing = self._routing
        # A script may take any columns of an order: only even choices hold for all of them.
        is_made_up = is_last and routing is not None and (routing.is_even or name != "aten.sort")
        of = scores, places, n_chosen, asker
        if is_made_up and routing is not None and routing.choose(*of, self.inside()):
            return None
        n_values = int(scores.shape[dim]) if scores.dim() else 1
        n_tokens = places.numel() // max(n_chosen, 1)
        is_routed = is_last and routing is None and self._is_routed(n_values, n_tokens)
        self.n_routed += is_routed
        return Known(n_values=n_values, is_routed=is_routed)

    def _is_routed(self, n_values: int, n_tokens: int) -> bool:
        module = self.inside()
        return n_values > 1 and EVEN.is_of(
            n_values, n_tokens, "" if module is None else type(module).__name__
        )

    def need(self, asker: str) -> None:
        """Start the rehearsal again with made-up choices: the line *asker* reads them one by one.

        Raises:
            UnroutedError: choices are to be made up.
        """
        if self._routing is None:
            raise UnroutedError(asker)
