"""Where the steps of a script are, and which of them are kept: those after the ones that warm up."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from foretrace.tracer import internals
from foretrace.tracer.rehearse.state import State
from foretrace.tracer.rehearse.tape.calls import tensors_in
from foretrace.tracer.rehearse.tape.tape import INPUT, LOSS
from foretrace.tracer.rehearse.words import NO_STEPS
from foretrace.tracer.steps import Steps
from foretrace.traces.rehearsal import OP

# Optimizers that step and change nothing, since the parameters that they hold are no longer the model's.
# Sharding and tensor parallelism put parameters of their own in place of a model's. An optimizer that was
# made before holds the old ones, which get no gradients: a real run trains nothing, and says nothing.

STALE: Final = (
    "{name} steps, but none of its {n:,} parameters has a gradient: it changes nothing, as an optimizer that "
    "was made before parameters were replaced (fully_shard, parallelize_module)"
)
"""What to say of one; a parameter is one number, as in the size of a model."""


def look(session: State, optimizer: Any) -> None:
    """Say it of *optimizer*, which has stepped, in a step that is kept.

    Only of classes of torch, which take gradients from where autograd leaves them, and leave them there.
    """
    held = [one for group in optimizer.param_groups for one in group["params"] if one.numel()]
    is_kept = session.position.step >= session.kept.warmup
    if not is_kept or not held or not type(optimizer).__module__.startswith("torch.optim."):
        return
    if all(one.grad is None for one in held):
        session.warn(STALE.format(name=type(optimizer).__name__, n=sum(one.numel() for one in held)))


# Steps of a script that calls no module: plain tensors that require gradients, and an optimizer for them. A
# step usually begins with the first call of a module. If an optimizer steps before any module was called,
# each later step begins with the first function whose results require gradients.

FIRST_LEFT_OUT: Final = (
    "no module is called, so it is unknown where the first step begins: that step is left out, and the next "
    "one is kept"
)
"""Note if the first step was requested."""


class StepsWithoutModules(Steps):
    """Steps that begin with functions, once an optimizer has stepped before any call of a module."""

    def __init__(self, session: State) -> None:
        super().__init__(session)  # type: ignore[arg-type]
        self._rehearsal = session
        self._is_first = False  # an optimizer steps, and no module was called yet

    def begin(self) -> None:
        """Forward work begins: a module is called, or a function if no module is ever called."""
        self._is_first = False
        super().begin()

    def _begin_unseen(self) -> None:
        """A backward begins no step: the optimizer tells later that no module was called."""

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

        # Below: a mode whose block ends takes the top of the stack away, whichever mode that is.
        internals.put_below(Functions())


def _differentiates(arguments: Any) -> bool:
    """Whether the results of a function of *arguments* require gradients, if they can."""
    from torch import is_grad_enabled

    return is_grad_enabled() and any(getattr(one, "requires_grad", False) for one in tensors_in(arguments))


class OwnSteps(StepsWithoutModules):
    """Steps that a script may end itself: everything before its first mark is warm-up."""

    def optimizer_ends(self, optimizer: object) -> None:
        """An optimizer has stepped, perhaps in a loop that marks steps itself."""
        before, is_new = self._marker(), id(optimizer) in self.made
        look(self._rehearsal, optimizer)
        super().optimizer_ends(optimizer)
        self._rehearsal.apart.stepped(optimizer)
        if is_new and before is not optimizer and self._marker() is optimizer:
            self._rehearsal.trainings.begin()

    def told(self) -> None:
        """The script marks the end of a step."""
        session = self._rehearsal
        n_done = self._number - (self._end is not None)
        if not self._is_told and self._number < 0:  # the model is built: this is no step
            session.kept.warm_up(session.kept.warmup + 1)
            session.kept.leave_out(1)
            session.lane.owner = ("forward", INPUT)
        elif not self._is_told and n_done:  # parts of the first step counted as steps
            session.kept.leave_out(n_done + 1)
        super().told()


# Steps that are not alike: those that warm up are in no answer, and may do what those that are kept do not.
# A script that generates texts and learns from them in several steps generates in the first of these alone.
# Its second step, which is kept by default, is a small part of what a round takes.

ALIKE: Final = 2.0
"""Below so many times the FLOPs of another a step is like it: evaluations differ, and lengths of batches."""

FLOPS: Final = "FLOPs"
LAUNCHES: Final = "operations"
"""What is counted of a step: texts are generated token by token, with few FLOPs for many operations."""

UNLIKE: Final = (
    "steps are not alike: step {step}, which is not kept, has {ratio:.2g} times the {what} of {kept}; if the "
    "script does other work in some steps, such as generation, keep whole rounds (--warmup, --steps)"
)
"""What is said of a step before those that are kept."""

SMALLER: Final = (
    "step {kept} has a batch of {rows:,} rows, step {step} had {before:,}, as at the end of an epoch whose "
    "data do not fill the last batch: all figures are of the small one; --warmup {next} keeps the next step"
)
"""What is said of one that is kept whose loader gave less than before."""


class Rounds:
    """Holds the steps that warm up against those that are kept."""

    def __init__(self, session: State) -> None:
        self._session = session
        self._counted: dict[int, dict[str, int]] = {}
        self._next = 0  # number of the first event of the step that comes

    def step_ended(self) -> None:
        """A step is over, and still written down; after the last one it is said whether they are alike."""
        session = self._session
        step, first = session.position.step - 1, session.kept.warmup
        self._counted[step] = self._of(step)
        kept = [counted for at, counted in self._counted.items() if at >= first]
        # Of one training only: another one in the same script has other work, and its own first step.
        builds = max((at for at in session.trainings.begun if at < first), default=-1)
        before = [at for at in self._counted if builds < at < first]  # of the same training
        if len(kept) < session.kept.n_steps or not before:
            return
        which = f"step {first}" if len(kept) == 1 else f"each of steps {first} to {step}"
        for what in (FLOPS, LAUNCHES):
            most = max(before, key=lambda at: self._counted[at][what])
            mean = sum(counted[what] for counted in kept) / len(kept)
            if mean and self._counted[most][what] >= ALIKE * mean:
                ratio = self._counted[most][what] / mean
                rows = session.trainings.loaded.shrunk(first, most) if len(kept) == 1 else None
                said = UNLIKE.format(step=most, ratio=ratio, what=what, kept=which)
                if rows:
                    said = SMALLER.format(kept=first, rows=rows[0], step=most, before=rows[1], next=first + 1)
                session.warn(said)
                return

    def _of(self, step: int) -> dict[str, int]:
        """Return what is counted of *step*, which is written down: its operations without its optimizer.

        Only what was written since the step before is looked at: of many kept steps not all of them again.
        """
        tape = self._session.tape
        rows = tape.rows_from(self._next)
        places, where = np.unique(rows[:, 2], return_inverse=True)
        found = [tape.place(place) for place in places.tolist()]
        steps = np.array([place.step for place in found], np.int64)[where]
        is_own = np.array([place.kind != "optimizer" for place in found], np.bool_)[where]
        done = np.flatnonzero(steps <= step)
        # Events of the next step may be there already: a pipeline issues transfers before its first forward.
        self._next = tape.next_number - len(rows) + (int(done[-1]) + 1 if len(done) else 0)
        mine = (rows[:, 0] == OP) & (steps == step)
        works, counts = np.unique(rows[mine, 1], return_counts=True)
        flops = sum(
            tape.work(work).flops * n for work, n in zip(works.tolist(), counts.tolist(), strict=True)
        )
        return {FLOPS: flops, LAUNCHES: int((mine & is_own).sum())}


LONG_STEP: Final = 10_000
"""Events of a first step after which none follows (some four seconds); under DDP one does: buckets are
other ones then."""

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
        warmup: steps before those that are kept.
        n_steps: steps to keep.

    Attributes:
        warmup: steps before those that are kept, as far as is known.
        n_steps: steps to keep.
    """

    def __init__(self, session: State, warmup: int, n_steps: int) -> None:
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
        # Copies of repeated micro-batches do not count: they have taken no time.
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
        # Of the steps that were forgotten, only the last one can be taken back.
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
