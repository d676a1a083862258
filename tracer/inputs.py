"""Tensors among the arguments of a model, also in a batch that is one of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

MOST_ENTRIES: Final = 16
"""Entries of a list or mapping in which a tensor is looked for: a batch has few parts."""

MOST_VALUES: Final = 64
"""Values of what a module takes or returns that are looked at for a tensor: the first of them has one."""

MOST_DEEP: Final = 3  # lists and mappings inside of each other in which a tensor is looked for
N_EMBEDDED: Final = 3  # sides of an input of embedded tokens: rows, tokens and the width of a token


def tensors_inside(values: Iterable[Any], depth: int = MOST_DEEP) -> Iterator[Any]:
    """Yield the tensors among *values*, then those in lists, tuples and mappings among them.

    >>> from types import SimpleNamespace
    >>> tokens = SimpleNamespace(shape=(8, 16))
    >>> next(tensors_inside([0, [{"tokens": tokens}]])) is tokens
    True
    """
    values = tuple(values)
    yield from (value for value in values if hasattr(value, "shape"))
    if not depth:
        return
    for value in values:
        if isinstance(value, list | tuple | Mapping) and not hasattr(value, "shape"):
            entries = value.values() if isinstance(value, Mapping) else value
            yield from tensors_inside(islice(entries, MOST_ENTRIES), depth - 1)


def first_of(values: Any) -> Iterable[Any]:
    """Return the first of *values*, without a word of code of a class that somebody has made of a list.

    Only a tuple, list or dict is asked what it holds: anything else may be without end, costly to make, or
    gone for the training once it was asked for. It is returned alone.
    """
    if isinstance(values, dict):
        return islice(dict.values(values), MOST_VALUES)
    for kind in (list, tuple):
        if isinstance(values, kind):
            return kind.__getitem__(values, slice(MOST_VALUES))  # type: ignore[index]
    return (values,)


def input_of(values: Iterable[Any]) -> Any:
    """Return the tensor among *values* that tells rows and tokens: the first, or the tokens behind labels.

    Arguments by name may begin with one number per row, as with the labels of texts; then it is the first
    matrix of whole numbers with as many rows.

    >>> from types import SimpleNamespace
    >>> labels, tokens = SimpleNamespace(shape=(8,)), SimpleNamespace(shape=(8, 16))
    >>> input_of([{"labels": labels, "input_ids": tokens}]) is tokens
    True
    """
    found = list(islice(tensors_inside(values), MOST_ENTRIES))
    if not found or len(found[0].shape) != 1:
        return found[0] if found else None
    rows = found[0].shape[0]
    return next((one for one in found[1:] if _is_matrix_of_numbers(one) and one.shape[0] == rows), found[0])


def _is_matrix_of_numbers(tensor: Any) -> bool:
    """Whether *tensor* has two dimensions and holds whole numbers, as tokens are."""
    return len(tensor.shape) == 2 and not getattr(tensor, "is_floating_point", bool)()


class Sides(NamedTuple):
    """What layers of a model expect of a side of their input."""

    channels: frozenset[int]  # numbers of channels that convolutions of one dimension take
    widths: frozenset[int]  # widths that linear layers take

    def are_channels(self, shape: Sequence[int]) -> bool:
        """Whether the second side of an input of *shape* is channels, as of spectra or clouds of points.

        A model of embedded tokens has a layer for the width of a token, the last side.

        >>> sides = Sides(channels=frozenset({80}), widths=frozenset({512}))
        >>> sides.are_channels((2, 80, 63)), sides.are_channels((2, 80, 512)), sides.are_channels((2, 80))
        (True, False, False)
        """
        return len(shape) == N_EMBEDDED and shape[1] in self.channels and shape[2] not in self.widths


def sides_of(model: Any) -> Sides:
    """Return the sides that the layers of *model*, a ``torch.nn.Module``, expect."""
    from torch.nn import Conv1d, ConvTranspose1d, Linear

    layers = tuple(model.modules())
    convolutions = (one for one in layers if isinstance(one, Conv1d | ConvTranspose1d))
    linear = (one for one in layers if isinstance(one, Linear))
    return Sides(
        frozenset(int(one.in_channels) for one in convolutions),
        frozenset(int(one.in_features) for one in linear),
    )
