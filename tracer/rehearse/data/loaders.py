"""Data loaders: their batches, made in this process, then fake; how many rows a step has, and which ones."""

from __future__ import annotations

import functools
import hashlib
import inspect
import random
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from foretrace.tracer import internals
from foretrace.tracer.inputs import tensors_inside
from foretrace.tracer.internals import be_worker, seed_of_numpy
from foretrace.tracer.rehearse.device import jagged
from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.replacing import replaces
from foretrace.tracer.rehearse.state import State

# What tells a batch from others, so that ranks can be asked whether they load the same rows.

MOST_TENSORS: Final = 8
"""Tensors of a batch that are looked at."""

MOST_NUMBERS: Final = 1 << 16
"""Numbers of a tensor that are looked at, of its first rows."""


class Mark(NamedTuple):
    """What tells a batch from others."""

    indices: str  # a digest of the places of its samples in their data set, "" if these are not known
    content: str  # one of its numbers, "" if its rows are all alike, as made-up ones may be


def mark_of(tensors: Sequence[Any], indices: Sequence[Any] | None) -> Mark:
    """Return what tells a batch of these real *tensors*, the samples *indices* of a data set, from others."""
    known = [str(one) for one in indices or () if one is not None]
    arrays = [one for one in map(_first_rows, tensors[:MOST_TENSORS]) if one is not None]
    varied = any(len(one) > 1 and bool((one[1:] != one[:1]).any()) for one in arrays)
    return Mark(
        _digest(one.encode() for one in known), _digest(_bytes(one) for one in arrays) if varied else ""
    )


def _digest(parts: Iterable[bytes]) -> str:
    found = hashlib.sha256()
    n_parts = 0
    for part in parts:
        found.update(part + b";")
        n_parts += 1
    return found.hexdigest()[:16] if n_parts else ""


def _bytes(array: Any) -> bytes:
    return f"{array.dtype} {array.shape} ".encode() + bytes(array.tobytes())


