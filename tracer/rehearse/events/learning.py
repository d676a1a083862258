"""Passes that a backward follows, and passes with gradients that none follows, which train nothing.

A script may call its model to choose actions or to make samples, and leave gradients on. That these passes
train nothing is known once the step is over: no node of autograd that made their outputs has run.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer.inputs import input_of, tensors_inside
from foretrace.tracer.rehearse.events.embedded import Lookup, Matrix, Taken, lookup_of, matrices_in, taken
from foretrace.tracer.rehearse.events.summed import Sums

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.session import RehearsalSession

UNUSED: Final = (
    "passes with gradients that no backward follows, such as passes that choose actions or generate samples, "
    "count in the time, but not in rows and MFU"
)
"""What to say where there are such passes in a step that is kept."""

MODELS: Final = (
    "{n} models train on texts of their own in a step ({tokens} tokens a rank): throughput counts the tokens "
    "of all"
)
LENGTHS: Final = (
    "the model embeds sequences of {beside} a row beside those of {counted} that it is given: throughput "
    "counts the latter"
)
"""What to say where it is not plain which tokens are counted."""

NOW_AND_THEN: Final = (
    "step {kept} has passes that train nothing, such as an evaluation or samples, and step {before} has none "
    "(passes after its optimizer has stepped are part of step {kept}). They count in time and memory as if "
    "they were in every step; if they are rare, --warmup {next} keeps a step without them"
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
        is_frozen: whether no autograd node made its output, as of a teacher without gradients.
        job: what ``RunInfo.job`` has of its input, nothing if it is not known.
        is_float: whether that is no whole numbers.
        given: matrices of whole numbers among its arguments.
        lookups: what it embeds.
        sums: which of that it adds to each other.
        taken: its rows and tokens, once it is over.
    """

    def __init__(self, model: int, first: int) -> None:
        self.model, self.first, self.end = model, first, first
        self.has_run, self.is_frozen = True, False
        self.job: dict[str, Any] = {}
        self.is_float, self.given = False, list[Matrix]()
        self.lookups, self.sums = list[Lookup](), Sums()
        self.taken: Taken | None = None

    def take(self) -> None:
        """The call is over: find its rows and tokens."""
        if self.job:
            lookups = self.sums.apart(self.lookups)
            self.taken = taken(self.given, lookups, self.job, is_float=self.is_float)
            if self.taken.shape is not None:
                self.job = {"input_shape": [*self.taken.shape], "input_is_embedded": False}


