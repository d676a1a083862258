"""Numbers of which only the sign is known: a norm is not negative, nor is what is made of norms alone.

Libraries write -1 over a norm that is not finite, and ask for numbers below zero later.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from foretrace.tracer.rehearse.tape.calls import storage_key, tensors_in

MADE: Final = frozenset(
    {"aten.linalg_vector_norm", "aten._foreach_norm", "aten.norm", "aten.abs", "aten.square"}
)
"""Operators that make no negative number."""

OF_ONE: Final = frozenset(
    {
        "aten.sum", "aten.mean", "aten.max", "aten.amax", "aten.pow", "aten.pow_", "aten.sqrt", "aten.stack",
        "aten.cat", "aten.clone", "aten._to_copy", "_c10d_functional.all_reduce",
        "_c10d_functional.all_gather_into_tensor", "_c10d_functional.wait_tensor",
    }
)  # fmt: skip
"""Operators that make no negative number if there is none in their first operand."""

OF_TWO: Final = frozenset({"aten.add", "aten.add_", "aten.mul", "aten.mul_", "aten.div", "aten.div_"})
"""Operators that make none if there is none in their first two operands."""

OF_THREE: Final = frozenset({"aten.where", "aten.masked_fill", "aten.masked_fill_"})
"""Operators by whose truths, among their operands, elements are picked."""

SIGNED: Final = MADE | OF_ONE | OF_TWO | OF_THREE | {"aten.copy_"}
"""Operators of whose results something may be known."""


def follows(compare: Callable[[Any, Any], bool], bound: float) -> bool | None:
    """Return how a number that is not negative compares with *bound*; None if that says nothing of it.

    >>> follows(operator.lt, 0.0), follows(operator.gt, 0.0), follows(operator.eq, -1.0)
    (False, None, False)
    """
    if bound < 0:
        return compare(0.0, bound)
    return compare is operator.ge if bound == 0 and compare in {operator.lt, operator.ge} else None


class Signs:
    """Tensors without a negative element.

    Args:
        mean_of: returns the mean of a tensor's elements, None if unknown.
    """

    def __init__(self, mean_of: Callable[[Any], float | None]) -> None:
        self._mean_of = mean_of
        self._held: dict[int, Any] = {}  # storages, by their keys

    def holds(self, value: Any) -> bool:
        """Whether *value*, a number, a tensor or several, is not negative."""
        if isinstance(value, list | tuple):
            return all(map(self.holds, value))
        if not hasattr(value, "untyped_storage"):
            return type(value) in {int, float} and value >= 0
        if storage_key(value) in self._held:
            return True
        mean = self._mean_of(value) if value.numel() == 1 else None
        return mean is not None and mean >= 0

    def are_made(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether the operator *name*, called with these arguments, makes no negative number."""
        if name in MADE or not self._held:
            return name in MADE
        if name in OF_ONE:
            return self.holds(args[0])
        if name in OF_TWO:
            return self.holds([*args[:2], kwargs.get("alpha", 1)])
        if name == "aten.copy_":
            return self.holds(args[1])
        truth, where_false, where_true = (
            args[at] for at in ((0, 2, 1) if name == "aten.where" else (1, 0, 2))
        )
        mean = self._mean_of(truth)
        return (mean == 1.0 or self.holds(where_false)) and (mean == 0.0 or self.holds(where_true))

    def keep(self, out: Any) -> None:
        """Keep that no element of the tensors in *out* is negative; nothing is said of parts of a storage."""
        for tensor in tensors_in(out):
            storage = tensor.untyped_storage()
            if storage.nbytes() == tensor.numel() * tensor.element_size():
                key = storage_key(tensor)
                self._held[key] = weakref.ref(storage, partial(self._gone, key))

    def _gone(self, key: int, _: Any) -> None:
        self.drop(key)

    def drop(self, key: int) -> None:
        """Forget what is known of the storage with this *key*."""
        self._held.pop(key, None)