def _first_rows(tensor: Any) -> Any:
    """Return the first rows of *tensor* as an array, None if it has no numbers or NumPy not its type."""
    if type(tensor).__name__ == "FakeTensor":
        return None
    try:
        array = tensor.detach().numpy()
    except (TypeError, RuntimeError, AttributeError, NotImplementedError):
        return None
    if not array.size:
        return None
    # Two at least: whether rows differ is asked of them.
    return array[: max(MOST_NUMBERS * len(array) // array.size, 2)]


AGAIN: Final = (
    "the model processes the {rows:,} rows of a step {n} times, as a discriminator or a model of several "
    "views does: throughput counts them once"
)
SAMPLES: Final = (
    "the model is given {rows:,} rows for the {n:,} samples that a loader gives in a step, as of several "
    "views, or nodes of graphs: throughput counts the samples"
)
SEVERAL: Final = (
    "loaders give {n} samples in a step, and the model is given {rows:,} rows: how many samples are in "
    "them is not known"
)
NO_TOKENS: Final = (
    "no embedding looks up the matrix of whole numbers that is the model's input: these are not counted as "
    "tokens"
)
FRAMES: Final = (
    "the model's input is {width} fractions at each of {n} places of a row, as of frames, patches or "
    "embedded tokens: throughput counts each place as a token"
)
"""Notes about what throughput counts."""


MOST_TOLD: Final = 64
"""Batches of a rank that it tells of."""

TEXTS: Final = 2
"""Sides of a batch of tokens."""


class _Batch(NamedTuple):
    """A batch of a loader."""

    rows: int  # of its first tensor, 0 if it has none
    samples: int  # of the data set, 0 if that is not known

    @property
    def size(self) -> int:
        """How many samples it has; a data set may also be made of batches."""
        return self.samples if self.samples > 1 else self.rows


MOST_IN_VAIN: Final = 100
"""Times that a loader without batches is asked before that is said to go on for ever."""


class Loaded:
    """Counts the rows that each loader delivers for a step.

    Args:
        position: where the training is.

    Attributes:
        marks: by step, what tells each batch from others, in the order of their delivery.
    """

    def __init__(self, position: Any) -> None:
        self._position = position
        self._given: dict[int, dict[int, list[_Batch]]] = {}  # by step and loader
        # those that no pass was given yet, each with the step in which it was delivered, -1: in none
        self._waiting: list[tuple[int, int, _Batch, Mark]] = []
        self.dealt: dict[int, dict[str, int]] = {}  # by loader, ``dealt_by`` of it
        self.lacking: dict[int, dict[str, Any]] = {}  # by loader, ``uneven_of`` it
        self.marks: dict[int, list[Mark]] = {}
        self.shapes: list[list[int]] = []  # of the tensors in the last batch that has some

    def note(self, loader: int, batch: Any, indices: Sequence[Any] | None = None) -> None:
        """Count a *batch* of the loader with the number *loader*: the samples *indices* of its data set."""
        tensors = [one for one in tensors_inside([batch]) if len(one.shape)]
        found = _Batch(int(tensors[0].shape[0]) if tensors else 0, len(indices) if indices else 0)
        if found.size:
            self._waiting.append((self._position.step, loader, found, mark_of(tensors, indices)))
            plain = [list(map(int, one.shape)) for one in tensors if not getattr(one, "is_nested", False)]
            self.shapes = plain or self.shapes

    def used(self, step: int, *, is_over: bool = False) -> None:
        """Count for *step* what waits, as a pass of it begins; if it *is_over*, what was delivered in it."""
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            at, loader, batch, mark = one
            if is_over and max(at, 0) != step:
                self._waiting.append(one)
                continue
            self._given.setdefault(step, {}).setdefault(loader, []).append(batch)
            self.marks.setdefault(step, []).append(mark)

    def left_out(self) -> None:
        """What has been delivered is of no step: a pass of an evaluation begins."""
        self._waiting.clear()

    def fits(self, rows: int, step: int) -> bool:
        """Whether an input of so many *rows* may be what a loader gives in *step*, or an equal part of it."""
        given = [one for batches in self._given.get(step, {}).values() for one in batches]
        return not given or any(rows in one or (rows and one.size % rows == 0) for one in given)

    def counted(self, shape: Sequence[int], rows: int, step: int) -> tuple[int, str, bool]:
        """Return the rows of *step* that throughput counts, a note about them, and whether they are known."""
        given = self._given.get(step, {})
        # Loaders whose batches the model is given as they are, by the number of rows.
        plain = [batches for batches in given.values() if batches[0].rows == batches[0].size == shape[0]]
        own = [sum(one.rows for one in batches) for batches in plain]
        if own:
            most = max(own)
            said = AGAIN.format(rows=most, n=rows // most) if most < rows else ""
            return min(most, rows), said, True
        sizes = [sum(one.size for one in batches) for batches in given.values()]
        if len(sizes) == 1 and sizes[0] < rows:
            return sizes[0], SAMPLES.format(rows=rows, n=sizes[0]), True
        said = SEVERAL.format(n=" and ".join(map(str, sizes)), rows=rows) if len(sizes) > 1 else ""
        return rows, said, not said

    def told(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a rank tells of its batches: a digest of each, and whether the model is given them.

        Of the loaders of the last step, ``dealt`` is to how many ranks rows are dealt out, by who says so. A
        text may be given without its last token, which is only predicted.
        """
        shape = list(job.get("input_shape") or [])
        longer = [*shape[:-1], shape[-1] + 1] if len(shape) == TEXTS else shape
        marks = [list(mark) for step in sorted(self.marks) for mark in self.marks[step]]
        used = self._given[max(self._given)] if self._given else {}
        dealt = {words: n for loader in used for words, n in self.dealt.get(loader, {}).items()}
        is_batch = shape in self.shapes or longer in self.shapes
        return {"batches": marks[:MOST_TOLD], "is_batch": is_batch, "dealt": dealt}

    def uneven(self) -> list[dict[str, Any]]:
        """Return ``uneven_of`` the loaders of the last step that has a batch."""
        used = self._given[max(self._given)] if self._given else {}
        return [found for loader in used if (found := self.lacking.get(loader))]

    def shrunk(self, step: int, before: int) -> tuple[int, int] | None:
        """Return the samples of *step* and of the step *before* if a loader gives half of them at most."""
        given = self._given.get(before, {}).items()
        earlier = {loader: sum(one.size for one in batches) for loader, batches in given}
        for loader, batches in self._given.get(step, {}).items():
            size = sum(one.size for one in batches)
            if 2 * size <= earlier.get(loader, 0):
                return size, earlier[loader]
        return None

    def only(self, step: int) -> int:
        """Return the samples of *step* if one loader has given some, else 0."""
        given = [*self._given.get(step, {}).values()]
        return sum(one.size for one in given[0]) if len(given) == 1 else 0


def is_tokens(job: Mapping[str, Any]) -> bool:
    """Whether the input that *job* describes has tokens, by its shape."""
    return len(job.get("input_shape") or []) == (3 if job.get("input_is_embedded") else 2)


DEALERS: Final = ("num_replicas", "num_processes")
"""Attributes of samplers that say to how many ranks they deal rows out."""


def dealt_by(loader: Any) -> dict[str, int]:
    """Return to how many ranks the samplers of *loader* deal rows out, by the names of what says so."""
    found = {}
    for sampler in (getattr(loader, name, None) for name in ("sampler", "batch_sampler", "dataset")):
        for name in DEALERS:
            if type(n := getattr(sampler, name, None)) is int:
                found[f"{type(sampler).__name__}.{name}"] = n
    return found


def uneven_of(loader: Any) -> dict[str, Any]:
    """Return what does not come out even in an epoch of *loader*, nothing if all does or nobody knows.

    ``rows`` in the data set, those ``repeated`` by a sampler so that all ranks have as many, those in the
    ``last`` batch of a rank if it has fewer than ``batch_size``, and whether that ``is_dropped``.
    """
    try:
        sampler, rows, size = loader.sampler, len(loader.sampler), loader.batch_size
        n_all = len(loader.dataset)
    except (TypeError, NotImplementedError, AttributeError):
        return {}
    # Below 0 for a sampler that drops the rows that do not come out even.
    repeated = getattr(sampler, "total_size", n_all) - n_all
    last = rows % size if type(size) is int and size else 0
    if repeated <= 0 and not last:
        return {}
    return {
        "rows": n_all,
        "repeated": max(repeated, 0),
        "batch_size": size,
        "last": last,
        "is_dropped": bool(loader.drop_last),
    }


class AskedInVain:
    """Counts how often a script asks loaders that have no batch, until one gives it one."""

    def __init__(self) -> None:
        self._n = 0

    def given(self) -> None:
        """A loader has given a batch."""
        self._n = 0

    def again(self, said: str) -> None:
        """Another one without batches was asked, of which ``without_batches`` *said* why.

        Raises:
            RehearsalError: it was asked too often.
        """
        self._n += 1
        if self._n >= MOST_IN_VAIN:
            raise RehearsalError(f"{said}; the script asks again and again for one ({self._n} times so far)")


def without_batches(loader: Any) -> str:
    """Return a note if a ``DataLoader`` has no batch for this rank, else nothing.

    A loader over a stream of unknown length counts as one that has batches.
    """
    try:
        if len(loader):
            return ""
        rows = len(loader.sampler)
    except (TypeError, NotImplementedError):
        return ""
    ending = (
        f", and less than a batch of {loader.batch_size} is dropped (drop_last)" if loader.drop_last else ""
    )
    return f"a DataLoader has no batch: {rows:,} rows are left for this rank{ending}"


# Batches of ``torch.utils.data.DataLoader`` in a rehearsal: made in this process, then fake.


_ALONE: Final = {
    "num_workers": 0,
    "prefetch_factor": None,
    "persistent_workers": False,
    "timeout": 0,
    "pin_memory": False,
    "pin_memory_device": "",
}
"""Attributes of a loader without worker processes, of which a rehearsal has none."""


class _Worker:
    """What a worker process of a loader has for itself: random numbers, and the knowledge that it is one.

    Args:
        seed: that the loader has drawn.
        dataset: that the worker reads.
    """

    def __init__(self, seed: int, dataset: Any) -> None:
        import numpy as np
        import torch

        self._seed, self._dataset = seed, dataset
        self._random, self._torch = np.random, torch.default_generator
        # The states of the script are kept before the worker seeds its own.
        self._apart, self._is_inside = self._drawn(), True
        # From here on as ``_worker_loop`` does for the first worker (torch/utils/data/_utils/worker.py).
        be_worker(seed, dataset)
        random.seed(seed)
        np.random.seed(seed_of_numpy(seed))
        self._torch.manual_seed(seed)

    def enter(self) -> None:
        """Go on as the worker, unless that is so."""
        if not self._is_inside:
            self._turn()
            be_worker(self._seed, self._dataset)

    def leave(self) -> None:
        """Go on as the script, unless that is so."""
        if self._is_inside:
            self._turn()
            be_worker(None)

    def _drawn(self) -> tuple[Any, ...]:
        return random.getstate(), self._random.get_state(), self._torch.get_state()

    def _turn(self) -> None:
        """Exchange the states of all generators for those kept."""
        self._is_inside = not self._is_inside
        (of_python, of_numpy, of_torch), self._apart = self._apart, self._drawn()
        random.setstate(of_python)
        self._random.set_state(of_numpy)
        self._torch.set_state(of_torch)


class _Iterators:
    """Iterators over the batches of loaders, and what is known of each.

    Attributes:
        pins: whether the batches of a loader, or of an iterator, are in pinned memory.
        owners: the number of the loader of an iterator.
        drawn: the places of the samples of its next batch.
        workers: the worker of an iterator of such a loader.
    """

    def __init__(self) -> None:
        self.pins: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self.owners: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.drawn: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.crowds: weakref.WeakSet[Any] = weakref.WeakSet()  # loaders whose batches worker processes make
        self.workers: weakref.WeakKeyDictionary[Any, _Worker] = weakref.WeakKeyDictionary()
        self.asked = AskedInVain()  # counts loaders without batches that are asked for some


def install(session: State) -> None:
    """Load data as the script does, in this process; of batches, only small integers stay known."""
    iterators = _Iterators()
    _make_loaders(session, iterators)
    _give_batches(session, iterators)


def _make_loaders(session: State, iterators: _Iterators) -> None:
    """Make loaders without processes of their own, and note what they iterate with."""
    from torch.utils.data import DataLoader

    positions = list(inspect.signature(DataLoader.__init__).parameters)[1:]

    @replaces(DataLoader, name="__init__")  # libraries that copy a loader read its signature
    def init(made: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        # By position, too: else pinned memory that is asked for so would not be pinned.
        names = dict(zip(positions, args, strict=False)) | kwargs
        iterators.pins[self] = bool(names.get("pin_memory"))
        made(self, **names)  # torch checks what goes together
        vars(self).update(_ALONE)  # of these it refuses some where they are set after that
        self.multiprocessing_context = None
        if names.get("num_workers"):
            iterators.crowds.add(self)

    @replaces(internals.loader_iterator(), name="__init__")
    def begin(began: Any, self: Any, loader: Any) -> None:
        began(self, loader)
        if loader in iterators.crowds:
            iterators.workers[self] = _Worker(internals.seed_of_loader(self), loader.dataset)
            if loader.worker_init_fn is not None:
                loader.worker_init_fn(0)

    @replaces(DataLoader, name="__iter__")
    def iterate(iterated: Any, self: Any) -> Any:
        with internals.without_fakes():
            found = iterated(self)
        if worker := iterators.workers.get(found):
            worker.leave()
        if said := without_batches(self):
            session.warn(said)
            iterators.asked.again(said)
        iterators.pins[found], iterators.owners[found] = iterators.pins.get(self, False), id(self)
        session.trainings.loaded.dealt[id(self)] = dealt_by(self)
        session.trainings.loaded.lacking[id(self)] = uneven_of(self)
        return found


def _give_batches(session: State, iterators: _Iterators) -> None:
    """Give batches as fake tensors, and note which samples they are."""
    import torch

    @replaces(internals.loader_iterator(), name="_next_index")
    def next_index(draws: Any, self: Any) -> Any:
        worker = iterators.workers.get(self)
        if worker:
            worker.leave()  # samplers draw in the process of the script
        try:
            found = draws(self)
        finally:
            if worker:
                worker.enter()
        if isinstance(found, list | tuple):
            iterators.drawn[self] = found
        return found

    @replaces(internals.loader_iterator(), name="__next__")
    def next_batch(following: Any, self: Any) -> Any:
        session.host.doing.is_loading = True
        worker = iterators.workers.get(self)
        if worker:
            worker.enter()
        try:
            with internals.without_fakes():
                batch = following(self)
                iterators.asked.given()
                owner = iterators.owners.get(self, 0)
                session.trainings.loaded.note(owner, batch, iterators.drawn.pop(self, None))
        finally:
            session.host.doing.is_loading = False
            if worker:
                worker.leave()
        is_pinned = bool(iterators.pins.get(self)) and torch.cuda.is_available()
        faked = functools.partial(_loaded, session, is_pinned=is_pinned)
        return internals.map_only(torch.Tensor, faked, batch)


def _loaded(session: State, tensor: Any, *, is_pinned: bool) -> Any:
    """Return the fake tensor for *tensor* of a batch, in pinned memory if the loader *is_pinned*."""
    if tensor.is_nested:
        parts = functools.partial(_loaded, session, is_pinned=is_pinned)
        return jagged.of_parts(tensor, parts, parts)
    found = session.host.faked(tensor)
    return session.host.pin(found) if is_pinned and session.host.holds(found) else found
