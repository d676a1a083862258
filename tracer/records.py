"""What the hooks hand over: plain records, put together while training runs and written later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from foretrace.tracer.groups import GroupInfo
from foretrace.tracer.stamps import Stamp

P2P: Final = frozenset({"send", "recv"})
"""Kinds of point-to-point transfers."""


class Block(NamedTuple):
    """A part of the model that a person would name, and that owns time.

    Attributes:
        name: path of the module without the prefixes of wrappers, e.g. ``"layers.3.mlp"``.
        layer: number of the transformer layer, -1 if outside of one.
        is_glue: whether it mostly calls other blocks: short pieces of its own time are left out.
    """

    name: str
    layer: int = -1
    is_glue: bool = False


@dataclass(slots=True)
class Position:
    """Where in the training the process is; -1 is unknown.

    Attributes:
        step: optimizer step.
        stage, virtual_stage: stage of the pipeline action that runs.
        microbatch: micro-batch of the pipeline action that runs.
    """

    step: int = -1
    stage: int = -1
    virtual_stage: int = -1
    microbatch: int = -1


class Segment(NamedTuple):
    """A piece of compute time that one block owns."""

    kind: str
    block: Block
    start: Stamp
    end: Stamp
    step: int
    stage: int
    virtual_stage: int
    microbatch: int


class StepWindow(NamedTuple):
    """The window of one optimizer step, or of a phase that is none.

    Attributes:
        step: its number; of a phase that of the step that follows, -1 before the first.
        phase: ``"evaluation"`` or ``"checkpoint"``; empty: a step.
        is_inside: whether that step contains the phase.
    """

    step: int
    start: Stamp
    end: Stamp
    phase: str = ""
    is_inside: bool = False


@dataclass(slots=True, eq=False)
class Communication:
    """A collective, or one side of a p2p transfer.

    Attributes:
        kind: ``"all_reduce"``, ..., ``"send"``, ``"recv"``.
        group: its process group.
        sequence: its number within the group; p2p: within its direction and pair, -1 while that is not known.
        peer: global rank of the other side of a transfer, -1 for a collective; also while nobody knows whose
            message it receives.
        size_bytes: whole array as nccl-tests counts it; p2p: the message.
        dtype: e.g. ``"bf16"``.
        block: where in the model it was issued.
        position: where in the training it was issued.
        start: when it was issued.
        storages: addresses of the tensors that a waiter would ask for.
        device: index of the GPU whose tensors it is of, -1: of the processor's.
        end: when it was complete, None while nobody knows.
        work: the ``torch.distributed.Work``, None once it is complete.
        watch: what the thread that waits for it in our place tells, None if there is none.
        is_claimed: whether the training waits for it, so that no watcher may begin to.
        duration_ns: how long it ran on the device, None if its work does not tell.
        batch: others that were collected into the same work.
    """

    kind: str
    group: GroupInfo
    sequence: int
    peer: int
    size_bytes: int
    dtype: str
    block: Block
    position: tuple[int, int, int, int]
    start: Stamp
    storages: tuple[int, ...] = ()
    device: int = -1
    end: Stamp | None = None
    work: Any = None
    watch: Any = None
    is_claimed: bool = False
    duration_ns: int | None = None
    batch: tuple[Communication, ...] = ()

    @property
    def is_p2p(self) -> bool:
        """Whether it is one side of a point-to-point transfer."""
        return self.kind in P2P