class Learning:
    """Tells by the end of a step which of its passes a backward has followed.

    Args:
        session: the rehearsal.

    Attributes:
        n_beside: by step, its passes that train nothing, with gradients or without; none in a pipeline, whose
            stages are also called to ask for the shapes of what they send.
    """

    def __init__(self, session: RehearsalSession) -> None:
        self._session, self.n_beside = session, Counter[int]()
        self._passes: list[_Pass] = []  # with gradients, of this step
        self._running: _Pass | None = None
        self._n_run: Counter[int] = (
            Counter()
        )  # by model: its passes, also of earlier steps, that a backward reached
        self._n_idle = 0  # passes of this step without gradients
        self._idle: dict[int, tuple[int, list[_Pass]]] = {}  # by step: passes without gradients, open ones
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._n_models = 0  # so far: one that is gone leaves its number to no other
        self._sizes: dict[int, list[Taken]] = {}  # by step: what passes that train take
        self._others: dict[int, int] = {}  # by step: tokens that only other models take

    def begin(self, module: Any, *, trains: bool) -> None:
        """The model *module* is called from outside; *trains*: with gradients."""
        self._running = None
        if not trains:
            self._n_idle += 1
            return
        self._running = _Pass(self._number(module), self._session.tape.next_number)
        self._passes.append(self._running)

    def note_input(self, job: dict[str, Any], values: Iterable[Any]) -> None:
        """The pass that runs has arguments *values*, an input of which ``RunInfo.job`` has *job*."""
        if self._running is None:
            return
        self._running.given += matrices_in(values)
        if not self._running.job and job["input_shape"]:
            self._running.job = job
            self._running.is_float = bool(input_of(values).is_floating_point())

    def looked_up(self, weight: Any, indices: Any, out: Any) -> None:
        """The rows *indices* of the table *weight* were asked for, and are in *out*."""
        if self._running is not None:
            self._running.sums.looked_up(len(self._running.lookups), out)
            self._running.lookups.append(lookup_of(weight, indices))

    def added(self, operands: Any, out: Any) -> None:
        """The tensors among *operands* were added to *out*."""
        if self._running is not None:
            self._running.sums.added(operands, out)

    def end(self, module: Any, out: Any) -> None:
        """The model *module* has returned *out*, unless it is one of another thread."""
        one = self._running
        if one is None or one.model != self._numbers.get(module):
            return
        self._running = None
        one.take()
        before = [
            text for other in self._passes if other.taken and other is not one for text in other.taken.texts
        ]
        for text in one.taken.texts if one.taken else ():
            text.compare(before)
        one.end = self._session.tape.next_number
        nodes = list(_nodes(out))
        one.has_run = one.is_frozen = not nodes
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
        others = (one for one in passes if one.model != own and not one.is_frozen)
        self._count(used, [one for one in others if one not in unused])
        if used and "schedule" not in session.job:
            session.note_job(**used[0].job)
        self._say(len(unused), [one for one in passes if not one.has_run])
        return sum(one.model == own for one in unused)

    def sizes(self, first: int) -> Taken | None:
        """Return rows and tokens of a step, on average of those from *first* on; None if some are unknown."""
        by_step = self._session.by_step
        kept = {step: found for step, found in self._sizes.items() if step >= first}
        found = [one for sizes in kept.values() for one in sizes]
        if not found or any(len(sizes) != by_step.get(step) for step, sizes in kept.items()):
            return None
        tokens = sum(one.tokens for one in found) + sum(self._others.get(step, 0) for step in kept)
        rows = round(sum(one.rows for one in found) / len(kept))
        is_sure, is_vector = (all(getattr(one, name) for one in found) for name in ("is_sure", "is_vector"))
        return Taken(rows, round(tokens / len(kept)), is_sure=is_sure, is_vector=is_vector)

    def _count(self, used: Sequence[_Pass], others: Sequence[_Pass]) -> None:
        """Count what the passes *used* of the model take in the step that is over, and what *others* take.

        Tokens of another model count if it takes other texts, as the second tower of a pair does.
        """
        session, step = self._session, self._session.position.step - 1
        self._sizes[step] = [one.taken for one in used if one.taken is not None]
        own = [text.text for one in self._sizes[step] for text in one.texts]
        more: Counter[int] = Counter()
        for one in others if own and not session.is_pipelined else ():
            new = [text.text for text in (one.taken.texts if one.taken else ()) if text.text not in own]
            more[one.model] += sum(text.shape[0] * text.shape[1] for text in new)
            own += new
        self._others[step] = more.total()
        if step < session.kept.warmup or "schedule" in session.job:
            return
        if more.total():
            n_own = sum(one.tokens for one in self._sizes[step])
            listed = ", ".join(f"{n:,}" for n in (n_own, *more.values()) if n)
            session.warn(MODELS.format(n=1 + sum(map(bool, more.values())), tokens=listed))
        found = next((size for size in self._sizes[step] if size.beside), None)
        if found is not None:
            lengths = dict.fromkeys(str(text.shape[1]) for text in found.texts)
            beside = " and ".join(map(str, found.beside))
            session.warn(LENGTHS.format(beside=beside, counted=" and ".join(lengths)))

    def _say(self, n_unused: int, still_open: list[_Pass]) -> None:
        """Say what is odd about the step that is over.

        Args:
            n_unused: its passes with gradients that train nothing.
            still_open: those that no backward has followed yet.
        """
        session, step = self._session, self._session.position.step - 1
        n_idle, self._n_idle = self._n_idle, 0
        self.n_beside[step] = 0 if session.is_pipelined else n_idle + n_unused
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
