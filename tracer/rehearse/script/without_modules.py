"""Steps of a script that calls no module: plain tensors that require gradients, and an optimizer of them.

A step begins with the first forward, which is otherwise the call of a module. Here the first optimizer that
steps shows that there is none, and each later step begins with the first function whose results are
differentiated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tracer.rehearse.events.lane import LOSS
from tracer.rehearse.operators.calls import tensors_in
from tracer.steps import Steps

if TYPE_CHECKING:
    from tracer.rehearse.session import RehearsalSession

FIRST_LEFT_OUT: Final = (
    "no module is called: the first step, of which nothing says where it begins, is left out, "
    "and the next one kept"
)
"""What to say where the first step was asked for."""


class StepsWithoutModules(Steps):
    """Steps that begin with functions from then on where an optimizer steps before any module is called.

    Args:
        session: the rehearsal.
    """

    def __init__(self, session: RehearsalSession) -> None:
        super().__init__(session)  # type: ignore[arg-type]
        self._rehearsal = session
        self._mode: Any = None
        self._is_first = False  # an optimizer steps, and no module was called yet

    def see(self, mode: Any) -> None:
        """Functions of torch go through *mode*, an instance of a class of its own."""
        self._mode = mode

    def begin(self) -> None:
        """Forward work begins, as the call of a module says, or a function where no module is called."""
        self._is_first = False
        super().begin()

    def optimizer_begins(self, optimizer: Any) -> None:
        """An optimizer begins: of a step that no module has begun, if it is the first.

        What it calls itself, its closure, is all of the step; a module may be called there.
        """
        if self._rehearsal.position.step < 0:
            super().begin()
            self._is_first = True
        super().optimizer_begins(optimizer)

    def optimizer_ends(self, optimizer: Any) -> None:
        """An optimizer has stepped: of a first step in which no module was called only the end is known."""
        if self._is_first:
            self._is_first, session = False, self._rehearsal
            if not session.kept.warmup:
                session.warn(FIRST_LEFT_OUT)
            session.kept.leave_out(1)
            self._watch(type(self._mode))
        super().optimizer_ends(optimizer)

    def _watch(self, mode: Any) -> None:
        """Have a step begin with the first function, called under *mode*, whose results are differentiated.

        All such functions are forward, also those of a later micro-batch, which follow a backward, and those
        of a closure that an optimizer calls. A rehearsal may end where a step begins, and what raises between
        an operator and C++ may abort the process.
        """
        handle, lane = mode.__torch_function__, self._rehearsal.lane

        def beginning(self_: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            before, forward = lane.owner, ("forward", LOSS)
            is_outside = lane.depth == 0
            if (is_outside or before[0] == "optimizer") and _differentiates([args, kwargs]):
                lane.owner = forward
            out = handle(self_, func, types, args, kwargs)
            if is_outside and any(getattr(one, "grad_fn", None) for one in tensors_in(out)):
                self.begin()
            elif lane.owner is forward:  # it was none, as where it asks for a gradient
                lane.owner = before
            return out

        mode.__torch_function__ = beginning


def _differentiates(arguments: Any) -> bool:
    """Whether a function of *arguments* has results that are differentiated, if it has any that can be."""
    from torch import is_grad_enabled

    return is_grad_enabled() and any(getattr(one, "requires_grad", False) for one in tensors_in(arguments))
