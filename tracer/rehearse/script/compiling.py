"""Takes the place of ``torch.compile``: what is compiled runs as it is written."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracer.rehearse.session import RehearsalSession


def install(session: RehearsalSession) -> None:
    """Leave compilation out, and say so: of a function once it is called, as libraries decorate theirs."""
    import torch

    def left_out() -> None:
        session.warn(
            "torch.compile is left out: kernels are those of eager mode, so that element-wise work takes "
            "longer than fused and the host has more to launch"
        )

    @functools.wraps(torch.compile)
    def compiled(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        if model is None:
            return compiled
        if isinstance(model, torch.nn.Module | type):
            left_out()
            return model

        @functools.wraps(model)
        def called(*args: Any, **kwargs: Any) -> Any:
            left_out()
            return model(*args, **kwargs)

        return called

    def in_place(self: Any, *args: Any, **kwargs: Any) -> None:
        del self, args, kwargs
        left_out()

    anywhere: Any = torch
    anywhere.compile = compiled
    anywhere.nn.Module.compile = in_place
