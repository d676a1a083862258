"""What a process says of itself: whether it is one of several, its process groups, what it runs on."""

from __future__ import annotations

import os
import platform
import sys
import weakref
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretrace.tracer.groups import Groups


def is_distributed() -> bool:
    """Whether this process has joined a process group."""
    if "torch.distributed" not in sys.modules:
        return False
    import torch.distributed as dist

    return bool(dist.is_available() and dist.is_initialized())


def process_groups(world_size: int) -> Groups:
    """Return the table of process groups, which asks torch about each."""
    from foretrace.tracer.groups import Groups

    def backend_of(group: Any) -> str:
        from torch.distributed import get_backend_config

        return str(get_backend_config(group))

    def ranks_of(group: Any) -> list[int]:
        from torch.distributed import get_process_group_ranks

        return [int(rank) for rank in get_process_group_ranks(group)]

    return Groups(world_size, backend_of, ranks_of)


_in_children: list[weakref.WeakMethod[Callable[[], Any]]] = []
"""What is called in forked children: Python never forgets what it is told to call there."""


def in_children(method: Callable[[], Any]) -> None:
    """Have a method called in each forked child, for as long as its object lives: that is not kept alive."""
    if not _in_children:
        os.register_at_fork(after_in_child=_tell_children)
    _in_children[:] = [known for known in _in_children if known() is not None]
    _in_children.append(weakref.WeakMethod(method))


def _tell_children() -> None:
    for known in _in_children:
        if (living := known()) is not None:
            living()


def versions() -> dict[str, str]:
    """Return the versions of what made the run."""
    import torch

    try:
        own = version("foretrace")
    except PackageNotFoundError:  # run from a checkout
        own = "unknown"
    return {"foretrace": own, "torch": str(torch.__version__), "python": platform.python_version()}
