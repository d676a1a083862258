"""Which lookups of tables a pass adds to each other: words and their kinds are one text, not two."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from foretrace.tracer.rehearse.operators.calls import storage_key, tensors_in

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.events.embedded import Lookup
    from foretrace.tracer.rehearse.session import RehearsalSession
    from foretrace.tracer.rehearse.values.questions import Kernel


class Sums:
    """What was looked up, and which of it is in one sum.

    A tensor is known by its storage as long as it lives: a later one may have the same.
    """

    def __init__(self) -> None:
        self._parts: dict[int, tuple[weakref.ref[Any], frozenset[int]]] = {}  # by storage: numbers of lookups
        self._sums: list[frozenset[int]] = []

    def looked_up(self, number: int, out: Any) -> None:
        """The lookup *number* has returned *out*."""
        own = getattr(out, "_local_tensor", out)
        self._parts[storage_key(own)] = weakref.ref(own), frozenset({number})

    def added(self, operands: Any, out: Any) -> None:
        """The tensors among *operands* were added to *out*."""
        if not self._parts:
            return
        found = [self._of(one) for one in tensors_in(operands)]
        together = frozenset[int]().union(*found)
        if not together:
            return
        self._parts[storage_key(out)] = weakref.ref(out), together
        if sum(map(bool, found)) > 1:
            self._sums.append(together)

    def apart(self, lookups: Sequence[Lookup]) -> list[Lookup]:
        """Return *lookups* without those that are added to an earlier one of the same table and shape.

        What is added place by place belongs to the same places, as the kinds of tokens that a model looks up
        in the table of its words.
        """
        extra: set[int] = set()
        for together in self._sums:
            seen: set[tuple[int, tuple[int, ...]]] = set()
            for number in sorted(together):
                what = lookups[number].table, lookups[number].shape
                if what in seen:
                    extra.add(number)
                seen.add(what)
        return [one for number, one in enumerate(lookups) if number not in extra]

    def _of(self, tensor: Any) -> frozenset[int]:
        whose, parts = self._parts.get(storage_key(tensor), (None, frozenset[int]()))
        return parts if whose is not None and whose() is not None else frozenset()


def adding(session: RehearsalSession, handler: Kernel) -> Kernel:
    """Return the *handler* of an addition, of which ``session.learning`` is told."""

    def added(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = handler(func, args, kwargs)
        session.learning.added(args, out)
        return out

    return added
