"""Backward passes that a library starts past the function by which torch starts them, led back to it."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, Final

from foretrace.tracer import internals
from foretrace.tracer.importing import Expectation

LIBRARY: Final = "megatron.core.pipeline_parallel.schedules"
"""Its ``custom_backward`` differentiates outputs that were freed, for which it asks the engine itself."""


class _Engine:
    """Stands for autograd's engine."""

    @staticmethod
    def run_backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        """Start a backward pass as torch does, seen by whoever sees that."""
        return internals.swap_run_backward()(tensors, *args, **kwargs)


def _lead_back(module: Any) -> None:
    module.Variable = SimpleNamespace(_execution_engine=_Engine)


def watch() -> Expectation | None:
    """Lead them back now, or once the library is imported; return what has to be kept alive."""
    if LIBRARY in sys.modules:
        _lead_back(sys.modules[LIBRARY])
        return None
    return Expectation(LIBRARY, _lead_back)
