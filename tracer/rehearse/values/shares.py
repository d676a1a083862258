"""What is known of the choices of routers: how many there are of each, and what is counted, summed and sent.

A histogram of ``n`` choices over ``e`` experts has ``n / e`` in each bin, or what ``--expert-load`` states.
Such means are followed through the operators that routers consist of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from foretrace.tracer.internals import makers

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
    """What is known of the elements of a storage that is not computed.

    Attributes:
        mean: of its elements, None if unknown.
        n_values: number of values that its elements are chosen from, 0 if unknown.
        load: its elements as a multiple of an even share.
        is_own: whether each of them is the mean, which this rank has, and has sent to others.
        sender: the one other rank that sent them, if that rank's numbers are unknown; -1 if there is none.
        each: the value given for each element if their means differ; shape of the tensor.
        is_routed: whether it depends on what routers of experts choose.
    """

    mean: float | None = None
    n_values: int = 0
    load: float = 1.0
    is_own: bool = False
    sender: int = -1
    each: Any = None
    is_routed: bool = False


def share(mean: float, at: int) -> int:
    """Return the whole count at place *at*, where counts have the mean *mean* and are as even as possible.

    >>> [share(2.5, at) for at in range(4)]
    [2, 3, 2, 3]
    """
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
    """Return what is known of the *result* of an operator, None if nothing is known.

    Args:
        name: of the operator, one of ``OF_MEANS``.
        args: its arguments.
        first: the first tensor among them.
        result: its result.
        of: returns what is known of a tensor.
    """
    known, n_made = of(first), max(result.numel(), 1)
    n_each = first.numel() / n_made
    mean: float | None = None
    if name in COUNTS:
        mean = n_each if known.n_values else None
    elif name in SCATTERS:
        part = args[2].numel() / n_made
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
