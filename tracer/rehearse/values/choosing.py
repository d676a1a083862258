"""Operators that choose among columns, as routers choose experts, and what is known of their choices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from foretrace.tracer.rehearse.errors import UnroutedError
from foretrace.tracer.rehearse.values.loads import Loads
from foretrace.tracer.rehearse.values.routing import Routing
from foretrace.tracer.rehearse.values.shares import Known

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
        asks: whether the rehearsal starts again with made-up choices if the script reads them.

    Attributes:
        inside: returns the module that runs, None outside of all modules.
        n_routed: choices of experts of which only even shares are known.
    """

    def __init__(self, routing: Routing | None, *, asks: bool = False) -> None:
        self._routing, self.asks = routing, asks
        self.inside: Callable[[], Any] = lambda: None
        self.n_routed = 0

    def choose(self, name: str, args: Sequence[Any], results: Sequence[Any], asker: str) -> Known | None:
        """Return what is known of the places that *name* chooses, the last of *results*; None if made up."""
        dim, n_chosen = asked(name, args)
        scores, places = args[0], results[-1]
        if dim is None:  # max makes the largest number then, not its place
            return Known(n_values=int(scores.numel()) if name == "aten.argmax" else 0)
        is_last = dim in (-1, scores.dim() - 1) and scores.is_floating_point() and scores.dim() > 0
        routing = self._routing
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
        if self._routing is None and self.asks:
            raise UnroutedError(asker)
