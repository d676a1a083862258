"""Several trainings in one script: to which of them the kept steps belong, and which model is described.

The recorder describes the first model that is called. A rehearsal keeps few steps, and describes the model
that these steps train. The script is not run further, so it is unknown whether it trains another model later.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import Any, Final, NamedTuple

from foretrace.tracer.flows import Flows
from foretrace.tracer.parallelism import SHARDING, data_parallel, gathered
from foretrace.tracer.rehearse.data.loaders import FRAMES, NO_TOKENS, Loaded, is_tokens
from foretrace.tracer.rehearse.state import State
from foretrace.tracer.rehearse.tape.calls import is_wrapped, parts_of
from foretrace.tracer.shape import describe_model
from foretrace.tracer.wrapped import inside, whole_shape
from foretrace.traces.layout import Layout

BEFORE: Final = (
    "the steps that are kept train another model than steps before them: {name} with {n_params:,} parameters "
    "is described; the answer contains nothing about {other} with {n_others:,}"
)
FIRST: Final = (
    "step {step} is the first of a later training: it includes what is built for that training, and the "
    "states that its optimizer creates; --warmup {next} keeps the step after it"
)
NEXT: Final = (
    "an optimizer is created after the last kept step: if another training begins there, it is not in the "
    "answer, but what is built for it by then is in the peak memory; --warmup {next} keeps its steps"
)
"""Notes about trainings before the kept steps, beginning with them, or after them."""

NO_INPUT: Final = "no tensor was seen among the arguments of the model"
UNLIKE: Final = "passes take inputs of {shapes}, and no step ends that tells which of them train"
"""Why rows and tokens are unknown."""


class _Described(NamedTuple):
    """A model that trains."""

    model: dict[str, Any]  # its description by ``describe_model``
    settings: dict[str, Any]  # how it is sharded, by ``data_parallel``


class Trainings:
    """The trainings of a script so far.

    Attributes:
        loaded: rows that loaders have delivered.
        flows: told of each communication; finds what groups are for that nobody has named.
    """

    def __init__(self, session: State) -> None:
        self._session, self.loaded = session, Loaded(session.position)
        self._known: weakref.WeakKeyDictionary[Any, _Described] = weakref.WeakKeyDictionary()
        self._gathered: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._now: weakref.ref[Any] | None = None
        # Models and parameters are known by references: the next may be where one was that is gone.
        self._trained: dict[int, tuple[Any, dict[str, Any]]] = {}  # of each step: the model, its description
        self._called: dict[int, set[Any]] = {}  # the models that each step calls
        self.begun: list[int] = []  # the first steps of trainings after the first one
        self._shapes: weakref.WeakSet[Any] = weakref.WeakSet()
        self._parameters: list[dict[Any, tuple[int, ...]]] = []
        self.flows = Flows(
            session.groups,
            self._trained_shapes,
            lambda: max(session.by_step.values(), default=1),
            lambda: prod((session.job.get("input_shape") or [0])[: 1 + is_tokens(session.job)]),
        )

    def meet(self, model: Any) -> None:
        """A *model* is called for the first time; the first of all models is described.

        If it was built after the first step, its parameters were counted as activations: correct that.
        """
        session = self._session
        if session.model is None:
            self._now = weakref.ref(inside(model))
        built_later = model.parameters() if session.position.step >= 0 else ()
        for one in built_later:
            if is_wrapped(one):  # of torch.func, around a parameter that is counted already
                continue
            for part in parts_of(one):
                session.memory.move(part.untyped_storage(), "parameters")

    def count(self, module: Any, *, trains: bool) -> None:
        """Describe *module*, the model of this step, if its pass *trains* and another one was described."""
        session, inner = self._session, inside(module)
        if not trains or session.is_pipelined or session.model is None or self._now is None:
            return
        if (before := self._now()) is not inner:
            if before is not None:
                self._known[before] = _Described(session.model, self._settings())
            if inner not in self._known:
                self._known[inner] = _Described(describe_model(module), data_parallel(module)[0])
            self._describe(inner)
        self._trained[session.position.step] = (weakref.ref(inner), session.model)

    def call(self, module: Any) -> None:
        """Note that the present step trains *module*, the model of that step or another one."""
        self._called.setdefault(self._session.position.step, set()).add(weakref.ref(inside(module)))
        if module not in self._shapes:
            self._shapes.add(module)
            trained = (one for one in module.parameters() if one.requires_grad)
            self._parameters.append({weakref.ref(one): tuple(whole_shape(one)) for one in trained})

    def layout(self, rank: int) -> Layout | None:
        """Return the parallel degrees that the groups of *rank* tell, now that the last step is over."""
        session = self._session
        self.flows.settle(max(session.position.step - 1, 0))
        return session.groups.layout(rank)

    def _trained_shapes(self) -> list[Counter[tuple[int, ...]]]:
        """Return the shapes of what each model trains that was called with gradients, and of all."""
        whole = {key: shape for one in self._parameters for key, shape in one.items()}
        return [Counter(one.values()) for one in (*self._parameters, whole)]

    def _settings(self) -> dict[str, Any]:
        """Return how the described model is sharded."""
        return {name: value for name, value in self._session.job.items() if name in SHARDING}

    def _describe(self, inner: Any) -> None:
        """Make the known model *inner* the described one."""
        session, self._now = self._session, weakref.ref(inner)
        # What the model before was sharded by must not stay.
        for name in SHARDING:
            session.job.pop(name, None)
        session.model = self._known[inner].model
        session.note_job(**self._known[inner].settings)

    def n_passes(self) -> int:
        """Return the passes of the model in the last step."""
        session = self._session
        return session.by_step.get(self._last_step(), session.forwards)

    def part(self, first: int) -> dict[str, Any]:
        """Return what this rank trains on in a step, of those from *first* on.

        ``rows``, ``tokens`` (0: the input has none) and the product that they are, in ``words``; or why they
        are ``unknown``. Beside these, ``given`` are the rows that the model is given. Says what is counted
        where that is not plain.
        """
        session, job, step = self._session, self._session.job, self._last_step()
        shape = job.get("input_shape")
        if not shape:
            return {"unknown": NO_INPUT}
        if session.is_pipelined:
            return _plain(shape, session.pipeline.microbatches_in(step), has_tokens=is_tokens(job))
        n_passes = self.n_passes()
        sizes, by_shape = session.learning.sizes(first), is_tokens(job)
        if sizes is None and len(shapes := session.learning.shapes()) > 1:
            listed = " and ".join(sorted(" x ".join(map(str, one)) for one in shapes))
            return {"unknown": UNLIKE.format(shapes=listed)}
        rows = shape[0] * n_passes if sizes is None else sizes.rows
        tokens, given = rows * shape[1] * by_shape if sizes is None else sizes.tokens, rows
        # Fractions in rows that no loader gives are not counted as tokens.
        if tokens and job.get("input_is_embedded") and not self.loaded.fits(shape[0], step):
            tokens = 0
        samples = self.loaded.only(step)
        if sizes is not None and not sizes.is_sure:
            session.warn(NO_TOKENS)
            rows = samples or rows
        elif sizes is not None and sizes.is_vector and 0 < samples < rows:  # texts, one behind the other
            rows, tokens = samples, rows
        elif not tokens or job.get("input_is_embedded"):
            rows, said, is_known = self.loaded.counted(shape, rows, step)
            if not is_known:
                return {"unknown": said, "given": given}
            session.warn(said) if said else None
            if tokens:
                session.warn(FRAMES.format(n=shape[1], width=shape[2]))
                tokens = rows * shape[1]
        plain = _plain(shape, n_passes, has_tokens=tokens > 0 and len(shape) > 1)
        if (rows, tokens) == (plain["rows"], plain["tokens"]):
            return plain
        words = f"{tokens:,} tokens in {rows:,} rows of a rank" if tokens else f"{rows:,} rows of a rank"
        return {"rows": rows, "tokens": tokens, "words": words, "given": given}

    def gathered(self) -> tuple[int, int]:
        """Return how much FSDP gathers of the described model, and how much of that pads.

        Asked for in a step, as a script may destroy its groups at its end.
        """
        model = None if self._now is None else self._now()
        if model is not None and model not in self._gathered:
            self._gathered[model] = gathered(self._session.groups, model)
        return (0, 0) if model is None else self._gathered[model]

    def _last_step(self) -> int:
        return max(self._session.by_step, default=self._session.position.step)

    def begin(self) -> None:
        """A new optimizer, created since the last step, ends the steps from now on; it has stepped once."""
        if (step := self._session.position.step - 1) > 0:
            self.begun.append(step)

    def said(self, first_kept: int) -> list[str]:
        """Return notes about other trainings; *first_kept* is the first step that is kept."""
        session, n_done = self._session, self._session.position.step
        found = [FIRST.format(step=step, next=step + 1) for step in self.begun if step >= first_kept]
        kept = [model for step, (_, model) in self._trained.items() if first_kept <= step < n_done]
        called = set().union(*(own for step, own in self._called.items() if first_kept <= step < n_done))
        earlier = [found for step, found in self._trained.items() if step < first_kept]
        before = [model for which, model in earlier if which not in called and model not in kept]
        if before and kept:
            own, other = kept[-1], before[-1]
            told = {"name": own["name"], "n_params": own["n_params"]}
            found.append(BEFORE.format(**told, other=other["name"], n_others=other["n_params"]))
        goes_on = session.steps.made and n_done >= session.kept.warmup + session.kept.n_steps
        return [*found, NEXT.format(next=n_done + 1)] if goes_on else found


def _plain(shape: Sequence[int], n_passes: int, *, has_tokens: bool) -> dict[str, Any]:
    """Return the part of a rank of which every pass is given an input of this *shape*."""
    rows = int(shape[0]) * n_passes
    words = f"{shape[0]:,} rows" + (f" × {shape[1]:,}" if has_tokens else "")
    words += f" × {n_passes} micro-batches" if n_passes > 1 else ""
    tokens = rows * int(shape[1]) if has_tokens else 0
    return {"rows": rows, "tokens": tokens, "words": words, "given": rows}
