"""Every private name of torch that the tracer relies on, in one place: where a new version may break it.

Importing this module does not import torch.
"""
# ruff: noqa: SLF001 - this is what the module is for

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final


def keys_after_backend_select() -> Any:
    """Return the dispatch keys that come after ``BackendSelect``: where an override passes a call on to."""
    import torch

    return torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


def makers() -> Any:
    """Return what holds torch's functions that make tensors: ``empty``, ``full``, ``arange`` and the like.

    A script may have put its own over the public names for a while, as ``deepspeed.zero.Init`` does, whose
    tensors are on the GPU.
    """
    import torch

    return torch._C._VariableFunctions


NO_FLAG: Final = sys.maxsize
"""Position of an argument that an operator does not have."""


def async_flag(overload: Any) -> int:
    """Return which argument of an operator tells that it may run beside the current stream.

    Torch 2.8 brought it; before, and for operators without it, no collective runs on the current stream.
    """
    names = [argument.name for argument in overload._schema.arguments]
    return next((names.index(name) for name in ("async_op", "asyncOp") if name in names), NO_FLAG)


def position_of(overload: Any, name: str) -> int:
    """Return which argument of an operator bears *name*."""
    return [argument.name for argument in overload._schema.arguments].index(name)


def redispatch(overload: Any) -> Callable[..., Any]:
    """Return what passes a call of *overload* on below some keys: without a function of Python in between."""
    passed: Callable[..., Any] = overload._handle.redispatch_boxed
    return passed


def wait_tensor() -> Any:
    """Return the operator by which functional collectives are waited for."""
    import torch

    return torch.ops._c10d_functional.wait_tensor.default


def destroy_library(library: Any) -> None:
    """Take back the implementations that a ``torch.library.Library`` has registered."""
    library._destroy()


def batching() -> tuple[Any, str, str]:
    """Return the class and the methods that begin and end a batch of transfers; the end returns its work."""
    import torch.distributed as dist

    return dist.ProcessGroup, "_start_coalescing", "_end_coalescing"


def group_named(name: str) -> Any:
    """Return the process group that torch has given a name."""
    from torch._C._distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)


def graphs() -> list[Any]:
    """Return the classes whose ``capture_begin`` and ``capture_end`` capture a CUDA graph."""
    import torch

    newer = getattr(getattr(torch, "accelerator", None), "Graph", None)  # torch 2.13 brought it
    return [torch.cuda.CUDAGraph] + ([newer] if newer is not None else [])


def stream_handle() -> Callable[[int], int]:
    """Return what tells the handle of the current CUDA stream of a device: a tenth of making a ``Stream``."""
    import torch

    found: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
    return found


COUNTER_RESETS: Final = (
    "_cuda_resetPeakMemoryStats",
    "_cuda_resetAccumulatedMemoryStats",
    "_accelerator_resetPeakStats",
    "_accelerator_resetAccumulatedStats",
)
"""Functions of ``torch._C`` by which a script resets what an allocator counts."""


def counter_resets() -> list[tuple[Any, str]]:
    """Return, as owner and name, those of them that there are."""
    import torch

    return [(torch._C, name) for name in COUNTER_RESETS if hasattr(torch._C, name)]


def call_numbers() -> dict[str, int]:
    """Return by the name of each group how many calls its backend of gloo has counted."""
    import torch
    from torch.distributed import distributed_c10d

    found = {}
    for group in list(distributed_c10d._world.pg_names):
        with suppress(RuntimeError):  # it has no backend for tensors of the processor
            backend = group._get_backend(torch.device("cpu"))
            if backend.name() == "gloo":
                found[group.group_name] = int(backend._get_sequence_number_for_group())
    return found


def time_on_device(process_group: Any) -> None:
    """Have the works of a group tell how long they ran: each gets an event at its start, too.

    Raises:
        RuntimeError: its backend cannot do that.
    """
    process_group._enable_collectives_timing()


TRUE: Final = frozenset({"1", "true", "t", "yes", "y", "on"})
"""Words of an environment variable that torch takes for yes."""


def flight_recorders() -> list[list[dict[str, Any]]]:
    """Return what each flight recorder of c10d holds, oldest first: the last 2,000 calls by default.

    Up to torch 2.13 that of NCCL looks at events that it no longer holds (``FlightRecorderDetail.hpp``).
    They are not freed as long as torch keeps them to be used again (``CUDAEventCache.hpp``), as it does
    unless told otherwise: then it is left alone. A torch may have none for gloo.
    """
    import torch

    c10d = torch._C._distributed_c10d
    frees_events = os.environ.get("TORCH_NCCL_CUDA_EVENT_CACHE", "1").lower() not in TRUE
    is_safe = not frees_events or torch.torch_version.TorchVersion(torch.__version__) >= "2.14"
    names = ("_dump_fr_trace", *(("_dump_nccl_trace",) if is_safe else ()))
    dumps = [getattr(c10d, name, None) for name in names]
    held = [pickle.loads(dump(includeStackTraces=False)) for dump in dumps if dump is not None]
    return [one.get("entries", []) for one in held]


def flight_entries() -> list[tuple[str, int, int | None, bool]] | None:
    """Return what torch's flight recorders keep of works on GPUs.

    Returns:
        Of each the name of its group, when its call was made (``time.time_ns``), how long it ran in ns, None
        if that is not known, and whether that may become known. None: there is no flight recorder.
    """
    kept = [
        entry
        for entries in flight_recorders()
        for entry in entries
        if not entry["profiling_name"].startswith("gloo")
    ]
    return [
        (
            entry["process_group"][0],
            entry["time_created_ns"],
            round(entry["duration_ms"] * 1e6) if "duration_ms" in entry else None,
            not entry["retired"],
        )
        for entry in kept
    ] or None


