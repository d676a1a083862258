"""What comes with an operator besides its kernel: writes of what it reads or keeps, waits of the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer.rehearse.events.summed import adding
from foretrace.tracer.rehearse.events.tape import HOST_WAIT
from foretrace.tracer.rehearse.gpu.fused import ACCUMULATING
from foretrace.tracer.rehearse.values.questions import Kernel

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.session import RehearsalSession


def reading(session: RehearsalSession, handler: Kernel) -> Kernel:
    """Return the *handler* of a communication, which reads what compiled kernels then have to write."""
    fused, position = session.fused, session.position

    def read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if fused.is_used and position.step >= 0:
            fused.used(args)
        return handler(func, args, kwargs)

    return read


def keeping(session: RehearsalSession, handler: Kernel) -> Kernel:
    """Return the *handler* of what autograd does with a gradient of a parameter that it keeps as it is."""
    fused = session.fused

    def kept(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if fused.is_used and fused.inside() == ACCUMULATING:
            fused.memory.keeps(args[0])
        return handler(func, args, kwargs)

    return kept


def grouping(session: RehearsalSession, handler: Kernel) -> Kernel:
    """Return the *handler* of products of experts: other than in bf16 the host asks where each begins."""
    import torch

    def grouped(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args[0].dtype != torch.bfloat16 and session.position.step >= 0:
            session.tape.note(HOST_WAIT)
        return handler(func, args, kwargs)

    return grouped


AROUND: Final[Mapping[str, Callable[[RehearsalSession, Kernel], Kernel]]] = MappingProxyType(
    {"aten._grouped_mm": grouping, "aten.add": adding, "aten.add_": adding}
)
"""What comes with operators that compute."""
