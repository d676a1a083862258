"""Strict exports of ``torch.export``, which refuse modules that have global hooks: ours go meanwhile."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from foretrace.tracer.modules import ModuleHook
    from foretrace.tracer.session import Session

EXPORTING: Final = "torch.export._trace"
"""Module of exports; takes a while to import, and most trainings never do."""

STRICT: Final = "_export_to_torch_ir"
"""Private function in it that traces a module strictly, from torch 2.6 to 2.15."""


class ExportHook:
    """The function that traces a module strictly, without hooks of ours in its way.

    Args:
        session: the recording.
        modules: the hooks, which are global ones.
    """

    def __init__(self, session: Session, modules: ModuleHook) -> None:
        self._owner: Any = sys.modules[EXPORTING]
        self._original = original = getattr(self._owner, STRICT, None)
        if original is None:  # another torch
            return

        @functools.wraps(original)
        def export(*args: Any, **kwargs: Any) -> Any:
            modules.unwatch()
            try:
                return original(*args, **kwargs)
            finally:
                if not session.is_closed:  # meanwhile
                    modules.watch()

        setattr(self._owner, STRICT, export)

    def remove(self) -> None:
        """Give the function back as it was."""
        if self._original is not None:
            setattr(self._owner, STRICT, self._original)
