"""In what type a model computes, as the products that it has run tell.

Types of parameters do not say: a model may enter autocast inside of its call, and what FSDP was told may be
overridden. The nodes of the autograd graph that a call leaves are the operators that ran.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, Final

from foretrace.tracer import internals
from foretrace.tracer.shape import short_name

PRODUCTS: Final = frozenset(
    f"{name}Backward0"
    for name in (
        "Addmm",
        "Mm",
        "Bmm",
        "Baddbmm",
        "Addbmm",
        "Addmv",
        "Mv",
        "Linear",
        "Convolution",
        "GroupedMm",
    )
)
"""Nodes of products, most of the work of a model."""

MOST_VALUES: Final = 64
"""Values of what a model returns that are looked at."""

MOST_NODES: Final = 20_000
"""Nodes of a graph that are looked at: a layer of a transformer has some 50."""


class Precision:
    """Models of which the next call tells in what type they compute.

    Args:
        told: called with the name of the type, as layouts write it, once a call has told.

    Attributes:
        awaited: the models, by identity; mostly empty, and looked at with each call of a module.
    """

    def __init__(self, told: Callable[[str], None]) -> None:
        self._told = told
        self.awaited: dict[int, weakref.ref[Any]] = {}

    def expect(self, model: Any) -> None:
        """The call of *model* that begins will tell."""
        self.awaited[id(model)] = weakref.ref(model)

    def ran(self, module: Any, output: Any) -> None:
        """The call of a module is over, and has returned *output*, None if it has failed."""
        if (expected := self.awaited.pop(id(module), None)) is None or expected() is not module:
            return
        if (dtype := computed_in(output)) is not None:
            self._told(short_name(dtype))


def computed_in(values: Any) -> Any:
    """Return the ``torch.dtype`` of most products behind the tensors among *values*.

    Args:
        values: what a call of a model has returned: a tensor, or a tuple, list or dict of them.

    Returns:
        None if no product is seen, as behind the one node of a compiled graph.
    """
    from torch import Tensor

    todo = deque(value.grad_fn for value in _first(values) if isinstance(value, Tensor))
    seen: set[Any] = set()
    found: Counter[Any] = Counter()
    while todo and len(seen) < MOST_NODES:
        node = todo.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (dtype := _product(node)) is not None:
            found[dtype] += 1
        todo.extend(before for before, _ in node.next_functions)
    return found.most_common(1)[0][0] if found else None


def _first(values: Any) -> Iterable[Any]:
    """Return the first of *values*, without a word of code of a class that somebody has made of a list."""
    if isinstance(values, dict):
        return islice(dict.values(values), MOST_VALUES)
    for kind in (list, tuple):
        if isinstance(values, kind):
            return kind.__getitem__(values, slice(MOST_VALUES))  # type: ignore[index]
    return (values,)


def _product(node: Any) -> Any:
    """Return in what type the product of *node* is, None if it is of something else.

    A part of a model that will be recomputed has left no nodes, but remembers its autocast.
    """
    name = type(node).__name__
    if name in PRODUCTS:
        return internals.made(node)
    return internals.autocast_kept(node) if name == internals.CHECKPOINT else None
