"""Tensors created from a list of other tensors: as on a GPU, the host reads the number of each of them."""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer.internals import makers

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.session import RehearsalSession

NAMES: Final = ("tensor", "as_tensor", "asarray")
"""Functions of torch that create a tensor from numbers."""


def install(session: RehearsalSession) -> None:
    """Read the numbers of tensors in lists one by one. torch would read memory that does not exist."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.jit import _builtins

    anywhere: Any = torch
    _mapped(session)
    _cuts()
    for name in NAMES:
        setattr(torch, name, _asking(getattr(anywhere, name)))
        _builtins._register_builtin(getattr(anywhere, name), f"aten::{name}")  # for torch.jit
    anywhere.Tensor.__new__ = staticmethod(_after_class(anywhere.Tensor.__new__))
    kind: Any = FakeTensor
    kind.new = _after_class(kind.new)


def _cuts() -> None:
    """Make ``tensor_split`` read the places of its cuts as ``tolist`` does: torch reads them from memory."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    def reading(original: Any) -> Any:
        @functools.wraps(original)
        def cut(*args: Any, **kwargs: Any) -> Any:
            named = {name: told(value) for name, value in kwargs.items() if name != "input"}
            kept = {name: kwargs[name] for name in kwargs if name == "input"}
            return original(*args[:1], *map(told, args[1:]), **named, **kept)

        return cut

    def told(places: Any) -> Any:
        return places.tolist() if isinstance(places, FakeTensor) else places

    for owner in (torch, torch.Tensor):
        anywhere: Any = owner
        anywhere.tensor_split = reading(anywhere.tensor_split)


def _mapped(session: RehearsalSession) -> None:
    """Make a tensor that is created from a storage, as by safetensors, a fake tensor on the host."""
    import torch
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    anywhere: Any = torch
    original = anywhere.asarray

    def asarray(obj: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(obj, torch.UntypedStorage):
            return original(obj, *args, **kwargs)
        dtype = kwargs.get("dtype") or torch.uint8
        with session.aside(), unset_fake_temporarily(), torch._C.DisableTorchFunction():
            real = makers().empty(0, dtype=dtype).set_(obj)
        return session.host.faked(real)

    anywhere.asarray = asarray


def numbers(data: Any) -> Any:
    """Return *data* with each tensor in it replaced by its number, if *data* is a list."""
    from torch._subclasses.fake_tensor import FakeTensor

    if not isinstance(data, list | tuple) or not _holds(data, FakeTensor):
        return data
    return [one.tolist() if isinstance(one, FakeTensor) else numbers(one) for one in data]


def _asking(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return *original*, which takes a list first, with tensors in it replaced by their numbers."""

    def made(data: Any, *args: Any, **kwargs: Any) -> Any:
        return original(numbers(data), *args, **kwargs)

    return made


def _after_class(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return *original*, which may take a list second, with tensors in it replaced by numbers."""

    def made(first: Any, *args: Any, **kwargs: Any) -> Any:
        return original(first, *map(numbers, args), **kwargs)

    return made


def _holds(data: Any, kind: type[Any]) -> bool:
    """Whether *data* is a *kind*, or a list that contains one."""
    if isinstance(data, list | tuple):
        return any(_holds(one, kind) for one in data)
    return isinstance(data, kind)
