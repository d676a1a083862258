"""What recording needs of torch, and how it is said in one line that a torch has not got it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from foretrace.tracer.errors import RecordError

OLDEST: Final = (2, 6)
"""The oldest torch that recording was tried with, as ``pyproject.toml`` says."""

TRIED: Final = "2.6 to 2.15"
"""Versions of torch that recording was tried with."""

NEEDED: Final = (
    "_C._dispatch_keyset_full_after",
    "autograd._engine_run_backward",
    "autograd.Variable._execution_engine.queue_callback",
    "library.Library.impl",
    "nn.modules.module.register_module_forward_hook",
)
"""Names of torch without which nothing is recorded, as attributes of ``torch``."""

NEEDED_DISTRIBUTED: Final = (
    "distributed.ProcessGroup.unbox",
    "distributed.Work.unbox",
    "distributed.distributed_c10d._get_default_store",
    "ops._c10d_functional.wait_tensor",
)
"""The same for a process that has joined a process group."""


def missing(names: Iterable[str]) -> list[str]:
    """Return those of *names* that the torch of this process does not have."""
    import torch

    def has(name: str) -> bool:
        found: Any = torch
        for part in name.split("."):
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True

    return [name for name in names if not has(name)]


def check(*, in_group: bool) -> None:
    """Raise RecordError if torch is too old, or lacks a name that recording needs.

    Args:
        in_group: whether this process has joined a process group.
    """
    import torch

    if tuple(int(part) for part in str(torch.__version__).split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise RecordError(f"torch {torch.__version__} is too old: recording needs {oldest} or newer")
    if lacking := missing(NEEDED + (NEEDED_DISTRIBUTED if in_group else ())):
        raise RecordError(
            f"torch {torch.__version__} has no torch.{lacking[0]}, which recording needs; "
            f"it was tried with torch {TRIED}"
        )
