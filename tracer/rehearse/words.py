"""Says in one line why a script cannot be rehearsed: which part of it, which operator, and what to do."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

DEPENDS: Final = frozenset({"DataDependentOutputException", "DynamicOutputShapeException"})
"""Errors of fake tensors where an operator needs numbers."""

UNSUPPORTED: Final = frozenset({"UnsupportedOperatorException", "UnsupportedFakeTensorException"})
"""Errors of fake tensors where nobody has said what an operator makes."""


def explain(error: BaseException, where: str, spec: Mapping[str, Any]) -> str:
    """Return what went wrong, for a person who knows the script.

    Args:
        error: what was raised.
        where: the part of the model that ran.
        spec: what was to be done; ``log`` names the file that has the whole story.
    """
    kind, line = type(error).__name__, _line(error, spec)
    if kind in DEPENDS:
        operator = getattr(error, "func", "an operator")
        return (
            f"{where}, {line}: {operator} needs numbers, which a rehearsal does not have; "
            "say in a stub file what it makes (--stub, docs/rehearse.md section 6)"
        )
    if kind in UNSUPPORTED or "no fake impl" in str(error) or "register_fake" in str(error):
        operator = str(getattr(error, "func", "")) or _operator(str(error))
        return (
            f"{where}, {line}: nobody has said what the custom operator {operator} makes; in a stub file: "
            f'@torch.library.register_fake("{operator.partition(".default")[0].replace(".", "::", 1)}") '
            "def _(x, ...): return torch.empty_like(x)   (--stub, docs/rehearse.md section 6)"
        )
    words = " ".join(str(error).split())[:200]
    return f"{where}, {line}: {kind}: {words}; all of it is in {spec['log']}"


def _line(error: BaseException, spec: Mapping[str, Any]) -> str:
    """Return the innermost line of the script, or of what is beside it, that led to *error*."""
    frames = traceback.extract_tb(error.__traceback__)
    beside = str(Path(spec["command"][0]).resolve().parent)
    own = [frame for frame in frames if str(Path(frame.filename).resolve()).startswith(beside)]
    others = [frame for frame in frames if "/torch/" not in frame.filename and "tracer" not in frame.filename]
    for found in (own, others, list(frames)):
        if found:
            return f"{Path(found[-1].filename).name}:{found[-1].lineno}"
    return "before the script"


def _operator(text: str) -> str:
    """Return the first word of *text* that looks like the name of an operator."""
    words = (word.strip("`'\".,:;()") for word in text.split())
    return next((word for word in words if "::" in word or word.count(".") == 1), "of the script")
