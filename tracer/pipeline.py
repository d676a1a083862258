"""Observes the actions of ``torch.distributed.pipelining``: which stage works on which micro-batch.

All its schedules call the same three methods of a stage, whichever order they follow: forward, backward
(full, or of the input only) and backward of the weights.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer import internals
from foretrace.tracer.guarded import Replacements, between
from foretrace.tracer.records import Block, Position

if TYPE_CHECKING:
    from foretrace.tracer.session import Session

_ACTIVATIONS: Final = Block("activations")
_GRADIENTS: Final = Block("gradients")

_Action = tuple[str, int, tuple[int, int, int]]
"""An action that runs: its kind, its depth on the stack, and the place in the pipeline before it."""

_TRANSFERS: Final = (
    ("get_fwd_recv_ops", "recv", _ACTIVATIONS),
    ("get_fwd_send_ops", "send", _ACTIVATIONS),
    ("get_bwd_recv_ops", "recv", _GRADIENTS),
    ("get_bwd_send_ops", "send", _GRADIENTS),
)
"""Methods of a stage that return the transfers of one micro-batch before they are issued; what they carry."""

MOST_UPCOMING: Final = 4096
"""Announced transfers that may be outstanding; more are those of actions that never came to issue them."""

SCHEDULES: Final = {
    "ScheduleGPipe": "gpipe",
    "Schedule1F1B": "1f1b",
    "ScheduleInterleaved1F1B": "interleaved-1f1b",
    "ScheduleLoopedBFS": "looped-bfs",
    "ScheduleInterleavedZeroBubble": "interleaved-zb",
    "ScheduleZBVZeroBubble": "zb-v",
    "ScheduleDualPipeV": "dualpipe-v",
}
"""Names of torch's schedules in this project."""


