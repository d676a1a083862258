"""Numbers that a script writes one by one to a tensor of the host, as a loop that fills a batch does.

For each of them PyTorch makes a view and calls an operator, which a rehearsal takes up to a millisecond to
follow; a batch may have a hundred thousand. But what the host does to single numbers takes no time, and is
not recorded. So all that is left to do is to write the number where those of the tensor are known.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

from foretrace.tracer.rehearse.values.numbers import Numbers

SHARED: Final = frozenset({"torch.int64", "torch.int32", "torch.float32", "torch.float64", "torch.bool"})
"""Types of tensors of which arrays share the numbers."""

NUMBERS: Final = (int, float, bool)
"""What is written; a tensor would have to be read."""


def install(session: Any) -> None:
    """Do ``tensor[place] = number`` here where that can be done, else as torch does it."""
    from torch._subclasses.fake_tensor import FakeTensor

    host, stated, kept = session.host, session.stated, Kept(session.stated.numbers)
    kind: Any = FakeTensor
    original = kind.__setitem__

    def is_written(tensor: Any, place: Any, number: Any) -> bool:
        if type(number) not in NUMBERS or tensor.requires_grad or not host.holds(tensor):
            return False
        places = place if type(place) is tuple else (place,)
        return _is_inside(places, tensor.shape) and kept.is_written(tensor, places, number)

    def write(tensor: Any, place: Any, number: Any) -> None:
        if is_written(tensor, place, number):
            stated.forget_mean((tensor,))
        else:
            original(tensor, place, number)

    kind.__setitem__ = write


class Kept:
    """Writes to known *numbers*, through an array of those of the tensor that was written to last."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers
        self._last: tuple[Any, Any, Any] = (None, None, None)

    def is_written(self, tensor: Any, places: tuple[int, ...], number: float) -> bool:
        """Write *number* among those of *tensor*, if any is known; return False if it cannot."""
        held = self._numbers.held(tensor)
        if held is None:
            return True
        last, flat, array = self._last
        if last is None or last() is not tensor or flat is not held.numbers:
            array = None if held.is_shared else self._array(tensor)
            if array is None or (held := self._numbers.held(tensor)) is None:
                return False
            self._last = weakref.ref(tensor), held.numbers, array
        array[places] = number
        return True

    def _array(self, tensor: Any) -> Any | None:
        """Return the known numbers of *tensor* as an array that shares them; a rule has none to share."""
        found = self._numbers.of(tensor)
        held = self._numbers.held(tensor)
        if found is None or held is None or not hasattr(held.numbers, "untyped_storage"):
            return None
        if found.dtype.is_complex or str(found.dtype) not in SHARED:
            return None
        with self._numbers.really():
            return found.numpy()


def _is_inside(places: tuple[Any, ...], shape: tuple[int, ...]) -> bool:
    """Whether *places* are whole numbers that name one element of a tensor of that *shape*."""
    if len(places) != len(shape):
        return False
    return all(type(at) is int and -n <= at < n for at, n in zip(places, shape, strict=True))
