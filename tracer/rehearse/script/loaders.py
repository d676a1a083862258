"""Data loaders: how many rows they deliver in a step, which ones, and whether one has no batch at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from foretrace.tracer.inputs import tensors_inside
from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.script.marks import Mark, mark_of

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
    """A batch of a loader.

    Attributes:
        rows: of its first tensor, 0 if it has none.
        samples: of the data set, 0 if that is not known.
    """

    rows: int
    samples: int

    @property
    def size(self) -> int:
        """How many samples it has; a data set may also be made of batches."""
        return self.samples if self.samples > 1 else self.rows


MOST_IN_VAIN: Final = 100
"""Times that a loader without batches is asked before that is said to go on for ever."""


class Loaded:
    """Counts the rows that each loader delivers in a step.

    Args:
        position: where the training is.

    Attributes:
        dealt: by loader, ``dealt_by`` of it.
        lacking: by loader, ``uneven_of`` it.
        marks: by step, what tells each batch from others, in the order of their delivery.
        shapes: of the tensors in the last batch that has some.
    """

    def __init__(self, position: Any) -> None:
        self._position = position
        self._given: dict[int, dict[int, list[_Batch]]] = {}  # by step and loader
        self.dealt: dict[int, dict[str, int]] = {}
        self.lacking: dict[int, dict[str, Any]] = {}
        self.marks: dict[int, list[Mark]] = {}
        self.shapes: list[list[int]] = []

    def note(self, loader: int, batch: Any, indices: Sequence[Any] | None = None) -> None:
        """Count a *batch* of the loader with the number *loader*: the samples *indices* of its data set."""
        tensors = [one for one in tensors_inside([batch]) if len(one.shape)]
        found = _Batch(int(tensors[0].shape[0]) if tensors else 0, len(indices) if indices else 0)
        if found.size:
            self._given.setdefault(self._position.step, {}).setdefault(loader, []).append(found)
            self.marks.setdefault(self._position.step, []).append(mark_of(tensors, indices))
            plain = [list(map(int, one.shape)) for one in tensors if not getattr(one, "is_nested", False)]
            self.shapes = plain or self.shapes

    def fits(self, rows: int, step: int) -> bool:
        """Whether an input of so many *rows* may be what a loader gives in *step*, or an equal part of it."""
        given = [one for batches in self._given.get(step, {}).values() for one in batches]
        return not given or any(rows in one or (rows and one.size % rows == 0) for one in given)

    def counted(self, shape: Sequence[int], rows: int, step: int) -> tuple[int, str, bool]:
        """Return the rows of *step* that throughput counts, a note about them, and whether they are known.

        Args:
            shape: of the model's input, which has no tokens.
            rows: that all passes of the model are given.
            step: number of the step.
        """
        given = self._given.get(step, {})
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
        """Return the samples of *step* and of the step *before* if a loader gives half of them at most.

        The batch of the first step comes before that has begun.
        """
        earlier: dict[int, int] = {}
        for at in (before, before - 1) if before == 0 else (before,):
            for loader, batches in self._given.get(at, {}).items():
                earlier[loader] = earlier.get(loader, 0) + sum(one.size for one in batches)
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
