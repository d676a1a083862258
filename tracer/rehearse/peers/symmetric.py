"""Operators on symmetric memory, which send and compute in one kernel.

Those of async tensor parallelism are what PyTorch says that they make: a collective and products, one after
the other. Of the others nothing says what they send.
"""
# ruff: noqa: SLF001 - such functions of torch have no public names

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer.rehearse.errors import RehearsalError

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.session import RehearsalSession

NAMESPACE: Final = "symm_mem"

FUSED: Final = frozenset(
    {
        "fused_all_gather_matmul",
        "fused_all_gather_scaled_matmul",
        "fused_matmul_reduce_scatter",
        "fused_scaled_matmul_reduce_scatter",
    }
)
"""Those that torch can also do by parts: ``_NAME_fallback`` in torch/distributed/_symmetric_memory."""

BY_PARTS: Final = (
    "operators of async tensor parallelism are taken apart: their collectives and products come one after "
    "the other, where a real run overlaps them"
)


def by_parts(session: RehearsalSession, mode: Any, func: Any) -> Any:
    """Return the handler of *func*: its parts come again, under *mode*."""
    name = func._schema.name.partition("::")[2]

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        del func
        if name not in FUSED:
            raise RehearsalError(
                f"{NAMESPACE}::{name} sends through symmetric memory, which cannot be rehearsed: run with "
                "the collective that it stands for, by an argument of the script or in a stub "
                "(--stub, docs/rehearse.md section 6)"
            )
        from torch.distributed import _symmetric_memory as module

        session.warn(BY_PARTS)
        with mode:
            return getattr(module, f"_{name}_fallback")(*args, **kwargs)

    return handler
