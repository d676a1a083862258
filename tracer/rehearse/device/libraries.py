"""Changes in libraries that take fake tensors for something else, or ask ranks that are not there."""
# ruff: noqa: SLF001 - this module takes the place of parts of libraries

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

from foretrace.tracer import internals
from foretrace.tracer.guarded import everywhere
from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.replacing import replaces, when_imported
from foretrace.tracer.rehearse.session import RehearsalSession
from foretrace.tracer.rehearse.words import STUB


def install(session: RehearsalSession) -> None:
    """Change each library once it is imported."""
    for name, change in _CHANGES.items():
        when_imported(name, functools.partial(change, session))


def _transformers(session: RehearsalSession, module: Any) -> None:
    """Make transformers treat fake tensors as real ones.

    It takes a fake tensor for a sign of graph tracing. It would then build a full mask where a real run uses
    causal attention, and would never check whether a batch is padded (``masking_utils.py``).
    """
    module.is_fake_tensor = lambda x: False
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # threads would load real tensors, which are not moved


def _distributions(session: RehearsalSession, module: Any) -> None:
    """Turn off argument validation in distributions: it needs the values of their parameters."""
    module.Distribution.set_default_validate_args(value=False)


def _metrics(session: RehearsalSession, module: Any) -> None:
    """Turn off input validation in torchmetrics: it needs values that are unknown."""

    def valid(*args: Any, **kwargs: Any) -> None:
        session.warn(
            "torchmetrics checks no values, as with validate_args=False: in a real run its checks sort the "
            "values and wait for the GPU"
        )

    for name in [name for name in vars(module) if name.endswith("_tensor_validation")]:
        setattr(module, name, valid)


def _zero(session: RehearsalSession, module: Any) -> None:
    """Make ``ZeroRedundancyOptimizer`` collect states: those of other ranks are assumed to be like these."""
    module._broadcast_object = lambda obj, *args, **kwargs: obj


def _deepspeed(session: RehearsalSession, module: Any) -> None:
    """Make DeepSpeed's checks that all ranks have the same lists succeed; they still communicate."""

    @replaces(module)
    def assert_lst_len_same_as_other_ranks(original: Any, lst: Any) -> None:
        with suppress(RuntimeError):
            original(lst)

    @replaces(module)
    def get_lst_from_rank0(original: Any, lst: Any) -> Any:
        original(lst)
        return lst


def _deepspeed_norms(session: RehearsalSession, module: Any) -> None:
    """Let norms of gradients be valid: whether they are below zero, as DeepSpeed asks too, is not known."""
    import torch

    if hasattr(module, VALID):  # not in versions before 0.19

        @replaces(module, name=VALID)
        def is_invalid(_: Any, norm: Any) -> bool:
            return bool((~torch.isfinite(norm)).any()) if torch.is_tensor(norm) else not math.isfinite(norm)


VALID: Final = "is_invalid_grad_norm"
"""Function of DeepSpeed that asks whether a norm is finite and not below zero."""


class SentMeta(NamedTuple):
    """Shape and type of a tensor."""

    shape: tuple[int, ...]
    dtype: Any


class StageMetas(NamedTuple):
    """What a stage sends to the next one; *is_one*: a tensor by itself, not a tuple of them."""

    forward_metas: tuple[SentMeta, ...]
    is_one: bool


def _deepspeed_pipeline(session: RehearsalSession, module: Any) -> None:
    """Let stages of DeepSpeed know the shapes that come in: they read them out of a message of numbers.

    Its transfers are in the group of all ranks, and no group of it says by a name which are one pipeline.
    """
    import torch

    kind = module.PipelineEngine

    def shapes() -> Any:
        import_module(internals.PIPELINING)  # which puts them in place
        return session.shapes

    @replaces(kind, name="__init__")
    def made(original: Any, engine: Any, *args: Any, **kwargs: Any) -> None:
        original(engine, *args, **kwargs)
        session.groups.name_axis(engine.grid.get_pipe_parallel_group(), "pp")
        session.groups.name_axis(engine.grid.get_data_parallel_group(), "dp")

    @replaces(kind, name="_send_tensor_meta")
    def sent(original: Any, engine: Any, buffer: Any, stage: int) -> None:
        original(engine, buffer, stage)
        is_one = not isinstance(buffer, tuple)
        metas = tuple(SentMeta(tuple(one.shape), one.dtype) for one in ((buffer,) if is_one else buffer))
        shapes().tell(engine.stage_id, StageMetas(metas, is_one))

    @replaces(kind, name="_recv_tensor_meta")
    def received(_: Any, engine: Any, stage: int) -> Any:
        size = module.TENSOR_META_SIZE
        module.p2p.recv(torch.empty(size, dtype=torch.int32, device=engine.device), stage)
        metas, is_one = shapes().input_of(engine.stage_id)
        buffers = [
            engine._allocate_or_extend_buffers(at, list(one.shape), one.dtype) for at, one in enumerate(metas)
        ]
        return buffers[0] if is_one else tuple(buffers)


