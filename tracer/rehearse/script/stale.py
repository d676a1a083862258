"""Optimizers that step and change nothing, since the parameters that they hold are no longer the model's.

Sharding and tensor parallelism put parameters of their own in place of a model's. An optimizer that was made
before holds the old ones, which get no gradients: a real run trains nothing, and says nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.session import RehearsalSession

STALE: Final = (
    "{name} steps, but none of its {n:,} parameters has a gradient: it changes nothing, as an optimizer that "
    "was made before parameters were replaced (fully_shard, parallelize_module)"
)
"""What to say of one; a parameter is one number, as in the size of a model."""


def look(session: RehearsalSession, optimizer: Any) -> None:
    """Say it of *optimizer*, which has stepped, in a step that is kept.

    Only of classes of torch, which take gradients from where autograd leaves them, and leave them there.
    """
    held = [one for group in optimizer.param_groups for one in group["params"] if one.numel()]
    is_kept = session.position.step >= session.kept.warmup
    if not is_kept or not held or not type(optimizer).__module__.startswith("torch.optim."):
        return
    if all(one.grad is None for one in held):
        session.warn(STALE.format(name=type(optimizer).__name__, n=sum(one.numel() for one in held)))
