"""Handlers of operators that also keep track of known numbers: computed, or forgotten where overwritten."""
# ruff: noqa: SLF001 - this module asks operators what they do

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foretrace.tracer.rehearse.operators.calls import tensors_in
from foretrace.tracer.rehearse.values.computed import FOLLOWED, is_followed

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.values.questions import Kernel
    from foretrace.tracer.rehearse.values.stated import Stated


def following(known: Stated, name: str, func: Any, handler: Kernel) -> Kernel:
    """Return *handler*, which then also updates what is *known* of the operator's numbers.

    Args:
        known: of the tensors of the rehearsal.
        name: of the operator without its overload.
        func: the operator.
        handler: of its calls.
    """
    is_written = func._schema.is_mutable
    if name in FOLLOWED or is_followed(name, func):
        handler = _learning(known, name, handler)
        return _without_mean(known, handler) if is_written else handler
    return _forgetting(known, func._schema, handler) if is_written else handler


def _learning(known: Stated, name: str, handler: Kernel) -> Kernel:
    """Return *handler* with numbers followed through the operator *name*."""
    follow, choices = known.numbers.follow, known.choices

    def learning(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = handler(func, args, kwargs)
        follow(name, func, args, kwargs, out)
        if choices.n_routed:
            known.taint(args, out)
        return out

    return learning


def _without_mean(known: Stated, handler: Kernel) -> Kernel:
    """Return *handler* of an operator that writes numbers over others, whose mean says nothing any more."""

    def without_mean(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        known.forget_mean(tensors_in(kwargs["out"] if "out" in kwargs else args[:1]))
        return handler(func, args, kwargs)

    return without_mean


def _forgetting(known: Stated, schema: Any, handler: Kernel) -> Kernel:
    """Return *handler* of an operator that writes to operands, of which nothing is known any more.

    Those are the operands that its *schema* marks; places and lengths that it only reads stay known.
    """
    named = [(at, one.name) for at, one in enumerate(schema.arguments) if _is_written(one)]

    def forgetting(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for at, name in named:
            written = args[at] if at < len(args) else kwargs.get(name)
            known.forget(tensors_in((written,)))
        return handler(func, args, kwargs)

    return forgetting


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write
