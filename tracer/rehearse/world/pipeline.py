"""Pipelines in a rehearsal: stages get the shapes of their inputs without communication."""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foretrace.tracer import internals
from foretrace.tracer.pipeline import PipelineHook
from foretrace.tracer.records import Block, Position
from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.state import State


class RehearsedPipeline(PipelineHook):
    """The recorder's hook for pipelines, for tensors that have no address."""

    def announced(self, kind: str, tensor: Any) -> tuple[Position, Block]:
        """Return stage and micro-batch of a transfer that is being issued, and what is sent."""
        found = super().announced(kind, tensor)
        if found[0].step < 0 and found[0] is not self._session.position:
            found[0].step = 0  # of the first step, if before its first forward
        return found

    @staticmethod
    def _key(tensor: Any) -> int:
        return id(tensor)


class StageShapes:
    """Shapes that stages send to each other, since no other rank can be asked.

    The input of a stage is the output of the stage before, if a rank that holds it has been rehearsed; else
    that of the first stage, which in a transformer is the same for all but the last. The process that started
    the rehearsals compares these assumptions with what is sent.

    """

    def __init__(self, session: State) -> None:
        self.found: dict[int, Any] = {}  # outputs of the stages of this rank, by stage
        self.taken: dict[int, Any] = {}  # inputs that were assumed for stages of this rank, by stage
        self._session = session

    def install(self) -> None:
        """Replace how stages of ``torch.distributed.pipelining`` agree on shapes."""
        from torch.distributed.pipelining import stage as module

        kind, shapes = module.PipelineStage, self

        def send(stage: Any, meta: Any, dst_stage: int) -> None:
            # Forward only: the forms of gradients follow from those of the outputs.
            if dst_stage > stage.stage_index:
                shapes.tell(stage.stage_index, meta)

        def receive(stage: Any, src_stage: int) -> Any:
            if src_stage < stage.stage_index:
                return shapes.input_of(stage.stage_index)
            return internals.gradient_forms(stage)

        kind._send_meta, kind._recv_meta = send, receive
        setattr(module, "FakeTensor", ())  # noqa: B010 - a stage leaves fake parameters where they are: ours move
        self._let_vote(kind, module)

    @staticmethod
    def _let_vote(kind: Any, module: Any) -> None:
        """Let each stage decide for itself whether shapes are given or to be found; all decide alike."""
        import torch

        def forward_vote(stage: Any, has_backward: bool, received_acc: Any = None) -> Any:  # noqa: FBT001
            needs = module.InferenceMode.needs_dynamic(stage._user_meta, has_backward)
            return torch.tensor([0 if needs else 1], dtype=torch.int32)

        def result(stage: Any, received_result: Any = None) -> Any:
            if received_result is not None:
                return received_result
            needs = module.InferenceMode.needs_dynamic(stage._user_meta, stage.has_backward)
            return torch.tensor([0 if needs else 1], dtype=torch.int32)

        kind._warmup_forward_vote, kind._warmup_backward_result = forward_vote, result

    def tell(self, stage: int, meta: Any) -> None:
        """Keep what *stage* sends, for other ranks, too."""
        self.found[stage] = meta
        self._session.letters.leave(("stage", stage), meta)

    def input_of(self, stage: int) -> Any:
        """Return the inputs of *stage*.

        Raises:
            RehearsalError: nothing is known of any stage before it.
        """
        before = {**self._session.letters.of("stage"), **self.found}
        meta = before.get(stage - 1) or next((before[s] for s in sorted(before) if s < stage), None)
        if meta is None:
            raise RehearsalError(
                f"stage {stage} on rank {self._session.rank} needs the shapes that stage {stage - 1} sends: "
                "rehearse the rank of the first stage before it, as in --ranks 0,"
                f"{self._session.rank}, or all with --ranks auto"
            )
        self.taken[stage] = meta
        return meta


def described(metas: Mapping[int, Any]) -> dict[str, list[Any]]:
    """Return shapes and dtypes of what stages send to each other, by stage."""
    return {
        str(stage): [[list(tensor.shape), str(tensor.dtype)] for tensor in meta.forward_metas]
        for stage, meta in metas.items()
    }
