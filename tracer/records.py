"""What the hooks hand over: plain records, put together while training runs and written later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from foretrace.tracer.groups import GroupInfo
from foretrace.tracer.stamps import Stamp

P2P: Final = frozenset({"send", "recv"})  # kinds of point-to-point transfers


class Block(NamedTuple):
    """A part of the model that a person would name, and that owns time."""

    name: str  # path of the module without the prefixes of wrappers, e.g. ``"layers.3.mlp"``
    layer: int = -1  # number of the transformer layer, -1 if outside of one
    is_glue: bool = False  # whether it mostly calls other blocks: short pieces of its own time are left out


@dataclass(slots=True)
class Position:
    """Where in the training the process is; -1 is unknown."""

    step: int = -1  # optimizer step
    stage: int = -1  # of the pipeline action that runs
    virtual_stage: int = -1  # likewise
    microbatch: int = -1  # micro-batch of the pipeline action that runs


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
    """The window of one optimizer step, or of a phase that is none."""

    step: int  # its number; of a phase that of the step that follows, -1 before the first
    start: Stamp
    end: Stamp
    phase: str = ""  # ``"evaluation"`` or ``"checkpoint"``; empty: a step
    is_inside: bool = False  # whether that step contains the phase


@dataclass(slots=True, eq=False)
class Launch:
    """What a GPU runs beside the current stream as one: a communication, or a batch of them."""

    work: Any  # its ``Work``, None once somebody has waited for it or it was found complete
    # the communications, in the order of their issue; () once their end is noted
    members: tuple[Communication, ...]
    # wall-clock time before and after the call that launched it, as ``time.time_ns`` has it
    called: tuple[int, int]
    returned_ns: int  # when that call was over, on the clock of this process
    start: Stamp  # where the stream that issued it came to the last of its members: it began no earlier
    is_batch: bool  # whether its members were collected, be it one
    from_ns: int = 0  # time before which it did not begin, as far as the flight recorder tells
    before: Stamp | None = None  # where a stream came that waits for it, None while none has been seen to
    waited_ns: int = 0  # when the end of that wait was stamped, on the clock of this process
    duration_ns: int | None = None  # how long it ran on the device, None if nobody has told
    # its start, its end, and whether these are bounds only; None while that is not known
    times: tuple[int, int, bool] | None = None


@dataclass(slots=True, eq=False)
class Communication:
    """A collective, or one side of a p2p transfer."""

    kind: str  # ``"all_reduce"``, ..., ``"send"``, ``"recv"``
    group: GroupInfo  # its process group
    # its number within the group; p2p: within its direction and pair, -1 while that is not known
    sequence: int
    # global rank of the other side of a transfer, -1 for a collective; also while nobody knows whose message
    # it receives
    peer: int
    size_bytes: int  # whole array as nccl-tests counts it; p2p: the message
    dtype: str  # e.g. ``"bf16"``
    block: Block  # where in the model it was issued
    position: tuple[int, int, int, int]  # where in the training it was issued
    start: Stamp  # when it was issued
    storages: tuple[int, ...] = ()  # addresses of the tensors that a waiter would ask for
    device: int = -1  # index of the GPU whose tensors it is of, -1: of the processor's
    end: Stamp | None = None  # when it was complete, None while nobody knows
    work: Any = None  # the ``torch.distributed.Work``, None once it is complete
    claimed_ns: int = 0  # when the training began to wait for it, so that no watcher may begin to; 0: never
    # what it is part of on a GPU, None on a processor and on the stream that is current
    launch: Launch | None = None
    is_bound: bool = False  # whether it may have started later than its span does, or ended earlier

    @property
    def is_p2p(self) -> bool:
        """Whether it is one side of a point-to-point transfer."""
        return self.kind in P2P
