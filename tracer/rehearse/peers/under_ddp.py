"""Puts the reducer of a rehearsal under ``DistributedDataParallel``, in place of that of torch."""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer.rehearse.events.tape import HOST_WAIT
from foretrace.tracer.rehearse.peers.buckets import Bucket, Logger
from foretrace.tracer.rehearse.peers.reducer import Reducer

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.session import RehearsalSession

BEGINS: Final = ("start_powerSGD_iter", "start_localSGD_iter")
"""What hooks of torch keep the step in which they begin."""

LATER: Final = (
    "the hook of DistributedDataParallel begins in step {start} only ({name}): in the steps that are kept "
    "whole gradients are summed over all ranks; --warmup {start} keeps a later one, or let it begin earlier"
)
"""What to say of a hook that begins after the steps that are kept."""


def install(session: RehearsalSession) -> None:
    """Let DDP take this reducer, and send what it sends from C++ from here."""
    import torch.distributed as dist
    from torch.nn.parallel import distributed as module

    anywhere: Any = dist
    anywhere.Reducer, anywhere.Logger = _reducer_of(session), Logger
    anywhere._broadcast_coalesced = functools.partial(_broadcast, session)
    anywhere._register_comm_hook = functools.partial(_register, session)
    names: Any = module
    names._verify_param_shape_across_processes = lambda *args, **kwargs: None
    original = module.DistributedDataParallel.__init__

    @functools.wraps(original)
    def init(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        group = kwargs.get("process_group") or dist.group.WORLD
        session.backends.check("DistributedDataParallel", group, (*module.parameters(), *module.buffers()))
        original(self, module, *args, **kwargs)

    after = module.DistributedDataParallel._post_forward

    def post_forward(self: Any, output: Any) -> Any:
        if dist.is_initialized() and self.require_backward_grad_sync:
            self.reducer.note_outputs(lambda: list(names._find_tensors(output)))
        return after(self, output)

    names.DistributedDataParallel.__init__ = init
    names.DistributedDataParallel._post_forward = post_forward
    names.DistributedDataParallel._check_comm_hook = lambda self, hook: None  # asks for versions of NCCL


def _reducer_of(session: RehearsalSession) -> type[Reducer]:
    """Return the reducer of *session*."""

    class ReducerOfSession(Reducer):
        """Says how long it has buckets that are not those of later steps, and what they are for."""

        def _reduced(self, number: int) -> Any:
            with session.apart.of_ddp([self._params[at] for at in self._buckets[number]]):
                return super()._reduced(number)

        def _set_static_graph(self) -> None:
            super()._set_static_graph()
            session.kept.warm_up(2)

        def _flat(self, bucket: Sequence[int]) -> Any:
            found = super()._flat(bucket)
            session.memory.move(found.untyped_storage(), "gradients")
            return found

        def _tell(self, lengths: Sequence[int]) -> None:
            if session.kept.warmup:
                return
            super()._tell(lengths)
            session.tape.note(HOST_WAIT)

    return ReducerOfSession


def _broadcast(
    session: RehearsalSession, group: Any, tensors: Sequence[Any], size: int, src: int = 0
) -> None:
    """Send tensors as one per type, as the coalesced broadcast of C++ does up to *size* bytes."""
    import torch.distributed as dist

    del size
    by_type: dict[Any, list[Any]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.dtype, []).append(tensor)
    for dtype, found in by_type.items():
        flat = found[0].new_empty(sum(tensor.numel() for tensor in found), dtype=dtype)
        with session.apart.of_ddp():
            dist.broadcast(flat, dist.get_global_rank(group, src), group=group)


def _register(
    session: RehearsalSession, reducer: Reducer, state: Any, hook: Callable[[Any, Bucket], Any]
) -> None:
    """Let *hook* reduce buckets; say so if it begins what it is for after the steps that are kept."""
    name = next((name for name in BEGINS if hasattr(state, name)), "")

    def reduced(bucket: Bucket) -> Any:
        last = session.kept.warmup + session.kept.n_steps - 1
        if name and state.iter + last - session.position.step < (start := getattr(state, name)):
            session.warn(LATER.format(name=name, start=start))
        return hook(state, bucket)

    reducer.hook = reduced
