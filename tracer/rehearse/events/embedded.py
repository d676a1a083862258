"""Which whole numbers of its input a pass embeds: those are tokens, as far as they are looked up as a whole.

A matrix of whole numbers may be rows of tokens, but also columns of a table, each with an embedding of its
own, or the edges of a graph. So tokens are counted where a table is asked for all of a row. Of a model that a
loss or another module is given, and calls for several texts, these are the tokens of each text.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from foretrace.tracer.inputs import tensors_inside
from foretrace.tracer.rehearse.operators.calls import storage_key

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.session import RehearsalSession

MOST_INPUTS: Final = 64
"""Tensors among the arguments of a pass that are looked at."""


class Lookup(NamedTuple):
    """A table is asked for rows.

    Attributes:
        table: identity of its storage.
        numbers: identity of the storage of the numbers of the rows.
        shape: of these numbers.
    """

    table: int
    numbers: int
    shape: tuple[int, ...]

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
    """What a pass takes.

    Attributes:
        rows: the rows of its input.
        tokens: the tokens in them, 0 if it has none.
        texts: the matrices of tokens.
        beside: lengths of sequences that it embeds, and that are not among those of the texts.
        is_sure: false if its input is a matrix of whole numbers of which nothing was seen to be embedded.
        shape: of its first text, of what is embedded of it; None if there is none.
        is_vector: whether its input is one row of whole numbers, all of which it embeds.
    """

    rows: int
    tokens: int
    texts: tuple[Matrix, ...] = ()
    beside: tuple[int, ...] = ()
    is_sure: bool = True
    shape: tuple[int, int] | None = None
    is_vector: bool = False


def matrices_in(values: Iterable[Any]) -> list[Matrix]:
    """Return the matrices of whole numbers among *values*, the arguments of a pass."""
    found = islice(tensors_inside(values), MOST_INPUTS)
    return [Matrix(one) for one in found if _is_matrix(one)]


def taken(
    given: Sequence[Matrix], lookups: Sequence[Lookup], job: dict[str, Any], *, is_float: bool
) -> Taken:
    """Return what a pass takes. Of pictures and texts, with the pictures first, these are the pictures.

    Args:
        given: matrices of whole numbers among its arguments.
        lookups: what it embeds.
        job: what ``RunInfo.job`` has of its input, by its shape alone.
        is_float: whether its input is no whole numbers.
    """
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
    same table is none if its rows are added to theirs (``summed``). Where numbers were copied on the way, the
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


def install(session: RehearsalSession) -> None:
    """Tell ``session.learning`` what tables are asked for."""
    import torch

    anywhere: Any = torch
    original, learning = anywhere.embedding, session.learning

    @functools.wraps(original)
    def embedding(weight: Any, indices: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(weight, indices, *args, **kwargs)
        learning.looked_up(weight, indices, out)
        return out

    anywhere.embedding = embedding


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
