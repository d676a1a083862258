"""Takes the place of ``torch.compile``: what it is given runs as it is written and counts as if fused."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Final

from tracer.importing import Expectation

if TYPE_CHECKING:
    from tracer.rehearse.session import RehearsalSession

FUSES: Final = (None, "inductor")
"""Compilers that fuse kernels, by the name under which they are asked for; others run what is written."""


DYNAMO: Final = "torch._dynamo"
"""Where torch has its compiler; it takes long to load."""


def install(session: RehearsalSession) -> None:
    """Leave compilation out, and say so: of a function once it is called, as libraries decorate theirs."""
    import torch

    def left_out(backend: Any) -> None:
        how = "as the kernels that the compiler would fuse" if backend in FUSES else "as in eager mode"
        held = "as its graphs would hold it" if backend in FUSES else "too"
        session.warn(
            f"torch.compile is not run: element-wise work of what it compiles is counted {how}, memory {held}"
        )

    def marked(module: Any, backend: Any) -> None:
        left_out(backend)
        if backend in FUSES:
            session.fused.add(module)

    @functools.wraps(torch.compile)
    def compiled(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        backend = kwargs.get("backend")
        if model is None:
            return functools.partial(compiled, **kwargs)
        if kwargs.get("disable"):
            return model
        if isinstance(model, torch.nn.Module):
            marked(model, backend)
            return wrapper()(model)
        if isinstance(model, type):
            left_out(backend)
            return model

        @functools.wraps(model)
        def called(*args: Any, **kwargs: Any) -> Any:
            left_out(backend)
            if backend not in FUSES:
                return model(*args, **kwargs)
            return session.fused.function(lambda: model(*args, **kwargs))

        return called

    def in_place(self: Any, *args: Any, **kwargs: Any) -> None:
        del args
        marked(self, kwargs.get("backend"))

    anywhere: Any = torch
    anywhere.compile = compiled
    anywhere.compiler.disable = _disabling(session, anywhere.compiler.disable)
    _breaking(session)
    anywhere.nn.Module.compile = in_place


def _disabling(session: RehearsalSession, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``torch.compiler.disable``: a function that it is given ends a graph, and the next one begins.

    Modules, and functions that leave out themselves alone (``recursive=False``), count as compiled.
    """

    @functools.wraps(original)
    def disable(fn: Any = None, recursive: bool = True, **kwargs: Any) -> Any:  # noqa: FBT001, FBT002 - torch's
        if fn is None:
            return functools.partial(disable, recursive=recursive, **kwargs)
        found = original(fn, recursive, **kwargs)
        if not recursive or not isinstance(fn, FunctionType | MethodType):
            return found

        @functools.wraps(fn)
        def outside(*args: Any, **kwargs: Any) -> Any:
            return session.fused.outside(lambda: found(*args, **kwargs))

        return outside

    return disable


def _breaking(session: RehearsalSession) -> None:
    """Let ``torch._dynamo.graph_break`` end a graph, once somebody has loaded torch's compiler."""

    def install(dynamo: Any) -> None:
        dynamo.graph_break = lambda *_, **__: session.fused.outside(lambda: None)

    if (loaded := sys.modules.get(DYNAMO)) is not None:
        install(loaded)
    else:
        Expectation(DYNAMO, install)


@functools.cache
def wrapper() -> Callable[[Any], Any]:
    """Return what wraps a module as ``torch.compile`` does: scripts ask for ``_orig_mod``, or its type."""
    from torch._dynamo import eval_frame

    class OptimizedModule(eval_frame.OptimizedModule):  # type: ignore[misc]  # torch is untyped here
        """Calls the module as it is, without the tables that tell what can be compiled."""

        def _initialize(self) -> None:
            self.forward = self._orig_mod.__call__

    def wrapped(module: Any) -> Any:
        warnings.filterwarnings("ignore", "Using `torch.compile")  # hooks of all modules, which are ours
        return OptimizedModule(module, None)

    return wrapped
