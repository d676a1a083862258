"""Steps of a script that calls no module: plain tensors that require gradients, and an optimizer for them.

A step usually begins with the first call of a module. If an optimizer steps before any module was called,
each later step begins with the first function whose results require gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer import internals
from foretrace.tracer.rehearse.events.lane import LOSS
from foretrace.tracer.rehearse.operators.calls import tensors_in
from foretrace.tracer.steps import Steps

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.session import RehearsalSession

FIRST_LEFT_OUT: Final = (
    "no module is called, so it is unknown where the first step begins: that step is left out, and the next "
    "one is kept"
)
"""Note if the first step was requested."""


class StepsWithoutModules(Steps):
    """Steps that begin with functions, once an optimizer has stepped before any call of a module.

    Args:
        session: the rehearsal.
    """

    def __init__(self, session: RehearsalSession) -> None:
        super().__init__(session)  # type: ignore[arg-type]
        self._rehearsal = session
        self._is_first = False  # an optimizer steps, and no module was called yet

    def begin(self) -> None:
        """Forward work begins: a module is called, or a function if no module is ever called."""
        self._is_first = False
        super().begin()

    def optimizer_begins(self, optimizer: Any) -> None:
        """An optimizer begins to step. The first time, this may begin a step that no module has begun.

        Its closure may contain all work of the step, and calls of modules too.
        """
        if self._start is None:
            super().begin()
            self._is_first = True
        super().optimizer_begins(optimizer)

    def optimizer_ends(self, optimizer: Any) -> None:
        """An optimizer has stepped. If no module was called before, only the end of this step is known."""
        if self._is_first:
            self._is_first, session = False, self._rehearsal
            if not session.kept.warmup:
                session.warn(FIRST_LEFT_OUT)
            session.kept.leave_out(1)
            self._watch()
        super().optimizer_ends(optimizer)

    def _watch(self) -> None:
        """Begin a step with the first function whose results require gradients.

        All such functions count as forward, also those of a later micro-batch after a backward, and those in
        the closure of an optimizer. A rehearsal may end where a step begins. So that is checked here, for
        functions: an error raised inside an operator, below C++ code, may abort the process.
        """
        from torch.overrides import TorchFunctionMode

        lane, begin = self._rehearsal.lane, self.begin

        class Functions(TorchFunctionMode):  # type: ignore[misc]  # torch is untyped here
            """Sees every function of torch."""

            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                before, forward = lane.owner, ("forward", LOSS)
                is_outside = lane.depth == 0
                if (is_outside or before[0] == "optimizer") and _differentiates([args, kwargs]):
                    lane.owner = forward
                out = func(*args, **(kwargs or {}))
                if is_outside and any(getattr(one, "grad_fn", None) for one in tensors_in(out)):
                    begin()
                elif lane.owner is forward:  # not a forward: it reads a gradient, for example
                    lane.owner = before
                return out

        internals.put_below(Functions())


def _differentiates(arguments: Any) -> bool:
    """Whether the results of a function of *arguments* require gradients, if they can."""
    from torch import is_grad_enabled

    return is_grad_enabled() and any(getattr(one, "requires_grad", False) for one in tensors_in(arguments))
