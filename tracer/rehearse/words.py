"""Says in one line why a script cannot be rehearsed: which part of it, which operator, and what to do."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Final

DEPENDS: Final = frozenset({"DataDependentOutputException", "DynamicOutputShapeException"})
"""Errors of fake tensors where an operator needs numbers."""

UNSUPPORTED: Final = frozenset({"UnsupportedOperatorException", "UnsupportedFakeTensorException"})
"""Errors of fake tensors where nobody has said what an operator makes."""

OURS: Final = str(Path(__file__).parents[1]) + os.sep
LIBRARIES: Final = ("/site-packages/torch/", "/dist-packages/torch/")
"""Parts of the paths of files that are not of a script."""

STUB: Final = "--stub, docs/rehearse.md section 6"


def explain(error: BaseException, spec: Mapping[str, Any]) -> str:
    """Return what went wrong, for a person who knows the script.

    Args:
        error: what was raised.
        spec: what was to be done; ``log`` names the file that has the whole story.
    """
    kind, where = type(error).__name__, place(error)
    if kind in DEPENDS:
        operator = getattr(error, "func", "an operator")
        return (
            f"{where}: {operator} needs numbers, which a rehearsal does not have; say in a stub file what "
            f"it makes ({STUB})"
        )
    if kind in UNSUPPORTED or "fake impl" in str(error) or "register_fake" in str(error):
        found = re.search(r"\w+::\w+", f"{getattr(error, 'func', '')} {error}")
        operator = found[0] if found else str(getattr(error, "func", "of the script"))
        return (
            f"{where}: nobody has said what the custom operator {operator} makes; in a stub file ({STUB}): "
            f'@torch.library.register_fake("{operator}") def _(x, ...): return torch.empty_like(x)'
        )
    words = " ".join(str(error).split())[:200]
    return f"{where}: {kind}: {words}; all of it is in {spec['log']}"


def place(error: BaseException) -> str:
    """Return the innermost module of the script's that ran, and the line of it or of the script."""
    frames = [frame for frame in _frames(error) if not _is_library(frame[0].f_code.co_filename)]
    modules = [found for frame, _ in frames if (found := _module(frame))]
    if not frames:
        return "before the script"
    frame, number = frames[-1]
    line = f"{Path(frame.f_code.co_filename).name}:{number}"
    return f"{modules[-1]} at {line}" if modules else line


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    found = error.__traceback__
    while found is not None:
        yield found.tb_frame, found.tb_lineno
        found = found.tb_next


def _is_library(name: str) -> bool:
    return name.startswith((OURS, "<")) or any(part in name for part in LIBRARIES)


def _module(frame: FrameType) -> str:
    """Return the class of the module whose method a frame is, empty if it is none's."""
    owner = frame.f_locals.get("self")
    return type(owner).__name__ if hasattr(owner, "named_parameters") else ""
