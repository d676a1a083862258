"""What engines of libraries ask of their peers on other ranks, which are not there."""
# ruff: noqa: SLF001 - this module takes the place of parts of libraries

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from foretrace.tracer.internals import PIPELINING

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.session import RehearsalSession


class SentMeta(NamedTuple):
    """Shape and type of a tensor."""

    shape: tuple[int, ...]
    dtype: Any


class StageMetas(NamedTuple):
    """What a stage sends to the next one."""

    forward_metas: tuple[SentMeta, ...]
    is_one: bool
    """Whether it is a tensor by itself, not a tuple of them."""


def _shapes(session: RehearsalSession) -> Any:
    """Return what is known of stages, which is put in place where pipelines of torch are imported."""
    import_module(PIPELINING)
    return session.shapes


def pipeline_of_deepspeed(session: RehearsalSession, module: Any) -> None:
    """Let stages of DeepSpeed know the shapes that come in: they read them out of a message of numbers.

    Its transfers are in the group of all ranks, and no group of it says by a name which are one pipeline.
    """
    kind: Any = module.PipelineEngine
    make = kind.__init__

    def made(engine: Any, *args: Any, **kwargs: Any) -> None:
        make(engine, *args, **kwargs)
        session.groups.name_axis(engine.grid.get_pipe_parallel_group(), "pp")
        session.groups.name_axis(engine.grid.get_data_parallel_group(), "dp")

    send, size = kind._send_tensor_meta, module.TENSOR_META_SIZE

    def sent(engine: Any, buffer: Any, stage: int) -> None:
        send(engine, buffer, stage)
        is_one = not isinstance(buffer, tuple)
        tensors = (buffer,) if is_one else buffer
        metas = tuple(SentMeta(tuple(one.shape), one.dtype) for one in tensors)
        _shapes(session).found[engine.stage_id] = StageMetas(metas, is_one)

    def received(engine: Any, stage: int) -> Any:
        import torch

        module.p2p.recv(torch.empty(size, dtype=torch.int32, device=engine.device), stage)
        metas, is_one = _shapes(session).input_of(engine.stage_id)
        buffers = [
            engine._allocate_or_extend_buffers(at, list(one.shape), one.dtype) for at, one in enumerate(metas)
        ]
        return buffers[0] if is_one else tuple(buffers)

    kind.__init__ = made
    kind._send_tensor_meta, kind._recv_tensor_meta = sent, received


def adam_of_deepspeed(session: RehearsalSession, module: Any) -> None:
    """Let DeepSpeed's fused Adam, which is compiled where there is a GPU, be torch's: one pass over all.

    It takes what ``multi_tensor_adam`` of csrc/adam/multi_tensor_adam.cu does: lists of gradients, parameters
    and states, each read once, the last three written.
    """
    import torch

    del session

    def multi_tensor_adam(_: int, flag: Any, lists: Any, lr: float, *numbers: Any) -> None:
        beta1, beta2, eps, _step, is_decoupled, _corrects, weight_decay = numbers
        gradients, parameters, *states = lists
        fused: Any = torch._fused_adamw_ if is_decoupled else torch._fused_adam_
        told = {"beta1": beta1, "beta2": beta2, "weight_decay": weight_decay, "eps": eps}
        with torch.no_grad():
            counters = [flag] * len(gradients)  # the kernel is told the step as a number
            fused(parameters, gradients, *states, [], counters, lr=lr, amsgrad=False, maximize=False, **told)

    module.FusedAdamBuilder = lambda: SimpleNamespace(
        load=lambda *_, **__: SimpleNamespace(multi_tensor_adam=multi_tensor_adam)
    )
