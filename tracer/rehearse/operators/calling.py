"""Facts about a model call that no operator shows: its parameters, and whether it has gradients."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from foretrace.tracer.rehearse.operators.calls import parts_of
from foretrace.tracer.wrapped import inside

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.session import RehearsalSession


def watch_functions(session: RehearsalSession) -> None:
    """Remember whether an autograd function has gradients: inside it, gradients are turned off."""
    import torch

    kind: Any = torch.autograd.Function
    original, lane = inspect.getattr_static(kind, "apply"), session.lane  # in C since torch 2.15

    def apply(own: Any, /, *args: Any, **kwargs: Any) -> Any:
        before, lane.applies = lane.applies, session.has_gradients()
        try:
            return original.__get__(None, own)(*args, **kwargs)
        finally:
            lane.applies = before

    kind.apply = classmethod(apply)


def count_parameters(session: RehearsalSession, model: Any) -> None:
    """Count the parameters and buffers of *model*: no operator has made those that were copied."""
    for one in (*model.parameters(), *inside(model).buffers()):
        for part in parts_of(one):
            memory = session.host.memory if session.host.holds(part) else session.memory
            memory.add(part.untyped_storage(), "parameters")
