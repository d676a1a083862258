"""Numbers that a rehearsal does not compute, in the hands of a script that may only print them.

``loss.item()`` returns an ``Unknown``: it is added, averaged and formatted like other numbers, and prints as
``nan``. Where the script needs to know what it is, the rehearsal ends with the line that does.
"""
# ruff: noqa: SLF001 - numbers know what their rehearsal knows

from __future__ import annotations

import functools
import math
import operator
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from numbers import Number
from typing import Any, Final, NoReturn, Self

from foretrace.tracer import internals
from foretrace.tracer.internals import compile_as
from foretrace.tracer.rehearse.data.stated import Stated
from foretrace.tracer.rehearse.data.truths import HOLDS, may_decide, passing, picking
from foretrace.tracer.rehearse.replacing import replaces
from foretrace.tracer.rehearse.words import asked_at, asker

ONE_BY_ONE: Final = 4096
"""Numbers of a tensor that are read one by one, since each may be told another one, as of counts."""

CALLS: Final[Mapping[str, type]] = {"__float__": float, "__complex__": complex}
"""Methods of a tensor that return a plain number, and its type."""

FINITE: Final = {"isfinite": True, "isnan": False, "isinf": False}
"""What is said of the numbers by functions of Python and NumPy."""


class Unknown(float):
    """A finite number that nobody has computed.

    Args:
        stated: says what is known of numbers.
        said: what it is, in the sentence that ends the rehearsal.
    """

    __slots__ = ("_said", "_stated")
    _said: str
    _stated: Stated

    def __new__(cls, stated: Stated, said: str) -> Self:
        """Return a number that C takes to be NaN."""
        made = super().__new__(cls, math.nan)
        made._stated, made._said = stated, said
        return made

    def need(self) -> NoReturn:
        """End the rehearsal: the script needs to know the number. Raises RehearsalError."""
        raise self._stated.needed(self._said)

    def truth(self, compare: Callable[[Any, Any], bool], other: Any) -> Any:
        """Return how the number compares with *other*, which follows only of itself and of infinity.

        Of others the smallest and the largest are as unknown as this one, so it is taken to be those.

        Raises:
            RehearsalError: it does not follow, and the script needs it.
        """
        if not isinstance(other, Number) and not hasattr(other, "__array_ufunc__"):
            return NotImplemented
        if other is self or (isinstance(other, float) and math.isinf(other)):
            return compare(0.0, 0.0 if other is self else other)
        caller = sys._getframe(1)
        if (picks := picking(caller.f_code, caller.f_lasti)) is not None:
            return compare is picks
        if (holds := passing(*asked_at())) is None:
            self.need()
        self._stated.tell(f"{asker()} compares a number: told {holds} ({HOLDS})")
        return holds

    def __bool__(self) -> bool:
        """Return the only truth that does not end the script, if there is one."""
        return bool(self.truth(operator.ne, 0.0))

    def __float__(self) -> float:
        """Return NaN where the number is only written down. Raises RehearsalError elsewhere."""
        if may_decide(*asked_at()):
            self.need()
        return math.nan

    def __int__(self) -> int:
        """Return 0 for a text, whose ``%d`` takes no NaN. Raises RehearsalError elsewhere."""
        if not _formats(sys._getframe(1)):
            self.need()
        return 0

    def __index__(self) -> int:
        """End the rehearsal, as what else makes a whole number."""
        return int(self.need())

    def _joined(self, other: Any = 0.0, *_: Any) -> Any:
        """Return what arithmetic makes of the number: one that nobody has computed either."""
        return self if isinstance(other, Number) else NotImplemented

    def _paired(self, other: Any) -> Any:
        return (self, self) if isinstance(other, Number) else NotImplemented

    def item(self) -> Self:
        """Return the number, as a scalar of NumPy does."""
        return self

    def is_integer(self) -> NoReturn:
        """End the rehearsal, as what else looks into the number."""
        self.need()

    as_integer_ratio = hex = is_integer
    __add__ = __sub__ = __mul__ = __truediv__ = __floordiv__ = __mod__ = __pow__ = _joined
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = __rpow__ = _joined
    __neg__ = __pos__ = __abs__ = __round__ = __trunc__ = __floor__ = __ceil__ = _joined
    __divmod__ = __rdivmod__ = _paired
    __lt__ = functools.partialmethod(truth, operator.lt)
    __le__ = functools.partialmethod(truth, operator.le)
    __gt__ = functools.partialmethod(truth, operator.gt)
    __ge__ = functools.partialmethod(truth, operator.ge)
    __eq__ = functools.partialmethod(truth, operator.eq)
    __ne__ = functools.partialmethod(truth, operator.ne)

    def __hash__(self) -> int:
        """Return who it is."""
        return id(self)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Do with NumPy's scalars what is done with Python's."""
        if ufunc.__name__ in FINITE:
            return FINITE[ufunc.__name__]
        if method != "__call__" or kwargs or any(getattr(one, "ndim", 0) for one in inputs):
            self.need()
        compare = getattr(operator, {"less": "lt", "greater": "gt"}.get(ufunc.__name__, ""), None)
        return self if compare is None else compare(*map(_plain, inputs))

    def __format__(self, how: str) -> str:
        """Return ``nan``, as wide as *how* says; that of whole numbers, too."""
        # Types of whole numbers take no NaN.
        return format(math.nan, how.rstrip("bcdoxXn"))

    def __repr__(self) -> str:
        """Return ``nan``, as ``str`` does."""
        return "nan"

    __str__ = __repr__

    def __copy__(self, *_: Any) -> Self:
        """Return the number itself."""
        return self

    __deepcopy__ = __copy__

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be NaN in another process."""
        return float, ("nan",)


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def install(stated: Stated) -> None:
    """Let tensors of which nothing is known return such numbers."""
    import torch

    @replaces(torch.Tensor)
    def item(original: Any, self: Any) -> Any:
        with stated.reading() as read:
            found = original(self)
        return Unknown(stated, read.said) if read.said else found

    def tolist(self: Any) -> Any:
        if self.numel() <= ONE_BY_ONE or stated.of(self).mean is not None:
            return self.item() if not self.dim() else [tolist(one) for one in self.unbind()]
        own = stated.numbers.of(self)
        first = self.reshape(-1)[0].item()
        if own is None:
            return filled(first, self.shape).tolist()
        with stated.numbers.really():
            return own.tolist()

    internals.fake_tensor().tolist = tolist
    for name, kind in CALLS.items():
        setattr(torch.Tensor, name, _plainly(getattr(torch.Tensor, name), kind))
    for name, function in vars(math).items():
        if isinstance(getattr(float, f"__{name}__", None), types.MethodDescriptorType):
            # It asks the number's own method. An exporter of torch insists on the C function.
            setattr(torch.Tensor, f"__{name}__", _rounded(function))
        elif callable(function) and not isinstance(function, type):
            setattr(math, name, _of_python(function))
            compile_as(function, getattr(math, name))


