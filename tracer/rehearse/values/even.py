"""Counts of which only the mean is known, rounded so that each is a whole number and the sum is right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from foretrace.tracer.internals import makers
from foretrace.tracer.rehearse.values.known import Known

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
