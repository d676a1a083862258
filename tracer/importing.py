"""Waits for a module to be imported, to change it before anybody has seen it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

MACHINERY: Final = "<frozen importlib._bootstrap_external>"
"""File of calls that Python leaves out of tracebacks."""


class Expectation(MetaPathFinder):
    """Steps in once, when the module *name* is first imported, and calls *tell* with it.

    Args:
        name: full name of a module that is not imported yet.
        tell: called when the module has run, before the one that imports it goes on; must not raise.
    """

    def __init__(self, name: str, tell: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._tell = tell
        self._is_finding = False
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the expected module as others would, and see its loader run it; know nothing of others.

        Some only ask whether there is such a module: it is expected until it has been loaded.
        """
        if fullname != self._name or self._is_finding:
            return None
        self._is_finding = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_finding = False
        if spec is not None and spec.loader is not None:
            self._see(spec.loader)
        return spec

    def _see(self, loader: Any) -> None:
        """Be told when *loader*, which is that of one module, has run it; nothing else about it changes."""
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # While its module runs the loader is as it was.
            del loader.exec_module
            run(module)
            self.remove()
            try:
                self._tell(module)
            except BaseException as error:  # Ctrl-C
                raise error.with_traceback(None)  # noqa: B904

        # An import that fails, or is interrupted, shows no call of Python's own machinery: nor this one.
        exec_module.__code__ = exec_module.__code__.replace(co_filename=MACHINERY)
        loader.exec_module = exec_module

    def remove(self) -> None:
        """Expect nothing any more."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
