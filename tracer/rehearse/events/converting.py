"""Writes down, after a convolution, the conversions of memory layout that a library makes around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer.rehearse.operators.pricing import Pricing
from foretrace.tracer.rehearse.values.questions import Kernel

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.session import RehearsalSession

CONVOLUTIONS: Final = frozenset({"aten.convolution", "aten.convolution_backward"})
"""Operators around whose products tensors may be converted."""


def converting(
    session: RehearsalSession,
    pricing: Pricing,
    name: str,
    handler: Kernel,
    is_ours: Callable[[tuple[Any, ...], dict[str, Any], Any], bool],
) -> Kernel:
    """Return the handler of the convolution *name* with its conversions.

    Args:
        session: the rehearsal.
        pricing: finds the work of calls.
        name: of the operator.
        handler: handles the convolution itself.
        is_ours: whether a call is one of the device.
    """
    host, tape, position, fused = session.host, session.tape, session.position, session.fused

    def handled(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = handler(func, args, kwargs)
        is_host = bool(host.part(name, args, out))
        is_chosen = fused.is_used and fused.is_inside()  # a compiler lets all tensors be in that layout
        if position.step >= 0 and not is_host and not is_chosen and is_ours(args, kwargs, out):
            number = pricing.conversion(name, func, args, kwargs, out)
            if number >= 0:
                tape.op(number)
        return out

    return handled
