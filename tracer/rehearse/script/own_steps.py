"""Scripts that record themselves, or mark the ends of their steps, in a rehearsal."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Final

from foretrace.tracer.record import Recording, step
from foretrace.tracer.rehearse.events.lane import INPUT
from foretrace.tracer.rehearse.script import stale
from foretrace.tracer.rehearse.script.without_modules import StepsWithoutModules

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.session import RehearsalSession

NOT_YET: Final = (
    "the script contains foretrace.step(), but did not call it before the rehearsal ended: the steps are "
    "those of its optimizers (a larger --warmup rehearses further; from the first call on, the steps are "
    "those of the script)"
)
"""Note if the steps may differ from those that the script marks."""

MODULE: Final = "foretrace"


class OwnSteps(StepsWithoutModules):
    """Steps that a script may end itself: everything before its first mark is warm-up.

    Args:
        session: the rehearsal.
    """

    def __init__(self, session: RehearsalSession) -> None:
        super().__init__(session)
        self._may_tell: bool | None = None

    def optimizer_ends(self, optimizer: object) -> None:
        """An optimizer has stepped, perhaps in a loop that marks steps itself."""
        if self._may_tell is None:
            self._may_tell = names_step(sys._getframe(1))  # noqa: SLF001 - the stack of the script
        before, is_new = self._marker(), id(optimizer) in self.made
        stale.look(self._rehearsal, optimizer)
        super().optimizer_ends(optimizer)
        self._rehearsal.apart.stepped(optimizer)
        if is_new and before is not optimizer and self._marker() is optimizer:
            self._rehearsal.trainings.begin()

    def told(self) -> None:
        """The script marks the end of a step."""
        session = self._rehearsal
        n_done = self._number - (self._end is not None)
        if not self._is_told and self._number < 0:  # the model is built: this is no step
            session.kept.warm_up(session.kept.warmup + 1)
            session.kept.leave_out(1)
            session.lane.owner = ("forward", INPUT)
        elif not self._is_told and n_done:  # parts of the first step counted as steps
            session.kept.leave_out(n_done + 1)
        super().told()

    def said(self) -> list[str]:
        """Return notes about the steps, once the script has ended."""
        return [NOT_YET] if self._may_tell and not self._is_told else []


class RehearsedRecording(Recording):
    """The object that ``foretrace.record`` yields in a rehearsal; it records nothing.

    Args:
        session: the rehearsal.
        folder: where the rehearsal writes.
    """

    def __init__(self, session: RehearsalSession, folder: Path) -> None:
        super().__init__(folder, name="", flush_s=None)
        self._rehearsal = session

    def end_step(self) -> None:
        """End a step of the rehearsal: the script has called ``foretrace.step``."""
        self._rehearsal.steps.told()


def names_step(frame: FrameType | None) -> bool:
    """Whether the code of *frame*, or of one of its callers, has a name for ``foretrace.step``.

    Local variables are not read: a frame keeps the values that were read, and so keeps tensors alive.
    """
    while frame is not None:
        names, known = frame.f_code.co_names, frame.f_globals
        if any(known.get(name) is step for name in names):
            return True
        if "step" in names and any(name == MODULE or _is_module(known.get(name)) for name in names):
            return True
        frame = frame.f_back
    return False


def _is_module(value: object) -> bool:
    return isinstance(value, ModuleType) and value.__name__ == MODULE
