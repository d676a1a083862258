"""What a pass takes, and whether a backward follows it: rows and tokens of passes that train."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

from foretrace.tracer.inputs import input_of, tensors_inside
from foretrace.tracer.rehearse.replacing import replaces
from foretrace.tracer.rehearse.state import State
from foretrace.tracer.rehearse.tape.calls import storage_key, tensors_in
from foretrace.tracer.wrapped import inside, parameters_of

# Which lookups of tables a pass adds to each other: words and their kinds are one text, not two.


class Sums:
    """What was looked up, and which of it is in one sum.

    A tensor is known by its storage as long as it lives: a later one may have the same.
    """

    def __init__(self) -> None:
        self._parts: dict[int, tuple[weakref.ref[Any], frozenset[int]]] = {}  # by storage: numbers of lookups
        self._sums: list[frozenset[int]] = []

    def looked_up(self, number: int, out: Any) -> None:
        """The lookup *number* has returned *out*."""
        own = getattr(out, "_local_tensor", out)
        self._parts[storage_key(own)] = weakref.ref(own), frozenset({number})

    def added(self, operands: Any, out: Any) -> None:
        """The tensors among *operands* were added to *out*."""
        if not self._parts:
            return
        found = [self._of(one) for one in tensors_in(operands)]
        together = frozenset[int]().union(*found)
        if not together:
            return
        self._parts[storage_key(out)] = weakref.ref(out), together
        if sum(map(bool, found)) > 1:
            self._sums.append(together)

    def apart(self, lookups: Sequence[Lookup]) -> list[Lookup]:
        """Return *lookups* without those that are added to an earlier one of the same table and shape.

        What is added place by place belongs to the same places, as the kinds of tokens that a model looks up
        in the table of its words.
        """
        extra: set[int] = set()
        for together in self._sums:
            seen: set[tuple[int, tuple[int, ...]]] = set()
            for number in sorted(together):
                what = lookups[number].table, lookups[number].shape
                if what in seen:
                    extra.add(number)
                seen.add(what)
        return [one for number, one in enumerate(lookups) if number not in extra]

    def _of(self, tensor: Any) -> frozenset[int]:
        whose, parts = self._parts.get(storage_key(tensor), (None, frozenset[int]()))
        return parts if whose is not None and whose() is not None else frozenset()


MOST_INPUTS: Final = 64
"""Tensors among the arguments of a pass that are looked at."""


class Lookup(NamedTuple):
    """A table is asked for rows."""

    table: int  # identity of its storage
    numbers: int  # identity of the storage of the numbers of the rows
    shape: tuple[int, ...]  # of these numbers

    @property
    def size(self) -> int:
        """How many rows."""
        size = 1
        for side in self.shape:
            size *= side
        return size


class Matrix:
    """A matrix of whole numbers among the arguments of a pass.

    Args:
        tensor: the matrix.

    Attributes:
        shape: its sides.
        numbers: identity of its storage, as long as that lives.
        text: which numbers it holds, as far as is known: itself, or an earlier matrix with the same.
    """

    def __init__(self, tensor: Any) -> None:
        self.shape, self.numbers = (int(tensor.shape[0]), int(tensor.shape[1])), _storage(tensor)
        self._offset = int(tensor.storage_offset()) if hasattr(tensor, "storage_offset") else 0
        owner = tensor._base if tensor._is_view() else tensor  # noqa: SLF001 - torch has no other name for it
        self._owner = weakref.ref(tensor if owner is None else owner)
        self.text = self

    def compare(self, earlier: Iterable[Matrix]) -> None:
        """Find out, while both live, whether one of *earlier* holds the same numbers, as for two models."""
        self.text = next((other.text for other in earlier if self._is_same(other)), self)

    def _is_same(self, other: Matrix) -> bool:
        owner = self._owner()
        found = (self.shape, self.numbers, self._offset) == (other.shape, other.numbers, other._offset)
        return found and owner is not None and owner is other._owner()


class Taken(NamedTuple):
    """What a pass takes."""

    rows: int  # the rows of its input
    tokens: int  # the tokens in them, 0 if it has none
    texts: tuple[Matrix, ...] = ()  # the matrices of tokens
    # lengths of sequences that it embeds, and that are not among those of the texts
    beside: tuple[int, ...] = ()
    # false if its input is a matrix of whole numbers of which nothing was seen to be embedded
    is_sure: bool = True
    # of its first text, of what is embedded of it; None if there is none
    shape: tuple[int, int] | None = None
    is_vector: bool = False  # whether its input is one row of whole numbers, all of which it embeds


def matrices_in(values: Iterable[Any]) -> list[Matrix]:
    """Return the matrices of whole numbers among *values*, the arguments of a pass."""
    found = islice(tensors_inside(values), MOST_INPUTS)
    return [Matrix(one) for one in found if _is_matrix(one)]


def taken(
    given: Sequence[Matrix], lookups: Sequence[Lookup], job: dict[str, Any], *, is_float: bool
) -> Taken:
    """Return what a pass takes. Of pictures and texts, with the pictures first, these are the pictures."""
    texts = [] if is_float else _texts(given, lookups)
    if texts:
        first = min(texts, key=lambda one: given.index(one[0]))
        rows = first[1][0]
        lengths = {shape[1] for _, shape in texts}
        others = {one.shape[1] for one in lookups if len(one.shape) == 2 and one.shape[0] == rows > 1}
        beside = tuple(sorted(others - lengths - {1}))
        tokens = sum(shape[0] * shape[1] for _, shape in texts)
        return Taken(rows, tokens, tuple(one for one, _ in texts), beside, shape=first[1])
    shape, is_embedded = job["input_shape"], bool(job.get("input_is_embedded"))
    n_rows = int(shape[0])
    if is_float or len(shape) != 2:
        is_vector = not is_float and len(shape) == 1 and any(one.shape == (n_rows,) for one in lookups)
        n_tokens = n_rows * int(shape[1]) if is_embedded and len(shape) == 3 else 0
        return Taken(n_rows, n_tokens, is_vector=is_vector)
    size = n_rows * int(shape[1])
    if any(one.size == size for one in lookups):  # of rows of many lengths, which are no matrix
        return Taken(n_rows, size)
    own = {matrix.numbers for matrix in given}
    by_columns = any(one.numbers in own or one.size == n_rows for one in lookups)
    return Taken(n_rows, 0, is_sure=by_columns)


def _texts(given: Sequence[Matrix], lookups: Sequence[Lookup]) -> list[tuple[Matrix, tuple[int, int]]]:
    """Return the matrices of *given* that are embedded as a whole, each with the shape of what is looked up.

    A matrix of the same shape for another table holds places or kinds of the tokens, and is none; one for the
    same table is none if its rows are added to theirs (``apart``). Where numbers were copied on the way, the
    shape tells: as many matrices of it as a table is asked for.
    """
    found: list[tuple[Matrix, tuple[int, int]]] = []
    tables: dict[tuple[int, int], int] = {}
    for matrix in given:
        own = [one for one in lookups if one.numbers == matrix.numbers and (shape := _of(one, matrix))]
        if not own:
            continue
        most = max(own, key=lambda one: one.size)
        shape = _of(most, matrix) or matrix.shape
        if tables.setdefault(shape, most.table) == most.table:
            found.append((matrix, shape))
    if found:
        return found
    asked = Counter((one.table, one.shape) for one in lookups)
    calls: dict[tuple[int, ...], int] = {}
    for (_, shape_), n in asked.items():
        calls[shape_] = max(n, calls.get(shape_, 0))
    for matrix in given:
        if calls.get(matrix.shape, 0):
            calls[matrix.shape] -= 1
            found.append((matrix, matrix.shape))
    return found


def _of(lookup: Lookup, matrix: Matrix) -> tuple[int, int] | None:
    """Return what *lookup* takes of *matrix*: rows by tokens, None if it takes single columns."""
    rows, length = matrix.shape
    if lookup.size == rows * length:
        return matrix.shape
    if len(lookup.shape) == 2 and lookup.shape[1] > 1 and lookup.size < rows * length:
        return lookup.shape[0], lookup.shape[1]
    return None


def install(session: State) -> None:
    """Tell ``session.learning`` what tables are asked for."""
    import torch

    @replaces(torch)
    def embedding(original: Any, weight: Any, indices: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(weight, indices, *args, **kwargs)
        session.learning.looked_up(weight, indices, out)
        return out


def lookup_of(weight: Any, indices: Any) -> Lookup:
    """Return that the table *weight* is asked for *indices*; of distributed tensors, what this rank has."""
    own = getattr(indices, "_local_tensor", indices)
    own = own.values() if getattr(own, "is_nested", False) else own
    return Lookup(_storage(weight), _storage(own), tuple(int(side) for side in own.shape))


def _storage(tensor: Any) -> int:
    return storage_key(getattr(tensor, "_local_tensor", tensor))


def _is_matrix(tensor: Any) -> bool:
    """Whether *tensor* is a matrix of whole numbers, as of tokens; a mask of truth values is none."""
    return (
        len(tensor.shape) == 2
        and hasattr(tensor, "_is_view")
        and not tensor.is_nested
        and not tensor.is_floating_point()
        and tensor.element_size() > 1
    )


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
        is_float: whether that is no whole numbers.
        given: matrices of whole numbers among its arguments.
        lookups: what it embeds.
        sums: which of that it adds to each other.
    """

    def __init__(self, model: int, first: int) -> None:
        self.model, self.first, self.end = model, first, first
        self.has_run, self.is_frozen = True, False
        self.job: dict[str, Any] = {}  # what ``RunInfo.job`` has of its input, nothing if it is not known
        self.is_float, self.given = False, list[Matrix]()
        self.lookups, self.sums = list[Lookup](), Sums()
        self.taken: Taken | None = None  # its rows and tokens, once it is over

    def take(self) -> None:
        """The call is over: find its rows and tokens."""
        if self.job:
            lookups = self.sums.apart(self.lookups)
            self.taken = taken(self.given, lookups, self.job, is_float=self.is_float)
            if self.taken.shape is not None:
                self.job = {"input_shape": [*self.taken.shape], "input_is_embedded": False}


class Learning:
    """Tells by the end of a step which of its passes a backward has followed.

    Attributes:
        n_beside: by step, its passes that train nothing, with gradients or without; none in a pipeline, whose
            stages are also called to ask for the shapes of what they send.
    """

    def __init__(self, session: State) -> None:
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
        self._running = _Pass(self.number_of(module), self._session.tape.next_number)
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
        if one is None or one.model != self.number_of(module):
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
        # An output without a node tells nothing: its pass counts as one that a backward has followed.
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
        own = None if model is None else self.number_of(model)
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

    def shapes(self) -> set[tuple[int, ...]]:
        """Return the shapes of the inputs of passes in the step that is not over."""
        return {tuple(one.job["input_shape"]) for one in self._passes if one.job}

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
        """Say what is odd about the step that is over."""
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

    def number_of(self, module: Any) -> int:
        """Return the number of the model *module*, the same with what is around it and without."""
        model = inside(module)
        if model not in self._numbers:
            own = parameters_of(model)
            same = (number for other, number in self._numbers.items() if parameters_of(other) == own)
            self._numbers[model] = next(same, self._n_models)
            self._n_models = max(self._n_models, self._numbers[model] + 1)
        return self._numbers[model]


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
