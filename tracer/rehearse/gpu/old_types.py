"""Types of tensors by which older scripts name a GPU: ``torch.cuda.FloatTensor`` and its like, and ``x.new``.

torch built for processors refuses to make any of them, and to change a tensor into one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tracer.rehearse.gpu.placement import Placement

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
"""Types of elements by the names of types of tensors."""

PREFIX: Final = "torch.cuda."


class OldType(type):
    """The type of such a type: calling one makes a tensor on the device."""

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
    """Such a type of the host, as ``torch.FloatTensor``, which reads no numbers out of fake tensors.

    Args:
        original: what torch has.
        numbers: returns a list with numbers in place of tensors.
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
    """Offer the types in ``torch.cuda``, and let one of them be the default.

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
    """Let ``x.new_tensor(numbers)`` and ``x.new(numbers)`` make a tensor where *x* is."""
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
    """Return what sets the type of tensors that are made without one."""
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
    """Return the type of elements of a *kind* of tensors of the GPU, None if it is another."""
    import torch

    if isinstance(kind, OldType):
        return kind.dtype
    name = kind.removeprefix(PREFIX) if isinstance(kind, str) and kind.startswith(PREFIX) else ""
    return getattr(torch, NAMES[name]) if name in NAMES else None


def as_move(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the call that a call of ``Tensor.type`` with such a type stands for: a move of the tensor."""
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
