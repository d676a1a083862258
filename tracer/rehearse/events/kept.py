"""Which steps of a rehearsal are kept: those after the ones that warm up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from foretrace.tracer.rehearse.words import NO_STEPS

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.session import RehearsalSession

LONG_STEP: Final = 15_000
"""Events of a first step after which none follows (some seconds); under DDP one does, with other buckets."""

BESIDE: Final = (
    "step 0 was kept and has {n} passes that train nothing, such as an evaluation before training: they "
    "count in time and memory as if they were in every step"
)
"""What to say where the first step is kept and may hold what a script does once, before it trains."""

MADE_ONCE: Final = frozenset({"aten.zeros_like", "aten.full_like", "aten.zeros", "aten.full"})
"""Operators by which an optimizer makes its states in its first step."""


class Kept:
    """The steps that are kept.

    Args:
        session: the rehearsal.
        warmup: steps before those that are kept.
        n_steps: steps to keep.

    Attributes:
        warmup: steps before those that are kept, as far as is known.
        n_steps: steps to keep.
    """

    def __init__(self, session: RehearsalSession, warmup: int, n_steps: int) -> None:
        self.warmup, self.n_steps = warmup, n_steps
        self._session, self._forgotten, self._first_whole = session, -1, 0

    def begin(self) -> None:
        """The first step begins: what came before was building."""
        self._session.tape.start_again()
        self._session.memory.start_peak()

    def settle(self) -> None:
        """A step is over: if it was a long first one, it is kept after all.

        Unless it has passes that train nothing: an evaluation before training is in no other step.
        """
        session = self._session
        is_first = session.position.step == 1 and self.warmup == 1
        is_long = session.tape.n_events - session.tape.n_repeated > LONG_STEP
        is_plain = session.job.get("sharding") != "ddp" and not session.learning.n_beside[0]
        if is_first and is_long and is_plain:
            self._keep_first()

    def are_done(self) -> bool:
        """Whether all that were asked for have been done."""
        return self._session.position.step >= self.warmup + self.n_steps

    def forget(self) -> None:
        """Forget the step that is over if it was to warm up, and another one follows."""
        session = self._session
        if session.position.step <= self.warmup and not session.is_over:
            self._forgotten = session.position.step - 1
            self.begin()

    def warm_up(self, n_steps: int) -> None:
        """Let so many steps warm up at least, if any are to."""
        if self.warmup:
            self.warmup = max(self.warmup, n_steps)

    def first(self) -> int:
        """Return the first step that is kept: fewer warm up where the script did fewer in all."""
        session, done = self._session, self._session.position.step
        first = max(min(self.warmup, done - self.n_steps), self._forgotten, self._first_whole)
        first = max(min(first, done - 1), 0)
        if not done:
            session.warn(NO_STEPS)
        elif first < self.warmup:
            kept = f"step {first} was" if first == done - 1 else f"steps {first} to {done - 1} were"
            did = f"the script did {done} step{'s' * (done > 1)} only"
            session.warn(f"{did}: {kept} kept, including what is set up")
            if first == self._forgotten:  # when it ended, another one was expected
                session.tape.take_back()
                session.memory.take_back()
        if done and not first and (n_beside := session.learning.n_beside[0]):
            # a script that did this step only has no other
            advice = "" if self.warmup else "; --warmup 1 keeps a step after it"
            session.warn(BESIDE.format(n=n_beside) + advice)
        return first

    def leave_out(self, n_steps: int) -> None:
        """Keep none of the first *n_steps*: they are no whole ones."""
        self._first_whole, self.warmup = n_steps, max(self.warmup, n_steps)

    def _keep_first(self) -> None:
        """Keep the first step after all: another one would take as long and show the same."""
        session, self.warmup = self._session, 0
        session.memory.count_always("optimizer")
        session.tape.leave_out("optimizer", MADE_ONCE)
        session.warn(
            "the first step was kept, because it is long: creating the states of its optimizer is left out "
            "of its time; in memory they count from the beginning"
        )
