"""What the hooks hand over: plain records, put together while training runs and written later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from foretrace.tracer.groups import GroupInfo
from foretrace.tracer.stamps import Stamp

P2P: Final = frozenset({"send", "recv"})  # kinds of point-to-point transfers


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
    """A piece of compute time that one block owns, on one stream."""

    kind: str
    block: Block
    start: Stamp
    end: Stamp
    step: int
    stage: int
    virtual_stage: int
    microbatch: int
    stream: str


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
class Launch:
    """What a GPU runs beside the current stream as one: a communication, or a batch of them.

    Attributes:
        work: its ``Work``, None once somebody has waited for it or it was found complete.
        members: the communications, in the order of their issue; () once their end is noted.
        called: wall-clock time before and after the call that launched it, as ``time.time_ns`` has it.
        returned_ns: when that call was over, on the clock of this process.
        start: where the stream that issued it came to the last of its members: it began no earlier.
        is_batch: whether its members were collected, be it one.
        from_ns: time before which it did not begin, as far as the flight recorder tells.
        before: where a stream came that waits for it, None while none has been seen to.
        waited_ns: when the end of that wait was stamped, on the clock of this process.
        duration_ns: how long it ran on the device, None if nobody has told.
        times: its start, its end, and whether these are bounds only; None while that is not known.
    """

    work: Any
    members: tuple[Communication, ...]
    called: tuple[int, int]
    returned_ns: int
    start: Stamp
    is_batch: bool
    from_ns: int = 0
    before: Stamp | None = None
    waited_ns: int = 0
    duration_ns: int | None = None
    times: tuple[int, int, bool] | None = None


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
        launch: what it is part of on a GPU, None on a processor and on the stream that is current.
        is_bound: whether it may have started later than its span does, or ended earlier.
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
    launch: Launch | None = None
    is_bound: bool = False

    @property
    def is_p2p(self) -> bool:
        """Whether it is one side of a point-to-point transfer."""
        return self.kind in P2P
