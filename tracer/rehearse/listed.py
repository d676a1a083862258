"""Tensors that are made of a list of others: as on a GPU, the host asks each of them for its number."""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

NAMES: Final = ("tensor", "as_tensor", "asarray")
"""Functions of torch that make a tensor of numbers."""


def install() -> None:
    """Have tensors in lists asked for their numbers one by one; torch would look where they are kept."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.jit import _builtins

    anywhere: Any = torch

    def numbers(data: Any) -> Any:
        if isinstance(data, list | tuple):
            return [numbers(one) for one in data] if _holds(data, FakeTensor) else data
        return data.tolist() if isinstance(data, FakeTensor) else data

    def asking(original: Callable[..., Any]) -> Callable[..., Any]:
        def made(data: Any, *args: Any, **kwargs: Any) -> Any:
            return original(numbers(data) if isinstance(data, list | tuple) else data, *args, **kwargs)

        return made

    for name in NAMES:
        setattr(torch, name, asking(getattr(anywhere, name)))
        _builtins._register_builtin(getattr(anywhere, name), f"aten::{name}")  # for what torch scripts later


def _holds(data: Any, kind: type[Any]) -> bool:
    """Whether *data* is one of *kind*, or a list in which there is one."""
    if isinstance(data, list | tuple):
        return any(_holds(one, kind) for one in data)
    return isinstance(data, kind)
