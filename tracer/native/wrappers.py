"""Functions of torch whose place compiled ones take: waits, backward passes, actions of pipelines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foretrace.tracer.backward import BackwardHook
from foretrace.tracer.pipeline import PipelineHook
from foretrace.tracer.records import Block

if TYPE_CHECKING:
    from foretrace.tracer.native.hooks import Native
    from foretrace.tracer.session import Session


class NativeWaitHook:
    """``Work.wait`` that tells what is over by it, and that its time is not compute.

    Args:
        native: the compiled hooks.
    """

    def __init__(self, native: Native) -> None:
        import torch.distributed as dist

        self._work_type: Any = dist.Work
        self._original = dist.Work.wait
        self._work_type.wait = native.module.waiting(self._original)

    def remove(self) -> None:
        """Give ``Work.wait`` back as it was."""
        self._work_type.wait = self._original


class NativeBackwardHook(BackwardHook):
    """Notes when a backward pass begins and ends, and who owns its time.

    Args:
        session: the recording.
        native: the compiled hooks.
    """

    def __init__(self, session: Session, native: Native) -> None:
        self._native = native.module
        super().__init__(session)

    @property
    def ends_with_graph(self) -> bool:
        """Whether something waits in C++ after the last node, as the reducer of DDP does."""
        return self._ends_with_graph

    @ends_with_graph.setter
    def ends_with_graph(self, ends: bool) -> None:
        self._ends_with_graph = ends
        self._native.end_with_graph(ends)

    def _running(self, original: Any) -> Any:
        return self._native.running_backward(original)


class NativePipelineHook(PipelineHook):
    """The methods of pipeline stages and schedules, with compiled ones around them.

    Args:
        session: the recording.
        native: the compiled hooks.
    """

    def __init__(self, session: Session, native: Native) -> None:
        self._native = native.module
        super().__init__(session)
        native.met_stage = self._met_stage

    def _acting(self, original: Any, kind: str) -> Any:
        return self._native.acting(original, kind)

    def _acting_backward(self, original: Any) -> Any:
        return self._native.acting_backward(original)

    def _losing(self, original: Any) -> Any:
        return self._native.losing(original)

    def _announcing(self, kind: str, content: Block, original: Any) -> Any:
        return self._native.announcing(original, kind == "send", content)

    def _met_stage(self, stage: Any) -> None:
        self._note_stage(stage)
        self._session.met_model(stage.submod, ())

    def _note_stage(self, stage: Any) -> tuple[Block, int, int]:
        block, number, virtual_stage = found = super()._note_stage(stage)
        loss = Block("loss", is_glue=not stage.is_last)
        self._native.learn_stage(stage.stage_index, block, loss, number, virtual_stage)
        return found
