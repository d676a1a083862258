"""Takes the place of ``torch.compile``: what it is given runs as it is written and counts as if fused."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, Final

from foretrace.tracer import internals
from foretrace.tracer.rehearse.replacing import replaces, when_imported
from foretrace.tracer.rehearse.session import RehearsalSession

FUSES: Final = (None, "inductor")
"""Compilers that fuse kernels, by the name under which they are asked for; others run what is written."""


def install(session: RehearsalSession) -> None:
    """Leave compilation out, and say so: of a function once it is called, as libraries decorate theirs."""
    import torch

    left_out = _LeftOut(session)
    replaces(torch, name="compile")(lambda _, *args, **kwargs: left_out.compiled(*args, **kwargs))
    torch.nn.Module.compile = lambda self, *_, **kwargs: left_out.mark(self, kwargs.get("backend"))

    @replaces(torch.compiler)
    def disable(original: Any, fn: Any = None, recursive: bool = True, **kwargs: Any) -> Any:  # noqa: FBT001, FBT002
        """End a graph at a function that is given, and begin the next one behind it.

        Modules, and functions that leave out themselves alone (``recursive=False``), count as compiled.
        """
        if fn is None:
            return functools.partial(torch.compiler.disable, recursive=recursive, **kwargs)
        found = original(fn, recursive, **kwargs)
        if not recursive or not isinstance(fn, FunctionType | MethodType):
            return found

        @functools.wraps(fn)
        def outside(*args: Any, **kwargs: Any) -> Any:
            return session.fused.outside(lambda: found(*args, **kwargs))

        return outside

    def break_graphs(dynamo: Any) -> None:
        dynamo.graph_break = lambda *_, **__: session.fused.outside(lambda: None)

    when_imported(internals.DYNAMO, break_graphs)


class _LeftOut:
    """What stands in for the compiler."""

    def __init__(self, session: RehearsalSession) -> None:
        self._session = session

    def tell(self, backend: Any) -> None:
        """Say that the compiler *backend* is not run, and what is counted."""
        how = "as the kernels that the compiler would fuse" if backend in FUSES else "as in eager mode"
        held = "as its graphs would hold it" if backend in FUSES else "too"
        self._session.warn(
            f"torch.compile is not run: element-wise work of what it compiles is counted {how}, memory {held}"
        )

    def mark(self, module: Any, backend: Any) -> None:
        """Count *module* as compiled."""
        self.tell(backend)
        if backend in FUSES:
            self._session.fused.add(module)

    def compiled(self, model: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return what ``torch.compile`` returns: *model* counted as compiled, or what takes one."""
        import torch

        backend = kwargs.get("backend")
        if model is None:
            return functools.partial(self.compiled, **kwargs)
        if kwargs.get("disable"):
            return model
        if isinstance(model, torch.nn.Module):
            self.mark(model, backend)
            return wrapper()(model)
        if isinstance(model, type):
            self.tell(backend)
            return model
        return self._called(model, backend)

    def _called(self, function: Callable[..., Any], backend: Any) -> Callable[..., Any]:
        """Return *function* as it counts when it is called."""

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            self.tell(backend)
            if backend not in FUSES:
                return function(*args, **kwargs)
            return self._session.fused.function(lambda: function(*args, **kwargs))

        return called


@functools.cache
def wrapper() -> Callable[[Any], Any]:
    """Return what wraps a module as ``torch.compile`` does: scripts ask for ``_orig_mod``, or its type."""

    class OptimizedModule(internals.compiled_module()):  # type: ignore[misc]  # torch is untyped here
        """Calls the module as it is, without the tables that tell what can be compiled."""

        def _initialize(self) -> None:
            self.forward = self._orig_mod.__call__

    def wrapped(module: Any) -> Any:
        warnings.filterwarnings("ignore", "Using `torch.compile")  # hooks of all modules, which are ours
        return OptimizedModule(module, None)

    return wrapped
