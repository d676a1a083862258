"""Puts functions of a rehearsal in the place of those of torch and of libraries."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

from foretrace.tracer.importing import Expectation


def replaces(*owners: Any, name: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what puts a function in the place of the one of its *name* in *owners*, which it is given first.

    >>> from types import SimpleNamespace
    >>> module = SimpleNamespace(double=lambda n: 2 * n)
    >>> @replaces(module)
    ... def double(original, n):
    ...     return original(n) + 1
    >>> module.double(3)
    7
    """

    def put(function: Callable[..., Any]) -> Callable[..., Any]:
        called = name or function.__name__
        original = getattr(owners[0], called)
        # Python names a function in its errors, and NumPy reads those of ``__array__``.
        if isinstance(function, FunctionType):
            function.__qualname__ = str(getattr(original, "__qualname__", called))

        @functools.wraps(original)
        def instead(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        for owner in owners:
            setattr(owner, called, instead)
        return instead

    return put


def when_imported(name: str, change: Callable[[Any], None]) -> None:
    """Change the module *name* now, or once it is imported."""
    if name in sys.modules:
        change(sys.modules[name])
    else:
        Expectation(name, change)
