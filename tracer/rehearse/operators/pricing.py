"""Finds the work of operator calls, once for calls with the same shapes."""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer.rehearse.gpu import tensor_float
from foretrace.tracer.rehearse.hints import STUB
from foretrace.tracer.rehearse.operators import layouts
from foretrace.tracer.rehearse.operators.calls import Call, tensors_in
from foretrace.tracer.rehearse.operators.ordered import is_elementwise, strides_of, unordered
from foretrace.tracer.rehearse.operators.work import Work
from foretrace.tracer.rehearse.operators.works import BY_NUMBERS, GROUPED, work_of
from foretrace.tracer.rehearse.words import asker

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.session import RehearsalSession


BY_STRIDES: Final = frozenset({"aten.mm", "aten.addmm"})
"""Operators whose work depends on the strides of matrices; that of element-wise ones does, too."""


class Pricing:
    """Finds the work of calls.

    Args:
        session: the rehearsal.
    """

    def __init__(self, session: RehearsalSession) -> None:
        self._session = session
        self._numbers: dict[Any, int] = {}
        self._conversions: dict[Any, int] = {}
        self._found_empty = False

    def number(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
        """Return the number of the work of a call on the tape."""
        is_rounded = tensor_float.is_asked(name)
        ends = self._ends(name, args, kwargs)
        by_strides = name in BY_STRIDES or is_elementwise(name, func)
        strides = strides_of((args, out)) if by_strides else ()
        key = (func, _signature(args), _signature(out), ends, is_rounded, strides)
        if key not in self._numbers:
            work = self.work(name, func, args, kwargs, out)
            work = tensor_float.rounded(work) if is_rounded else work
            if work.kind == "gemm" and not work.flops and not self._found_empty:
                self._found_empty = True
                self._session.warn(
                    f"{asker()}: a matrix product with an empty operand ({work.shapes}): check the numbers "
                    f"that the script was given, and set those that decide sizes in a stub ({STUB})"
                )
            self._numbers[key] = self._session.tape.number_of(work)
        return self._numbers[key]

    def conversion(
        self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> int:
        """Return the number of the work of the copies between layouts around a convolution, -1 for none."""
        strides = tuple(tensor.stride() for tensor in tensors_in((args, kwargs)))
        is_rounded = tensor_float.is_asked(name)
        key = (func, _signature(args), _signature(tuple(kwargs.values())), strides, is_rounded)
        if key not in self._conversions:
            call = _call(name, func, args, kwargs, out)
            work = layouts.conversion(call, tensor_float.type_of(layouts.type_of(call), name))
            self._conversions[key] = -1 if work is None else self._session.tape.number_of(work)
        return self._conversions[key]

    def work(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Work:
        """Return the work of a call."""
        work = work_of(_call(name, func, args, kwargs, out)._replace(ends=self._ends(name, args, kwargs)))
        if work.kind == "memory" and is_elementwise(name, func) and (n_elements := unordered(args, out)):
            return work._replace(m=n_elements, aligned=False)
        return work

    def _ends(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
        """Return where the rows of each expert or sequence end, nothing if it is unknown."""
        if name not in BY_NUMBERS:
            return ()
        given = [one for one in (*args[2:], *kwargs.values()) if _is_list_of_whole(one)]
        wanted = given[:1] if name in GROUPED else given[:2]
        return tuple(number for tensor in wanted for number in self._known(tensor))

    def _known(self, tensor: Any) -> tuple[int, ...]:
        """Return the numbers in *tensor*, nothing if they are unknown."""
        numbers = self._session.stated.numbers
        real = numbers.of(tensor)
        if real is None:
            return ()
        with numbers.really():
            return tuple(real.tolist())


def _call(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Call:
    names = [argument.name for argument in func._schema.arguments]
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    positional = (*args, *(value for key, value in kwargs.items() if key != "out"))
    return Call(name, positional, named, out)


def _is_list_of_whole(value: Any) -> bool:
    """Whether *value* is a one-dimensional tensor of integers."""
    return hasattr(value, "element_size") and value.dim() == 1 and not value.dtype.is_floating_point


def _signature(values: Any) -> Any:
    """Return what the work of a call depends on: shapes, dtypes, and whole numbers such as dimensions.

    Floating-point numbers, such as a learning rate, change nothing.
    """
    if hasattr(values, "element_size"):
        return (values.shape, values.dtype)
    if isinstance(values, list | tuple):
        return tuple(map(_signature, values))
    return values if values is None or isinstance(values, int | str) else 0