def device_ns(work: Any) -> int | None:
    """Return how long a complete work ran on its device, None if it does not tell."""
    try:
        return round(float(work._get_duration()) * 1e6)
    except (AttributeError, RuntimeError):
        return None


def source_of(work: Any) -> int:
    """Return which member of its group has sent what a complete *work* has received, -1: it does not tell."""
    try:
        return int(work._source_rank())
    except (AttributeError, RuntimeError):
        return -1


def default_store() -> Any:
    """Return the store that the default process group was made with."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def queue_callback() -> Callable[[Callable[[], Any]], None]:
    """Return what asks the autograd engine for a call after the last node of the pass that runs."""
    import torch

    queue: Callable[[Callable[[], Any]], None] = torch.autograd.Variable._execution_engine.queue_callback
    return queue


def is_in_backward() -> Callable[[], bool]:
    """Return what tells whether this thread runs nodes of a backward pass, as torch's checkpointing asks."""
    import torch

    current: Callable[[], int] = torch._C._current_graph_task_id
    return lambda: current() != -1


CHECKPOINT: Final = "CheckpointFunctionBackward"
"""Class of the node of a part that reentrant checkpointing will recompute."""


def autocast_kept(node: Any) -> Any:
    """Return the type of the autocast in which what *node* will recompute has run, None if there was none."""
    for name in ("device_autocast_kwargs", "cpu_autocast_kwargs"):
        kept = getattr(node, name, None) or {}
        if kept.get("enabled"):
            return kept["dtype"]
    return None


def made(node: Any) -> Any:
    """Return the ``torch.dtype`` of the first tensor that the operator of an autograd node has made."""
    return node._input_metadata[0].dtype


def swap_run_backward(replacement: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return the function by which every backward pass enters the engine; put *replacement* in its place."""
    import torch

    original: Callable[..., Any] = torch.autograd._engine_run_backward
    if replacement is not None:
        torch.autograd._engine_run_backward = replacement
    return original


def checkpoints() -> tuple[Any, Any]:
    """Return what keeps the function of a checkpoint for its next run: without and with reentry."""
    from torch.utils import checkpoint

    return checkpoint._CheckpointFrame, checkpoint.CheckpointFunction


def fsdp2_groups(module: Any) -> list[Any]:
    """Return the groups of parameters that ``fully_shard`` has made of *module*, [] if it was not called."""
    state = getattr(module, "_get_fsdp_state", None)
    if state is None:
        return []
    several = getattr(state(), "_fsdp_param_groups", None)  # torch 2.13 brought it
    found = [state()._fsdp_param_group] if several is None else several
    return [group for group in found if group is not None]


def mixed_precision(module: Any) -> Any:
    """Return in what types *module* computes, as FSDP, first or second, was told; None: not told."""
    state = getattr(module, "_get_fsdp_state", None)
    if state is not None:
        return getattr(state(), "_mp_policy", None)
    return module.mixed_precision if type(module).__name__ == FSDP1 else None


FSDP1: Final = "FullyShardedDataParallel"
"""Class of the wrapper of the first FSDP."""

FLAT: Final = "_flat_param"
"""Name of the parameter that the first FSDP makes of others."""


def flattened(module: Any) -> list[tuple[Any, str, list[int]]]:
    """Return the module, the name and the shape of each parameter that the first FSDP has flattened.

    Args:
        module: a ``FullyShardedDataParallel``.
    """
    handle = module._handle
    if handle is None:
        return []
    flat = handle.flat_param
    return [
        (info.module, info.param_name, list(shape))
        for info, shape in zip(flat._param_infos, flat._shapes, strict=True)
    ]


PIPELINING: Final = "torch.distributed.pipelining.schedules"
"""Module of the schedules; takes 2 s to import, and a training without a pipeline never does."""


SYMMETRIC: Final = "torch.distributed._symmetric_memory"
"""Module that defines the operators on symmetric memory; imported by whoever uses them."""


def pipeline_bases() -> tuple[Any, Any]:
    """Return the base classes of all pipeline stages and of all schedules."""
    from torch.distributed.pipelining import schedules, stage

    return stage._PipelineStageBase, schedules._PipelineSchedule


def on_custom_actions(told: Callable[[], None]) -> None:
    """Have *told* called when a script gives a schedule a function of its own for an action (DualPipeV)."""
    from torch.distributed.pipelining import schedules

    kind: Any = schedules._PipelineScheduleRuntime
    register = getattr(kind, "register_custom_function", None)
    if register is None:  # an older PyTorch
        return

    def registered(schedule: Any, *args: Any, **kwargs: Any) -> None:
        told()
        register(schedule, *args, **kwargs)

    kind.register_custom_function = registered


def n_microbatches(schedule: Any) -> int:
    """Return the micro-batches per step of a pipeline schedule."""
    return int(schedule._n_microbatches)


def n_chunks(stage: Any) -> int:
    """Return the number of micro-batches of a pipeline stage, 0 if it does not know."""
    return int(getattr(stage, "chunks", None) or 0)


def blocking_functions() -> tuple[tuple[Any, str], ...]:
    """Return, as owner and name, what communicates and waits in C++ without telling Python of the wait.

    DDP sends its buffers with the one before each forward, and agrees on its buckets with the other.
    """
    import torch.distributed as dist

    return (dist, "_broadcast_coalesced"), (dist.Reducer, "_rebuild_buckets")
