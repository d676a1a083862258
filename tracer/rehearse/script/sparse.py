"""Tensors that a script makes sparse, as an evaluation of embeddings does: where they are zero is unknown.

They are kept whole. Sparse gradients, which optimizers and DDP treat otherwise, end a rehearsal (``words``).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer.rehearse.words import asker

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.session import RehearsalSession

MAKES: Final = ("to_sparse", "to_sparse_coo")
"""Methods that make a tensor sparse."""

WHOLE: Final = (
    "{where} makes a tensor sparse, which is kept whole: its memory, and what is computed of it, are those "
    "of all its elements"
)
"""What is said where that happens in a step that is kept."""


def install(session: RehearsalSession) -> None:
    """Let what would be made sparse be a copy with all elements."""
    import torch

    for name in MAKES:
        setattr(torch.Tensor, name, _whole(session, getattr(torch.Tensor, name)))


def _whole(session: RehearsalSession, original: Any) -> Any:
    from torch._subclasses.fake_tensor import FakeTensor

    @functools.wraps(original)
    def made(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, FakeTensor):
            return original(self, *args, **kwargs)
        if session.position.step >= session.kept.warmup:
            session.warn(WHOLE.format(where=asker()))
        return self.clone()

    return made
