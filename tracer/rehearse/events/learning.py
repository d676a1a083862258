"""Passes that a backward follows, and passes with gradients that none follows, which train nothing.

A script may call its model to choose actions or to make samples, and leave gradients on. That these passes
train nothing is known once the step is over: no node of autograd that made their outputs has run.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from tracer.inputs import tensors_inside

if TYPE_CHECKING:
    from tracer.rehearse.session import RehearsalSession

UNUSED: Final = (
    "passes with gradients that no backward follows, such as passes that choose actions or generate samples, "
    "count in the time, but not in rows and MFU"
)
"""What to say where there are such passes in a step that is kept."""

NOW_AND_THEN: Final = (
    "step {kept} has passes that train nothing, such as an evaluation or samples; step {before} had none. "
    "They count in time and memory as if they were in every step; if they are rare, --warmup {next} keeps a "
    "step without them"
)
"""What to say where the step that is kept may hold what a script does every so many steps."""


class _Pass:
    """A call of a model from outside.

    Args:
        model: number of the model.
        first: number of its first event.

    Attributes:
        end: number of the event after its last one.
        has_run: whether a backward has reached its output, or nobody can tell.
        job: what ``RunInfo.job`` has of its input, nothing if it is not known.
    """

    def __init__(self, model: int, first: int) -> None:
        self.model, self.first, self.end = model, first, first
        self.has_run = True
        self.job: dict[str, Any] = {}


class Learning:
    """Tells by the end of a step which of its passes a backward has followed.

    Args:
        session: the rehearsal.
    """

    def __init__(self, session: RehearsalSession) -> None:
        self._session = session
        self._passes: list[_Pass] = []  # with gradients, of this step
        self._running: _Pass | None = None
        self._n_run: Counter[int] = (
            Counter()
        )  # by model: its passes, also of earlier steps, that a backward reached
        self._n_idle = 0  # passes of this step without gradients
        self._idle: dict[int, tuple[int, list[_Pass]]] = {}  # by step: passes without gradients, open ones
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._n_models = 0  # so far: one that is gone leaves its number to no other
        self._sizes: dict[int, list[tuple[int, int]]] = {}  # by step: rows and tokens of passes that train

    def begin(self, module: Any, *, trains: bool) -> None:
        """The model *module* is called from outside; *trains*: with gradients."""
        self._running = None
        if not trains:
            self._n_idle += 1
            return
        self._running = _Pass(self._number(module), self._session.tape.next_number)
        self._passes.append(self._running)

    def note_input(self, job: dict[str, Any]) -> None:
        """The pass that runs has an input of which ``RunInfo.job`` has *job*."""
        if self._running is not None and not self._running.job and job["input_shape"]:
            self._running.job = job

    def end(self, module: Any, out: Any) -> None:
        """The model *module* has returned *out*, unless it is one of another thread."""
        one = self._running
        if one is None or one.model != self._numbers.get(module):
            return
        self._running = None
        one.end = self._session.tape.next_number
        nodes = list(_nodes(out))
        one.has_run = not nodes
        self._n_run[one.model] += not nodes
        for node in nodes:
            node.register_prehook(self._reached(one))

    def step_ended(self, model: Any) -> int:
        """A step is over: return how many of the passes of *model* in it no backward has followed.

        Where a backward comes in the step after the pass, as that of a generator whose critic ends the step,
        that of the step before has come in this one. In a pipeline some passes are only written down again.
        """
        session, passes, n_run = self._session, self._passes, self._n_run
        own = None if model is None else self._number(model)
        self._passes, self._n_run, unused = [], Counter(), list[_Pass]()
        if not session.is_pipelined:
            for number in {one.model for one in passes}:
                of_model = [one for one in passes if one.model == number]
                if n_run[number] or (number != own and n_run and session.position.step > 1):
                    n_unused = max(len(of_model) - n_run[number], 0)
                    unused += [one for one in of_model if not one.has_run][:n_unused]
        for one in unused:
            session.tape.trains_nothing(one.first, one.end)
        used = [one for one in passes if one.model == own and one not in unused and one.job]
        self._sizes[session.position.step - 1] = [_size(one.job) for one in used]
        if used and "schedule" not in session.job:
            session.note_job(**used[0].job)
        self._say(len(unused), [one for one in passes if not one.has_run])
        return sum(one.model == own for one in unused)

    def sizes(self, first: int) -> dict[str, int]:
        """Return rows and tokens of a step, on average of those from *first* on, as ``RunInfo.job`` has them.

        Nothing where all passes have an input of one shape, which tells them with the number of passes, where
        it has no tokens, or where that of some pass is not known.
        """
        by_step = self._session.by_step
        kept = {step: sizes for step, sizes in self._sizes.items() if step >= first}
        is_known = all(len(sizes) == by_step.get(step) for step, sizes in kept.items())
        found = [size for sizes in kept.values() for size in sizes]
        if not is_known or len(set(found)) <= 1 or not all(tokens for _, tokens in found):
            return {}
        rows, tokens = (round(sum(numbers) / len(kept)) for numbers in zip(*found, strict=True))
        return {"rows_per_step": rows, "tokens_per_step": tokens}

    def _say(self, n_unused: int, still_open: list[_Pass]) -> None:
        """Say what is odd about the step that is over.

        Args:
            n_unused: its passes with gradients that train nothing.
            still_open: those that no backward has followed yet.
        """
        session, step = self._session, self._session.position.step - 1
        n_idle, self._n_idle = self._n_idle, 0
        before, self._idle[step] = self._idle.get(step - 1), (n_idle, still_open)
        if step < session.kept.warmup:
            return
        if n_unused:
            session.warn(UNUSED)
        if step != session.kept.warmup or session.kept.n_steps != 1 or not n_idle + n_unused:
            return
        had_none = before is not None and not before[0] and all(one.has_run for one in before[1])
        if had_none:  # by now: the backward of a pass may come a step later
            session.warn(NOW_AND_THEN.format(kept=step, before=step - 1, next=step + 1))

    def _reached(self, one: _Pass) -> Any:
        """Return the hook of a node that made an output of the pass *one*."""

        def reached(_: Any) -> None:
            if not one.has_run:
                one.has_run = True
                self._n_run[one.model] += 1

        return reached

    def _number(self, module: Any) -> int:
        if module not in self._numbers:
            self._numbers[module], self._n_models = self._n_models, self._n_models + 1
        return self._numbers[module]


def _size(job: dict[str, Any]) -> tuple[int, int]:
    """Return rows and tokens of the input of which ``RunInfo.job`` has *job*; no tokens where it has none."""
    shape = job["input_shape"]
    has_tokens = len(shape) == (3 if job.get("input_is_embedded") else 2)
    return int(shape[0]), int(shape[0]) * int(shape[1]) if has_tokens else 0


def _nodes(out: Any) -> Iterator[Any]:
    """Yield the nodes of autograd that made the tensors in *out*.

    Of a view also that of what it shows: the node of a view is gone once somebody writes into it.
    """
    for tensor in tensors_inside([out]):
        if (node := getattr(tensor, "grad_fn", None)) is not None:
            yield node
            base = tensor._base if tensor._is_view() else None  # noqa: SLF001 - torch has no other name for it
            if base is not None and base.grad_fn is not None:
                yield base.grad_fn
