"""Parameters that each rank trains alone: DDP has them not, and nothing is sent that could hold them.

A script that wraps a part of its model, or leaves a loss with parameters outside, runs without an error, and
its ranks come to have different models. That is said only where it is certain: where other tensors of numbers
are sent beside what DDP sends, these may be gradients that the script reduces itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.session import RehearsalSession

FEW: Final = 16
"""Numbers that no parameter needs to be looked for in: losses, norms, counts."""

PARTLY: Final = "DistributedDataParallel reduces the gradients of {n:,} of {n_all:,} trained parameters"
APART: Final = (
    "each rank trains {which} on its own, and the ranks drift apart unless other steps average them: nothing "
    "of that size is sent in the steps that are kept"
)
"""What is said of parameters that DDP has not; a parameter is one number, as in the size of a model."""

SAID_OF_ALL: Final = APART.partition("{")[0]
"""How it begins, which is of all steps that are kept: one that sends takes it back."""


class Apart:
    """Holds what is trained in a step against what is sent in it.

    Args:
        session: the rehearsal.
    """

    def __init__(self, session: RehearsalSession) -> None:
        self._session = session
        self._is_ddps, self._sends, self._has_sent = False, False, False
        self._reduced: set[int] = set()
        self._trained: dict[int, int] = {}
        self._is_sharded = False

    @contextmanager
    def of_ddp(self, parameters: Sequence[Any] = ()) -> Iterator[None]:
        """Let what is sent be DDP's for a while: its buffers, or gradients of *parameters*."""
        self._reduced.update(map(id, parameters))
        before, self._is_ddps = self._is_ddps, True
        try:
            yield
        finally:
            self._is_ddps = before

    def sent(self, tensor: Any, n_ranks: int) -> None:
        """*tensor* is sent to some of *n_ranks*: it may hold parameters or gradients.

        Whole numbers of 4 or 8 bytes are not what these are packed into.
        """
        is_number = tensor.is_floating_point() or tensor.is_complex() or tensor.element_size() < 4
        self._sends |= n_ranks > 1 and not self._is_ddps and is_number and tensor.numel() > FEW

    def stepped(self, optimizer: Any) -> None:
        """*optimizer* steps now."""
        from torch.distributed.fsdp import FlatParameter
        from torch.distributed.tensor import DTensor

        trained = [one for group in optimizer.param_groups for one in group["params"]]
        for one in trained:
            if one.grad is not None:
                self._trained[id(one)] = one.numel()
                self._is_sharded |= isinstance(one, DTensor | FlatParameter)

    def step_ended(self, *, is_kept: bool) -> None:
        """A step is over: say what is certain of all that were kept so far, if it is kept."""
        session = self._session
        if is_kept and self._sends and not self._has_sent:
            self._has_sent = True
            session.notes[:] = [note for note in session.notes if not note.startswith(SAID_OF_ALL)]
        n_all = sum(self._trained.values())
        n = sum(size for number, size in self._trained.items() if number in self._reduced)
        is_said = is_kept and n < n_all and session.world_size > 1 and not self._is_sharded
        if is_said and n:
            session.warn(PARTLY.format(n=n, n_all=n_all))
        if is_said and not self._has_sent and _is_joined():
            session.warn(APART.format(which=f"the other {n_all - n:,}" if n else f"all {n_all:,} parameters"))
        self._sends, self._is_sharded = False, False
        self._reduced.clear()
        self._trained.clear()


def _is_joined() -> bool:
    """Whether ranks could tell each other anything."""
    import torch.distributed as dist

    return bool(dist.is_initialized())
