"""Sees backward passes: when each runs, and which block owns its time.

The nodes of the autograd graph at the border of each block get a pre-hook, which changes the owner of the
time and touches no gradient. The engine runs nodes in the reverse order of their making, so that the owner
changes in reverse, too. Backward hooks of modules would do as well but wrap inputs and outputs in functions
of their own, which breaks modules that change them in place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer import internals
from foretrace.tracer.guarded import Replacements, between
from foretrace.tracer.lane import NOBODY
from foretrace.tracer.records import Block

if TYPE_CHECKING:
    from foretrace.tracer.session import Session

LOSS: Final = Block("loss")  # owner of the backward pass before it enters the model


class BackwardHook:
    """Notes when a backward pass begins and ends, and who owns its time.

    Attributes:
        ends_with_graph: whether something else than compute comes behind the last node of a graph.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lane = session.lane
        self.n_running = 0  # backward passes that run, one inside the other
        self._entering: dict[Block, Callable[[Any], None]] = {}
        self.kind = "backward"  # of their spans
        self.ends_with_graph = False
        self._is_ending = False
        self._queue_callback = internals.queue_callback()
        self._graph_done = session.guarded("modules", self._nodes_done)
        begin, end = (session.guarded("modules", f) for f in (self._begin, self._end))
        self.remove = internals.around_backward(between(lambda *_, **__: begin(), end))

    @property
    def forward_kind(self) -> str:
        """Kind of a forward that runs now: inside of a backward pass it is a recomputation."""
        return "recompute" if self.n_running else "forward"

    def _begin(self) -> int:
        # A model may have a backward pass within its forward, as where forces are gradients of an energy.
        if not self.n_running and not self._session.steps.is_inside():
            self._session.steps.backward_begins()
        self.n_running += 1
        self._is_ending = False
        self._lane.own()
        block = self._lane.block
        return self._lane.push(self.kind, LOSS if block is NOBODY else block)

    def _end(self, depth: int) -> None:
        self.n_running -= 1
        self._lane.pop(depth)
        self._session.sweep()
        if not self.n_running and not self._session.steps.is_inside():
            self._session.steps.backward_ends()

    def _nodes_done(self) -> None:
        """The last node of a graph has run; DDP waits for its buckets next."""
        self._lane.replace(self.kind, NOBODY)
        self._session.wait_follows()

    def entering(self, block: Block) -> Callable[[Any], None]:
        """Return the pre-hook of a node from which on *block* owns the time."""
        found = self._entering.get(block)
        if found is None:
            found = self._entering[block] = self._made(block)
        return found

    def _made(self, block: Block) -> Callable[[Any], None]:
        session, replace = self._session, self._lane.replace

        def enter(_: Any) -> None:
            if not self.n_running:
                return
            if self.ends_with_graph and not self._is_ending:
                # The C++ reducer of DDP waits for its buckets in a callback after the last node. Ours was
                # asked for before, so it runs before: what comes then is not compute.
                self._is_ending = True
                self._queue_callback(self._graph_done)
            session.sweep()
            replace(self.kind, block)

        return session.guarded("modules", enter)


class CheckpointHook(Replacements):
    """Lets both kinds of checkpoints of torch say when they compute again.

    A checkpoint may lie around the inside of a module: then nothing else tells that a forward runs once more.
    """

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._lane, self._is_again = session.lane, internals.is_in_backward()
        self._begin = session.guarded("modules", self._began)
        self._end = session.guarded("modules", self._ended)
        frame, function = internals.checkpoints()

        def framing(original: Any) -> Any:
            def init(frame: Any, recompute_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
                original(frame, self._telling(recompute_fn), *args, **kwargs)

            return init

        def reentering(original: Any) -> Any:
            def forward(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
                # Torch runs the function without gradients here, though it trains.
                session.steps.n_checkpoints += 1
                try:
                    return original(ctx, self._telling(run_function), *args)
                finally:
                    session.steps.n_checkpoints -= 1

            return forward

        self.replace(frame, "__init__", framing)
        self.replace(function, "forward", reentering)

    def _telling(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return *function*, whose work is that of the block that is running now, also when it runs again."""
        begin, block = self._begin, self._lane.block
        telling = between(lambda *_, **__: begin(block), self._end)(function)
        return functools.wraps(function, updated=())(telling)

    def _began(self, block: Block) -> int | None:
        """A function of *block* begins; return what ``_ended`` takes, None if it runs for the first time."""
        if not self._is_again() or not self._lane.is_own():
            return None
        return self._lane.push("recompute", self._lane.block if block is NOBODY else block)

    def _ended(self, depth: int | None) -> None:
        if depth is not None:
            self._lane.pop(depth)