def _deepspeed_adam(session: RehearsalSession, module: Any) -> None:
    """Let DeepSpeed's fused Adam, which is compiled where there is a GPU, be torch's: one pass over all.

    It takes what ``multi_tensor_adam`` of csrc/adam/multi_tensor_adam.cu does: lists of gradients, parameters
    and states, each read once, the last three written.
    """

    def multi_tensor_adam(_: int, flag: Any, lists: Any, lr: float, *numbers: Any) -> None:
        beta1, beta2, eps, _step, is_decoupled, _corrects, weight_decay = numbers
        gradients, parameters, *states = lists
        lists = parameters, gradients, *states
        _adam(lists, flag, (lr, beta1, beta2, eps, weight_decay), is_decoupled=is_decoupled)

    _load(module, "FusedAdamBuilder", multi_tensor_adam=multi_tensor_adam)


def _deepspeed_cpu_adam(session: RehearsalSession, module: Any) -> None:
    """Let its Adam on the host, which is compiled and reads memory that fake tensors do not have, be torch's.

    As ``ds_adam_step`` of csrc/adam/cpu_adam_impl.cpp it takes one parameter at a time.
    """
    import torch

    are_decoupled: dict[int, bool] = {}

    def create(number: int, *settings: Any) -> None:
        are_decoupled[number] = settings[-2]

    def update(number: int, step: int, lr: float, *given: Any) -> None:
        beta1, beta2, eps, weight_decay, _corrects, *tensors = given
        lists, counter = [[one] for one in tensors], torch.tensor(float(step))
        _adam(lists, counter, (lr, beta1, beta2, eps, weight_decay), is_decoupled=are_decoupled[number])

    _load(module, "CPUAdamBuilder", create_adam=create, adam_update=update, destroy_adam=are_decoupled.pop)


def _load(module: Any, builder: str, **functions: Callable[..., Any]) -> None:
    """Let the *builder* in *module* of something that is compiled load these *functions* in its place."""
    setattr(module, builder, lambda: SimpleNamespace(load=lambda *_, **__: SimpleNamespace(**functions)))


def _adam(
    lists: Sequence[Sequence[Any]], counter: Any, settings: Sequence[float], *, is_decoupled: bool
) -> None:
    """Update *lists*: parameters, gradients and two states; *settings*: lr, betas, eps and weight decay."""
    import torch

    lr, beta1, beta2, eps, weight_decay = settings
    told = {"lr": lr, "beta1": beta1, "beta2": beta2, "weight_decay": weight_decay, "eps": eps}
    counters = [counter] * len(lists[0])  # the kernel is told the step as a number
    with torch.no_grad():
        fused = internals.fused_adam(is_decoupled=is_decoupled)
        fused(*lists, [], counters, amsgrad=False, maximize=False, **told)


def _accelerate(session: RehearsalSession, module: Any) -> None:
    """Make every rank read the batches that rank 0 fetches for all, so that it knows their shapes."""

    @replaces(module.DataLoaderDispatcher, name="_fetch_batches")
    def fetch(original: Any, self: Any, iterator: Any) -> Any:
        own = self.state.process_index
        if not own:
            return original(self, iterator)
        self.state.process_index = 0
        try:
            with session.aside():
                _, shapes = original(self, iterator)
        finally:
            self.state.process_index = own
        return None, shapes


def _sharded_tensors(session: RehearsalSession, module: Any) -> None:
    """Turn off the check that shards do not overlap: all ranks count as having this rank's shard."""
    for name in ("validate_non_overlapping_shards_metadata", "check_tensor"):
        everywhere(getattr(module, name), lambda *args, **kwargs: None, name)


def _refused(name: str, why: str) -> Callable[[Any, Any], None]:
    """Return the change of a module whose function *name* ends the rehearsal with a line that says *why*."""

    def change(session: RehearsalSession, module: Any) -> None:
        def refuse(*args: Any, **kwargs: Any) -> None:
            raise RehearsalError(why)

        setattr(module, name, refuse)

    return change


NO_RAY: Final = (
    "Ray starts processes of its own, which a rehearsal does not see. If they are the ranks: rehearse what a "
    "worker runs, as torchrun would start it (with Ray Train, ScalingConfig(num_workers=0)). If they run "
    "environments or load data for other ranks: put a replacement of ray into sys.modules in a stub file "
    f"({STUB})"
)
NO_RPC: Final = (
    "torch.distributed.rpc cannot be rehearsed: no other rank runs what this one calls. Rehearse the part "
    "that trains with collectives, such as the DDP trainers of a parameter server: replace the remote calls "
    f"in a stub file ({STUB})"
)

_CHECKED: Final = (
    *("calibration_error", "confusion_matrix", "hinge", "precision_recall_curve", "ranking", "stat_scores"),
)
"""Modules of torchmetrics with functions that check values."""

_CHANGES: Final[Mapping[str, Callable[[Any, Any], None]]] = {
    "transformers.utils.import_utils": _transformers,
    "accelerate.data_loader": _accelerate,
    "deepspeed.runtime.utils": _deepspeed_norms,
    "deepspeed.runtime.zero.utils": _deepspeed,
    "deepspeed.runtime.pipe.engine": _deepspeed_pipeline,
    "deepspeed.ops.adam.fused_adam": _deepspeed_adam,
    "deepspeed.ops.adam.cpu_adam": _deepspeed_cpu_adam,
    "ray": _refused("init", NO_RAY),
    internals.SHARDED_TENSOR: _sharded_tensors,
    "torch.distributed.rpc": _refused("init_rpc", NO_RPC),
    "torch.distributions.distribution": _distributions,
    "torch.distributed.optim.zero_redundancy_optimizer": _zero,
    **{f"torchmetrics.functional.classification.{name}": _metrics for name in _CHECKED},
}
"""By module, the function that changes it to behave as on a GPU."""
