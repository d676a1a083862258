"""Implementations of operators in Python that leave nothing behind when they are taken back.

torch keeps the last function of Python that was registered for an operator and a key in a table of its own
(``python_registrations_`` in ``torch/csrc/utils/python_dispatch.cpp``), and never lets go of it: not when its
``Library`` is destroyed, not when Python ends. With it lives all that it refers to. Where that led to the
process groups of the training, gloo's threads outlived Python, and ran on while the process took C++ apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from foretrace.tracer import internals

FIRST: Final = "BackendSelect"
"""The dispatch key at which a call is seen first."""


class Implementations:
    """Functions that see the calls of operators of one namespace first, and pass them on.

    Args:
        namespace: e.g. ``"c10d"``.
    """

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._overloads: list[Any] = []
        self._library = _library(namespace)

    def add(self, overload: Any, kernel: Callable[..., Any]) -> None:
        """Have *kernel* called in place of *overload*, with the keys of the call before its arguments."""
        self._library.impl(overload, kernel, FIRST, with_keyset=True)
        self._overloads.append(overload)

    def remove(self) -> None:
        """Give the operators back as they were, and have torch forget the functions."""
        internals.destroy_library(self._library)
        last = _library(self._namespace)
        for overload in self._overloads:
            last.impl(overload, _passing(overload), FIRST, with_keyset=True)
        internals.destroy_library(last)


def _library(namespace: str) -> Any:
    import torch

    return torch.library.Library(namespace, "IMPL")


def _passing(overload: Any) -> Callable[..., Any]:
    """Return what passes a call on, and knows of nothing else: what torch keeps."""
    redispatch, after = internals.redispatch(overload), internals.keys_after_backend_select()

    def kernel(keyset: Any, /, *args: Any, **kwargs: Any) -> Any:
        return redispatch(keyset & after, *args, **kwargs)

    return kernel