def filled(number: Any, shape: Sequence[int]) -> Any:
    """Return an array of *shape* of which each element is *number*; its type is that of objects."""
    found = _arrays()(tuple(shape), dtype=object)
    found.fill(number)
    return found


@functools.cache
def _arrays() -> Any:
    """Return a class of arrays of objects that NumPy may ask whether they are finite, as it may no others."""
    import numpy as np

    class Numbers(np.ndarray[Any, Any]):
        __array_priority__ = 1.0  # so that what is put together of such arrays is one

        def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
            if ufunc.__name__ in FINITE:
                return np.reshape([bool(ufunc(one)) for one in self.flat], self.shape)
            if "out" in kwargs:
                kwargs["out"] = tuple(map(np.asarray, kwargs["out"]))
            given = (np.asarray(one) if isinstance(one, Numbers) else one for one in inputs)
            found = getattr(ufunc, method)(*given, **kwargs)
            return found.view(Numbers) if isinstance(found, np.ndarray) and found.dtype.hasobject else found

    return Numbers


def _plainly(original: Callable[[Any], Any], kind: type) -> Callable[[Any], Any]:
    """Return the method *original* of a tensor, which makes a plain number of the *kind*."""

    def made(self: Any) -> Any:
        if self.numel() != 1:
            return original(self)  # which says so
        found = self.detach().item()
        is_text = type(found) is Unknown and _formats(sys._getframe(1))
        return kind(math.nan if is_text else found)

    return made


def _rounded(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the method of a tensor that *function* of ``math`` asks."""
    return lambda self: function(self.item())


def _formats(frame: Any) -> bool:
    """Whether *frame* formats a text by ``%`` now."""
    import dis

    # ``%`` is a BINARY_OP; what else asks for a whole number, as ``int``, is a call.
    name: str = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    return name.startswith("BINARY")


def _of_python(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return *original*, a function of ``math``, of a number that nobody has computed another such one."""

    @functools.wraps(original)
    def made(*args: Any, **kwargs: Any) -> Any:
        if not any(hasattr(one, "untyped_storage") or type(one) is Unknown for one in args):
            return original(*args, **kwargs)
        args = tuple(one.item() if hasattr(one, "untyped_storage") else one for one in args)
        unknown = next((one for one in args if type(one) is Unknown), None)
        if unknown is None:
            return original(*args, **kwargs)
        return FINITE.get(original.__name__, unknown)

    return made
