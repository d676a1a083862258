"""What a checkpoint computes again is recomputation, also where no module is called for it.

A checkpoint may lie around the inside of a module: then nothing but the checkpoint itself tells that a
forward runs once more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from foretrace.tracer import internals
from foretrace.tracer.lane import NOBODY
from foretrace.tracer.records import Block

if TYPE_CHECKING:
    from foretrace.tracer.session import Session


class CheckpointHook:
    """Lets both kinds of checkpoints of torch say when they compute again.

    Args:
        session: the recording.
    """

    def __init__(self, session: Session) -> None:
        self._lane, self._is_again = session.lane, internals.is_in_backward()
        self._begin = session.guarded("modules", self._began)
        self._end = session.guarded("modules", self._ended)
        self._frame, self._function = internals.checkpoints()
        self._originals = self._frame.__init__, self._function.forward
        framed, forward = self._originals

        def init(frame: Any, recompute_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            framed(frame, self._telling(recompute_fn), *args, **kwargs)

        def reentrant(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
            session.steps.n_checkpoints += 1
            try:
                return forward(ctx, self._telling(run_function), *args)
            finally:
                session.steps.n_checkpoints -= 1

        self._frame.__init__ = functools.wraps(framed)(init)
        self._function.forward = staticmethod(functools.wraps(forward)(reentrant))

    def remove(self) -> None:
        """Give the checkpoints of torch back as they were; those that were made meanwhile tell nobody."""
        self._frame.__init__, forward = self._originals
        self._function.forward = staticmethod(forward)

    def _telling(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return *function*, whose work is that of the block that is running now, also when it runs again."""
        begin, end, block = self._begin, self._end, self._lane.block

        @functools.wraps(function, updated=())
        def telling(*args: Any, **kwargs: Any) -> Any:
            depth = begin(block)
            try:
                return function(*args, **kwargs)
            finally:
                end(depth)

        return telling

    def _began(self, block: Block) -> int | None:
        """A function of *block* begins; return what ``_ended`` takes, None if it runs for the first time."""
        if not self._is_again() or not self._lane.is_own():
            return None
        return self._lane.push("recompute", self._lane.block if block is NOBODY else block)

    def _ended(self, depth: int | None) -> None:
        if depth is not None:
            self._lane.pop(depth)
