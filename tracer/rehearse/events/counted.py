"""Counts the memory of what operators make, by what it is for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from foretrace.tracer.rehearse.gpu.memory import OF_KIND
from foretrace.tracer.rehearse.operators.calls import tensors_in

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.session import RehearsalSession


class Counted:
    """The memory of new tensors.

    Args:
        session: the rehearsal.
    """

    def __init__(self, session: RehearsalSession) -> None:
        self._session = session

    def category(self) -> str:
        """Return what a tensor is for that is made now."""
        category, lane = OF_KIND[self._session.lane.owner[0]], self._session.lane
        between = not lane.depth and category != "parameters"  # the parts of a step
        return "activations" if between else category

    def made(self, out: Any, operands: Sequence[Any] = ()) -> None:
        """Count the memory of new tensors, which are where the *operands* are that they were made of."""
        session, category, fused = self._session, self.category(), self._session.fused
        call = fused.inside() if fused.is_used and session.position.step >= 0 else -1
        for tensor in (out,) if hasattr(out, "untyped_storage") else tensors_in(out):
            if _is_meta(tensor):
                continue
            storage = tensor.untyped_storage()
            if session.memory.add(storage, category, is_written=call < 0):
                if call >= 0:
                    fused.memory.made(tensor, category, call)
                session.meter.made()

    def gathered(self, tensors: Any) -> None:
        """Count the memory of *tensors* as that of gathered parameters."""
        for tensor in tensors_in(tensors):
            self._session.memory.add(tensor.untyped_storage(), "gathered")
            self._session.memory.move(tensor.untyped_storage(), "gathered")


def _is_meta(tensor: Any) -> bool:
    """Whether *tensor* was asked for on the meta device, and so has no memory anywhere."""
    device = getattr(tensor, "fake_device", None)
    return device is not None and device.type == "meta"
