"""What may be known of the elements of a tensor that is not computed, and the operators that tell it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

COUNTS: Final = frozenset({"aten.histc", "aten.bincount"})
"""Operators that count elements by value."""

CHOOSES: Final = frozenset({"aten.topk", "aten.argmax", "aten.max", "aten.multinomial", "aten.sort"})
"""Operators whose last result is a place along a dimension of their first operand."""

SUMS: Final = frozenset({"aten.sum", "aten.count_nonzero"})

SCATTERS: Final = frozenset({"aten.scatter", "aten.scatter_"})


DEFAULTS: Final[Mapping[type, Any]] = {complex: 1 + 0j, float: 1.0, int: 1, bool: False}
"""What a number is taken to be of which nothing is known."""

EXCHANGE: Final = "_c10d_functional.all_to_all_single"
"""Operator by which ranks tell each other how many tokens they will send."""


@dataclass(slots=True)
class Known:
    """What is known of the elements of a storage.

    Attributes:
        mean: of its elements, None if unknown.
        n_values: number of values that its elements are chosen from, 0 if unknown.
        load: its elements as a multiple of an even share.
        is_own: whether these are numbers that this rank has, and has sent to others.
        sender: the one other rank that sent them, if that rank's numbers are unknown; -1 if there is none.
        is_drawn: whether they are drawn evenly from 0 to 1.
        is_normal: whether they are drawn from the standard normal distribution.
        each: the value given for each element if their means differ; shape of the tensor.
        is_routed: whether it depends on what routers of experts choose.
        is_across: whether these are choices along another side than the last, as classes of the points of a
            picture are: of no expert.
        is_positive: of truths that compare numbers with a bound next to zero, what they are of positive
            numbers; None of other tensors.
    """

    mean: float | None = None
    n_values: int = 0
    load: float = 1.0
    is_own: bool = False
    sender: int = -1
    is_drawn: bool = False
    is_normal: bool = False
    each: Any = None
    is_routed: bool = False
    is_across: bool = False
    is_positive: bool | None = None
