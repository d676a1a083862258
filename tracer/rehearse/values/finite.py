"""Checks whether unknown numbers are finite: they are, as in a training that goes well.

Otherwise a script that skips a step, or stops, if a loss or a gradient is not finite would get an answer that
depends on how it asks. Pure functions of arguments; this module does not import torch.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

NEVER: Final = frozenset({"aten.isnan", "aten.isinf", "aten.isposinf", "aten.isneginf"})
"""Operators that are true of numbers that are not finite only."""

COMPARED: Final[Mapping[str, Callable[[float, float], bool]]] = {
    f"aten.{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
"""Operators by which numbers are compared: with themselves, or with infinity."""

NEGATES: Final = frozenset({"aten.logical_not", "aten.bitwise_not"})
BOTH: Final = frozenset({"aten.mul", "aten.logical_and", "aten.bitwise_and", "aten.all", "aten._is_all_true"})
EITHER: Final = frozenset({"aten.logical_or", "aten.bitwise_or", "aten.any", "aten._is_any_true"})

JOINS: Final = NEGATES | BOTH | EITHER
"""Operators on truths: the truth of their results follows from that of all elements of their operands."""

CHECKS: Final = NEVER | frozenset(COMPARED)


def truth_of(name: str, args: Sequence[Any]) -> float | None:
    """Return whether the check *name* of *args* is true (1) or false (0) for finite numbers.

    None if it is no such check. Comparing a number with itself, or with infinity, is such a check.
    """
    if name in NEVER:
        return 0.0
    if name not in COMPARED or len(args) < 2:
        return None
    one, other = args[:2]
    if one is other or are_same(one, other):
        return float(COMPARED[name](0.0, 0.0))
    return float(COMPARED[name](0.0, other)) if isinstance(other, float) and math.isinf(other) else None


def joined(name: str, truths: Sequence[float | None]) -> float | None:
    """Return the result of *name* on operands that are these *truths* (1, 0, None: unknown); None if unknown.

    >>> joined("aten.any", [0.0]), joined("aten.mul", [1.0, None]), joined("aten.logical_or", [1.0, None])
    (0.0, None, 1.0)
    """
    if name in NEGATES:
        return None if truths[0] not in {0.0, 1.0} else 1.0 - float(truths[0] or 0.0)
    decides = 0.0 if name in BOTH else 1.0
    if decides in truths:
        return decides
    return 1.0 - decides if all(truth == 1.0 - decides for truth in truths) else None


def are_same(one: Any, other: Any) -> bool:
    """Whether two tensors are the same elements of the same storage, as two selections of one loss."""
    if not (hasattr(one, "untyped_storage") and hasattr(other, "untyped_storage")):
        return False
    return (
        one.untyped_storage()._cdata == other.untyped_storage()._cdata  # noqa: SLF001 - tells storages apart
        and one.storage_offset() == other.storage_offset()
        and (one.shape, one.stride()) == (other.shape, other.stride())
    )
