"""Waits for a module to be imported, to change it before anybody has seen it.

Uses the standard library only: it runs in every process of a recorded command.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Telling(Loader):
    """Loads a module as its own loader does, then tells of it."""

    def __init__(self, loader: Loader, tell: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._tell = tell

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Make the module as its own loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, which knows its own loader from here on, then tell of it."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._tell(module)


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
        """Find the expected module as others would, and have its loader tell; know nothing of others.

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
            spec.loader = _Telling(spec.loader, self._loaded)
        return spec

    def _loaded(self, module: ModuleType) -> None:
        self.remove()
        self._tell(module)

    def remove(self) -> None:
        """Expect nothing any more."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
