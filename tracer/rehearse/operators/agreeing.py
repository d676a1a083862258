"""Checks that operands have equal dtypes where a GPU kernel requires it; fake tensors do not check it.

A product of fp32 and bf16 succeeds with fake tensors, but is an error of the kernel in a real run. So it must
be an error in a rehearsal too. The casts of autocast happen before these checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from foretrace.tracer.rehearse.values.questions import Kernel

ALIKE: Final[Mapping[str, tuple[int, ...]]] = MappingProxyType(
    {
        "aten.mm": (0, 1),
        "aten.bmm": (0, 1),
        "aten.addmm": (1, 2, 0),
        "aten.baddbmm": (1, 2, 0),
        "aten.mv": (0, 1),
        "aten.addmv": (1, 2, 0),
        "aten.convolution": (0, 1, 2),
        "aten.native_layer_norm": (0, 2, 3),
        "aten.native_group_norm": (0, 1, 2),
        "aten.index_add": (0, 3),
        "aten.index_add_": (0, 3),
        "aten.index_copy": (0, 3),
        "aten.index_copy_": (0, 3),
        "aten.index_put_": (0, 2),
    }
)
"""By operator, the operands that must have the same dtype. CUDA kernels read all of them in one dtype; those
of a CPU accept fp32 weights of a norm with inputs of fewer bits."""

CLASSES: Final = frozenset({"aten.nll_loss_forward", "aten.nll_loss2d_forward"})
"""Losses whose second operand names classes: int64 or uint8 (``nll_loss_out_frame`` in NLLLoss.cu)."""


def checking(name: str, handler: Kernel) -> Kernel:
    """Return the *handler* of the operator *name* with a check of the dtypes of its operands.

    The result raises RuntimeError if a GPU would.
    """
    if name in CLASSES:
        return _of_classes(name, handler)
    places = ALIKE.get(name)
    return handler if places is None else _alike(name, places, handler)


def _alike(name: str, places: tuple[int, ...], handler: Kernel) -> Kernel:
    first, *others = places

    def checked(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dtype = args[first].dtype
        for at in others:
            other = args[at] if at < len(args) else None
            if other is not None and other.dtype is not dtype and not _may_differ(func, at):
                types = f"{_word(dtype)} and {_word(other.dtype)}"
                raise RuntimeError(
                    f"{name} of {types}: on a GPU both must have the same dtype; cast one, or use autocast"
                )
        return handler(func, args, kwargs)

    return checked


def _may_differ(func: Any, at: int) -> bool:
    """Whether operand *at* is added to a product of another dtype (``addmm(..., out_dtype=)``)."""
    return not at and "dtype" in func._overloadname  # noqa: SLF001 - has no public name


def _of_classes(name: str, handler: Kernel) -> Kernel:
    def checked(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        word = _word(args[1].dtype)
        if word not in {"int64", "uint8"}:
            raise RuntimeError(f"{name} needs class indices in int64, not {word}: cast them with .long()")
        return handler(func, args, kwargs)

    return checked


def _word(dtype: Any) -> str:
    return str(dtype).rpartition(".")[2]