class PipelineHook(Replacements):
    """Wrappers around the methods of pipeline stages and schedules."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        base, schedule = internals.pipeline_stage(), internals.pipeline_schedule()
        self._session = session
        self._upcoming: dict[tuple[str, int], tuple[Position, Block]] = {}
        self._stages: dict[int, tuple[Block, int, int]] = {}  # its block and its numbers, by its index
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._trained: dict[int, tuple[int, list[int]]] = {}  # by stage: step, chunks of each schedule
        self.replace(base, "__init__", functools.partial(self._noting, self._note_stage))
        self.replace(base, "forward_one_chunk", lambda f: self._acting(f, "forward"))
        self.replace(base, "backward_one_chunk", self._acting_backward)
        self.replace(base, "backward_weight_one_chunk", lambda f: self._acting(f, "backward_weight"))
        for name, kind, content in _TRANSFERS:
            self.replace(base, name, functools.partial(self._announcing, kind, content))
        self.replace(schedule, "__init__", functools.partial(self._noting, self._note_schedule))
        self.replace(schedule, "_maybe_compute_loss", self._losing)

    @property
    def has_stages(self) -> bool:
        """Whether there are stages, of which it is known."""
        return bool(self._stages)

    def stage_of(self, model: Any) -> int | None:
        """Return of which stage *model* is the part of the whole, None if of none."""
        return self._numbers.get(model)

    def announced(self, kind: str, tensor: Any) -> tuple[Position, Block]:
        """Return stage and micro-batch of a transfer that is being issued, and what it carries."""
        session = self._session
        found = self._upcoming.pop((kind, self._key(tensor)), None) if self._upcoming else None
        if found is None:
            return session.position, session.lane.block
        found[0].step = session.position.step
        return found

    def _acting(self, original: Any, kind: str) -> Any:
        """Wrap a method whose first argument is the number of the micro-batch."""
        begins, ends = (self._session.guarded("modules", f) for f in (self._begins, self._ends))

        def before(stage: Any, /, *args: Any, **kwargs: Any) -> _Action | None:
            return begins(stage, _microbatch(args, kwargs), kind)

        return between(before, ends)(original)

    def _acting_backward(self, original: Any) -> Any:
        """Wrap the backward of a micro-batch, which may be of the input only."""
        full, of_input = (self._acting(original, kind) for kind in ("backward", "backward_input"))

        def method(stage: Any, /, *args: Any, **kwargs: Any) -> Any:
            is_full = kwargs.get("full_backward", args[2] if len(args) > 2 else True)
            return (full if is_full else of_input)(stage, *args, **kwargs)

        return method

    def _begins(self, stage: Any, microbatch: int, kind: str, *, is_loss: bool = False) -> _Action:
        session, at = self._session, self._session.position
        before = at.stage, at.virtual_stage, at.microbatch
        known = self._stages.get(stage.stage_index)
        if known is None:  # made before the recording began
            known = self._note_stage(stage)
            session.met_model(stage.submod, ())
        if kind == "forward":
            has_gradients = session.steps.has_gradients() and getattr(stage, "has_backward", True)
            session.steps.called(stage.submod, has_gradients=has_gradients)
            if has_gradients and not is_loss:
                self._count(stage.stage_index, microbatch)
        else:
            session.steps.begin()
        session.lane.own()
        block, number, virtual_stage = known
        depth = session.lane.push(kind, block)
        at.stage, at.virtual_stage, at.microbatch = number, virtual_stage, microbatch
        if kind != "forward":
            session.backward.kind = kind
        return kind, depth, before

    def _count(self, stage: int, microbatch: int) -> None:
        """Count a forward that trains: a step may run several schedules, each from micro-batch 0 on."""
        step, chunks = self._trained.get(stage, (-1, []))
        if step != self._session.position.step:
            step, chunks = self._session.position.step, []
            self._trained[stage] = step, chunks
        if microbatch == 0 or not chunks:
            chunks.append(0)
            if len(chunks) > self._session.job.get("schedules_per_step", 1):
                self._session.note_job(schedules_per_step=len(chunks))
        chunks[-1] = max(chunks[-1], microbatch + 1)

    def microbatches_in(self, step: int) -> int:
        """Return the micro-batches that all schedules of *step*, the last one, trained."""
        return max((sum(chunks) for at, chunks in self._trained.values() if at == step), default=0)

    def _ends(self, action: _Action) -> None:
        session, (kind, depth, before) = self._session, action
        session.lane.pop(depth)
        at = session.position
        at.stage, at.virtual_stage, at.microbatch = before
        if kind != "forward":
            session.backward.kind = "backward"

    def _losing(self, original: Any) -> Any:
        """Wrap the method that computes the loss of a micro-batch, on the last stage only."""
        begins, ends = (self._session.guarded("modules", f) for f in (self._loss_begins, self._ends))
        return between(begins, ends)(original)

    def _loss_begins(
        self, _: Any, stage: Any, output: Any, targets: Any, microbatch: int, *rest: Any
    ) -> _Action:
        state = self._begins(stage, microbatch, "forward", is_loss=True)
        self._session.lane.replace("forward", Block("loss", is_glue=not stage.is_last))
        return state

    def _announcing(self, kind: str, content: Block, original: Any) -> Any:
        """Wrap a method that returns the transfers of a micro-batch: they will be known by their tensors."""
        announce = self._session.guarded("pipeline", self._announce)

        def method(stage: Any, /, *args: Any, **kwargs: Any) -> Any:
            transfers = original(stage, *args, **kwargs)
            announce(kind, content, stage, _microbatch(args, kwargs), transfers)
            return transfers

        return method

    def _announce(self, kind: str, content: Block, stage: Any, microbatch: int, transfers: Any) -> None:
        if len(self._upcoming) > MOST_UPCOMING:
            self._upcoming.clear()
        for transfer in transfers:
            position = Position(-1, *_numbers(stage, microbatch))
            self._upcoming[(kind, self._key(transfer.tensor))] = position, content

    @staticmethod
    def _key(tensor: Any) -> int:
        """Return what tells a *tensor* that is to be sent or received from others."""
        address: int = tensor.data_ptr()
        return address

    def _noting(self, note: Callable[[Any], Any], original: Any) -> Any:
        """Wrap a constructor: *note* is told of what it has made."""
        note = self._session.guarded("pipeline", note)

        def init(made: Any, /, *args: Any, **kwargs: Any) -> None:
            original(made, *args, **kwargs)
            note(made)

        return init

    def _note_stage(self, stage: Any) -> tuple[Block, int, int]:
        import torch.distributed as dist

        index = self._numbers[stage.submod] = stage.stage_index
        found = self._stages[index] = Block(f"stage {index}", is_glue=True), *_numbers(stage, -1)[:2]
        group = stage.group if stage.group is not None else dist.group.WORLD
        self._session.groups.name_axis(group, "pp")
        return found

    def _note_schedule(self, schedule: Any) -> None:
        name = type(schedule).__name__
        self._session.note_job(
            schedule=SCHEDULES.get(name, name), n_microbatches=internals.n_microbatches(schedule)
        )


def _microbatch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the first argument, which is the number of the micro-batch whatever its name."""
    return int(args[0] if args else next(iter(kwargs.values())))


def _numbers(stage: Any, microbatch: int) -> tuple[int, int, int]:
    """Return stage, virtual stage and micro-batch as the timeline numbers them."""
    return stage.stage_index, stage.stage_index // stage.group_size, microbatch
