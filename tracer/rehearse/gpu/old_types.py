"""Tensor types of older scripts that name a GPU: ``torch.cuda.FloatTensor`` and the like, and ``x.new``.

A CPU build of torch refuses to create tensors of these types, and to convert tensors to them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.gpu.placement import Placement

NAMES: Final = {
    "HalfTensor": "float16",
    "BFloat16Tensor": "bfloat16",
    "FloatTensor": "float32",
    "DoubleTensor": "float64",
    "BoolTensor": "bool",
    "ByteTensor": "uint8",
    "CharTensor": "int8",
    "ShortTensor": "int16",
    "IntTensor": "int32",
    "LongTensor": "int64",
}
"""Dtypes by the names of tensor types."""

PREFIX: Final = "torch.cuda."


class OldType(type):
    """Metaclass of the GPU tensor types: calling such a type creates a tensor on the device."""

    dtype: Any
    placement: Placement
    is_cuda = True

    def __call__(cls, *args: Any) -> Any:
        """Return a tensor of the size, or with the elements, of *args*."""
        import torch

        if len(args) == 1 and not isinstance(args[0], int | torch.Size):
            return torch.as_tensor(args[0], dtype=cls.dtype, device="cuda")
        size = args[0] if args and isinstance(args[0], torch.Size) else args or (0,)
        return torch.empty(size, dtype=cls.dtype, device="cuda")

    def __instancecheck__(cls, value: Any) -> bool:
        from torch._subclasses.fake_tensor import FakeTensor

        is_fake = type(value) is FakeTensor and value.dtype == cls.dtype
        return is_fake and cls.placement.told(value) is not None


class HostType:
    """A tensor type of the host, such as ``torch.FloatTensor``, that also takes lists of fake tensors.

    Args:
        original: torch's own type.
        numbers: returns a list with its tensors replaced by their numbers.
    """

    def __init__(self, original: Any, numbers: Callable[[Any], Any]) -> None:
        self.original, self._numbers = original, numbers

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return a tensor of the size, or with the elements, of *args*."""
        return self.original(*map(self._numbers, args), **kwargs)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, self.original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)

    def __or__(self, other: Any) -> Any:  # in annotations, as of transformers: torch.LongTensor | None
        return self.original | other

    def __ror__(self, other: Any) -> Any:
        return other | self.original


def install(placement: Placement) -> None:
    """Put the types into ``torch.cuda``, and accept them as the default tensor type.

    Args:
        placement: knows where tensors are.
    """
    import torch

    anywhere: Any = torch
    for name, dtype in NAMES.items():
        found = OldType(name, (), {"dtype": getattr(torch, dtype), "placement": placement})
        found.__module__ = PREFIX.rstrip(".")
        setattr(anywhere.cuda, name, found)
    anywhere.set_default_tensor_type = _default(anywhere.set_default_tensor_type)
    _beside(placement)


def _beside(placement: Placement) -> None:
    """Make ``x.new_tensor(numbers)`` and ``x.new(numbers)`` create a tensor in the place of *x*."""
    from torch._subclasses.fake_tensor import FakeTensor

    kind: Any = FakeTensor

    def following(original: Callable[..., Any]) -> Callable[..., Any]:
        def made(self: Any, *args: Any, **kwargs: Any) -> Any:
            found = original(self, *args, **kwargs)
            if kwargs.get("device") is None and type(found) is kind:
                (placement.put if placement.holds(self) else placement.leave)(found)
            return found

        return made

    kind.new, kind.new_tensor = following(kind.new), following(kind.new_tensor)


def _default(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return the replacement of ``torch.set_default_tensor_type``."""
    import torch

    def set_default(kind: Any) -> None:
        dtype = _dtype(kind)
        if dtype is None:
            found = getattr(torch, kind.removeprefix("torch."), kind) if isinstance(kind, str) else kind
            original(found.original if isinstance(found, HostType) else found)
        else:
            torch.set_default_dtype(dtype)
        torch.set_default_device(None if dtype is None else "cuda")

    return set_default


def _dtype(kind: Any) -> Any:
    """Return the dtype of the GPU tensor type *kind*, None if it is another type."""
    import torch

    if isinstance(kind, OldType):
        return kind.dtype
    name = kind.removeprefix(PREFIX) if isinstance(kind, str) and kind.startswith(PREFIX) else ""
    return getattr(torch, NAMES[name]) if name in NAMES else None


def as_move(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the ``Tensor.to`` call that is equal to a call of ``Tensor.type`` with a GPU tensor type."""
    import torch

    given = args[1] if len(args) > 1 else kwargs.get("dtype")
    if isinstance(given, HostType):
        given, args = given.original, (args[0], given.original, *args[2:])
        kwargs.pop("dtype", None)
    dtype = _dtype(given)
    if dtype is None:
        return func, args, kwargs
    is_free = bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
    return torch.Tensor.to, (args[0], torch.device("cuda"), dtype), {"non_blocking": is_free}
