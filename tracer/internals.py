"""Every private name of torch that the tracer relies on, in one place: where a new version may break it.

Importing this module does not import torch.
"""
# ruff: noqa: SLF001 - this is what the module is for

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any, Final, NamedTuple, Protocol

from foretrace.tracer.errors import RecordError


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


def put_below(mode: Any) -> None:
    """Have all functions of torch go through *mode* from now on, below the modes that are active."""
    from torch import overrides

    above = []
    while overrides._len_torch_function_stack():
        above.append(overrides._pop_mode())
    for one in (mode, *reversed(above)):
        overrides._push_mode(one)


# ---- The CUDA device of a rehearsal (tracer.rehearse.device) ----------------------------------------------


class Driver(Protocol):
    """What stands for the CUDA driver and the allocator behind the names that a build for CUDA has."""

    count: int

    def exchange(self, device: int) -> int:
        """Make *device* current unless it is negative; return the one that was."""

    def stream(self, device: int) -> int:
        """Return the number of the current stream of a device."""

    def set_stream(self, device: int, stream: int) -> None:
        """Make a stream the current one of its device."""

    def synchronize(self) -> None:
        """Let the host wait for the current device."""

    def memory(self, device: int) -> Mapping[str, tuple[int, int, int, int]]:
        """Return bytes by kind (``"allocated_bytes"``, ...): now, most, ever allocated, ever freed."""

    def configure(self, text: str) -> None:
        """Take *text* as the settings of the allocator."""

    def reset_peak(self, device: int) -> None:
        """Look for the most bytes from now on."""

    def empty_cache(self) -> None:
        """Give back what the allocator holds and nobody uses."""

    def takes(self, kernel: int, *of: Any) -> bool:
        """Whether a kernel of attention takes tensors (where C++ holds them), a rate of dropout and flags."""


class Wheel(NamedTuple):
    """Versions of NVIDIA's libraries that a build for CUDA comes with."""

    cuda: str
    nccl: tuple[int, int, int]
    cudnn: int

    @property
    def runtime(self) -> int:
        """CUDA as a number: 12080 for 12.8."""
        major, _, minor = self.cuda.partition(".")
        return int(major) * 1000 + int(minor) * 10


C_OF_TORCH: Final = "torch._C"
"""Module that holds what PyTorch has in C++."""

SETTINGS: Final = (
    *("_cuda_clearCublasWorkspaces", "_cuda_ipc_collect", "_cuda_lock_mutex", "_cuda_recordMemoryHistory"),
    *(
        "_cuda_record_memory_history",
        "_cuda_record_memory_history_legacy",
        "_cuda_resetAccumulatedHostMemoryStats",
    ),
    *("_cuda_resetAccumulatedMemoryStats", "_cuda_resetPeakHostMemoryStats", "_cuda_sleep"),
    *("_cuda_unlock_mutex", "_cuda_attach_out_of_memory_observer"),
    *("_host_emptyCache", "_accelerator_emptyHostCache", "_accelerator_resetAccumulatedStats"),
)
"""Functions of ``torch._C`` that set or start something that has no effect on a device without a clock."""

CLASSES: Final = (
    *("_MemPool", "_MemPoolContext", "_cuda_CUDAAllocator", "_CUDAGraph", "_CudaGreenContext"),
    "_CUDAGreenContext",
)
"""Classes of ``torch._C`` that ``torch.cuda`` names when it is imported."""

_CONSTANTS: Final[Mapping[str, Any]] = {
    "_cuda_isInBadFork": False,
    "_cuda_isCurrentStreamCapturing": False,
    "_cuda_canDeviceAccessPeer": True,
    "_cuda_hasPrimaryContext": True,
    "_cuda_getAllocatorBackend": "native",
    "_cuda_memoryMetadataSupported": False,
    "_cuda_memorySnapshot": {"segments": [], "device_traces": []},
    "_cuda_hostMemoryStats": {},
    "_accelerator_isAllocatorInitialized": True,
    "_is_flash_attention_available": True,
    "_nccl_version_suffix": b"",
}
"""Answers of functions of ``torch._C`` that are always the same."""

_KEPT: Final[Mapping[str, tuple[str, Any]]] = {
    "_cuda_get_cudnn_benchmark_limit": ("_cuda_set_cudnn_benchmark_limit", 10),
    "_cuda_get_conv_benchmark_empty_cache": ("_cuda_set_conv_benchmark_empty_cache", True),
    "_cuda_get_sync_debug_mode": ("_cuda_set_sync_debug_mode", 0),
    "_cuda_getMemoryFraction": ("_cuda_setMemoryFraction", 1.0),
    "_cuda_getMemoryMetadata": ("_cuda_setMemoryMetadata", ""),
    "_cuda_tunableop_is_enabled": ("_cuda_tunableop_enable", False),
    "_cuda_tunableop_tuning_is_enabled": ("_cuda_tunableop_tuning_enable", True),
}
"""Functions of ``torch._C`` that return what another was told last, with its name and the first answer."""

_ATTENTIONS: Final = {
    "_can_use_flash_attention": 1,
    "_can_use_mem_efficient_attention": 2,
    "_can_use_cudnn_attention": 3,
}
"""Functions of ``torch._C`` that tell whether a kernel takes an attention, and its ``sdp::SDPBackend``."""

_COUNTS: Final = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "oversize_allocations",
    "oversize_segments",
)
_BYTES: Final = (
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
)


def become_cuda_build(
    c: Any,
    driver: Driver,
    properties: Any,
    wheel: Wheel,
    refuse: Callable[[str], Exception],
) -> None:
    """Give ``torch._C``, just loaded, the names of a build for CUDA; ``torch.cuda`` then runs as it is.

    A function that has no answer here raises when it is called, in a build for CUDA, too: its own would ask a
    driver that is not there.

    Args:
        c: the module ``torch._C``.
        driver: answers.
        properties: what ``torch.cuda.get_device_properties`` returns.
        wheel: the versions to tell; those of a build for CUDA stay its own.
        refuse: returns the error for a function that has no answer, by name.
    """
    for name in [name for name in vars(c) if name.startswith("_cuda_")]:
        delattr(c, name)
    given: dict[str, Any] = {name: _constant(value) for name, value in _CONSTANTS.items()}
    given |= {name: _constant(None) for name in SETTINGS}
    given |= {name: type(name, (), {"__new__": _refusing(refuse(name))}) for name in CLASSES}
    for getter, (setter, value) in _KEPT.items():
        given |= dict(zip((getter, setter), _keeping(value), strict=True))
    given |= {name: _attending(driver, number) for name, number in _ATTENTIONS.items()}
    given |= {"_graph_pool_handle": _refusing(refuse("_graph_pool_handle"))}
    given |= _of_devices(c, driver, properties, wheel) | _of_memory(driver)
    given |= {"_CudaDeviceProperties": type(properties)} | _of_streams(c, driver)
    given |= {"_cudart": _Runtime(driver, properties), "_nvtx": _Runtime(driver, properties)}
    major, nccl_minor, patch = wheel.nccl
    given |= {"_nccl_version": _constant((major << 32) | (nccl_minor << 16) | patch)}
    if not hasattr(c, "_cudnn"):
        version = (wheel.cudnn // 10000, wheel.cudnn // 100 % 100, wheel.cudnn % 100)
        given["_cudnn"] = cudnn = ModuleType("_cudnn")
        modes = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}  # as cudnnRNNMode_t
        vars(cudnn).update(
            is_cuda=True, getVersionInt=_constant(wheel.cudnn), RNNMode=type("RNNMode", (), modes)
        )
        vars(cudnn).update(dict.fromkeys(("getRuntimeVersion", "getCompileVersion"), _constant(version)))
    vars(c).update(given)
    c._has_cuda = c._has_cudnn = c._has_magma = True

    def absent(name: str) -> Any:
        if name.startswith("_cuda_"):
            return _refusing(refuse(name))
        raise AttributeError(f"module {C_OF_TORCH!r} has no attribute {name!r}")

    c.__getattr__ = absent
    version_of: Any = sys.modules["torch.version"]
    if version_of.cuda is None:
        version_of.cuda = wheel.cuda


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _keeping(value: Any) -> tuple[Callable[..., Any], Callable[..., None]]:
    """Return what tells a setting, at first *value*, and what sets it."""
    kept = [value]

    def keep(value: Any, *others: Any) -> None:
        kept[0] = value

    return lambda *args: kept[0], keep


def _attending(driver: Driver, kernel: int) -> Callable[..., bool]:
    def is_taken(params: Any, debug: Any = None) -> bool:
        tensors = (params.query, params.key, params.value, params.attn_mask)
        addresses = [None if one is None else one._cdata for one in tensors]
        return driver.takes(kernel, *addresses, params.dropout, params.is_causal, params.enable_gqa)

    return is_taken


def _refusing(error: Exception) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise error

    return refuse


def _of_devices(c: Any, driver: Driver, properties: Any, wheel: Wheel) -> dict[str, Any]:
    """Return what answers about devices, by its name in ``torch._C``."""

    def start() -> None:
        import torch

        cuda: Any = torch.cuda
        if not driver.count:
            raise RuntimeError("No CUDA GPUs are available")
        cuda.default_generators = tuple(c.Generator(f"cuda:{number}") for number in range(driver.count))
        cuda._get_device_properties = c._get_device_properties = lambda device: properties

    def choose(device: int) -> None:
        import torch

        torch.cuda.init()
        if device >= driver.count:
            raise getattr(c, "AcceleratorError", RuntimeError)("CUDA error: invalid device ordinal")
        driver.exchange(device)

    return {
        "_cuda_init": start,
        "_cuda_getDeviceCount": lambda: driver.count,
        "_cuda_getDevice": lambda: driver.exchange(-1),
        "_cuda_setDevice": choose,
        # Two functions: TorchDynamo refuses one with two names.
        "_cuda_exchangeDevice": lambda device: driver.exchange(device),  # noqa: PLW0108
        "_cuda_maybeExchangeDevice": lambda device: driver.exchange(device),  # noqa: PLW0108
        "_cuda_synchronize": driver.synchronize,
        "_cuda_getArchFlags": _constant(f"sm_{properties.major}{properties.minor}"),
        **dict.fromkeys(
            ("_cuda_getCompiledVersion", "_cuda_getDriverVersion", "_cuda_getRuntimeVersion"),
            _constant(wheel.runtime),
        ),
    }


def _of_memory(driver: Driver) -> dict[str, Any]:
    """Return what answers about memory, by its name in ``torch._C``."""

    def stats(device: int) -> dict[str, Any]:
        found: dict[str, Any] = {"num_alloc_retries": 0, "num_ooms": 0, "num_sync_all_streams": 0}
        found |= {"num_device_alloc": 0, "num_device_free": 0, "max_split_size": -1}
        told = driver.memory(device)
        for name in (*_COUNTS, *_BYTES):
            one = dict(zip(("current", "peak", "allocated", "freed"), told.get(name, (0,) * 4), strict=True))
            is_by_pool = not name.startswith("oversize")
            found[name] = (
                {"all": one, "small_pool": dict.fromkeys(one, 0), "large_pool": one} if is_by_pool else one
            )
        return found

    return {
        "_cuda_memoryStats": stats,
        "_accelerator_getDeviceStats": stats,
        **dict.fromkeys(
            ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats"),
            lambda device: driver.reset_peak(device),  # noqa: PLW0108 - a session replaces it, here and below
        ),
        **dict.fromkeys(
            ("_cuda_cudaCachingAllocator_set_allocator_settings", "_accelerator_setAllocatorSettings"),
            lambda text: driver.configure(text),  # noqa: PLW0108
        ),
        "_cuda_emptyCache": lambda *args: driver.empty_cache(),
        "_accelerator_emptyCache": driver.empty_cache,
    }


def _of_streams(c: Any, driver: Driver) -> dict[str, Any]:
    """Return the bases of ``torch.cuda.Stream`` and ``Event``, and functions of current streams."""
    cuda = 1  # as c10::DeviceType numbers it

    class Stream(c.Stream):  # type: ignore[misc]  # torch is untyped here
        """A stream of ``torch.Stream``, with the arguments and names of CUDA's."""

        def __new__(
            cls,
            priority: int = 0,
            stream_id: int = 0,
            device_index: int = 0,
            device_type: int = 0,
            stream_ptr: int = 0,
        ) -> Any:
            if stream_ptr:
                stream_id, device_index, device_type = stream_ptr, driver.exchange(-1), cuda
            if stream_id or device_type:
                return super().__new__(cls, stream_id=stream_id, device_index=device_index, device_type=cuda)
            made = super().__new__(cls, device=f"cuda:{driver.exchange(-1)}", priority=priority)
            made.level = priority
            return made

        cuda_stream = property(lambda self: self.stream_id)
        level = 0
        priority = property(lambda self: self.level)
        priority_range = staticmethod(lambda: (0, -5))  # of an H100

    class Event(c.Event):  # type: ignore[misc]  # torch is untyped here
        """An event of ``torch.Event``, with the arguments and names of CUDA's."""

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            is_timed = kwargs.get("enable_timing", bool(args) and args[0])
            return super().__new__(cls, device="cuda", enable_timing=is_timed)

        cuda_event = property(lambda self: self.event_id)

        def elapsed_time(self, end: Any) -> float:
            """Return the milliseconds to the event *end*: always one, because there is no clock."""
            del end
            return 1.0

    return {
        "_CudaStreamBase": Stream,
        "_CudaEventBase": Event,
        "_cuda_getCurrentStream": lambda device: (driver.stream(device), device, cuda),
        "_cuda_getDefaultStream": lambda device: (0, device, cuda),
        "_cuda_getStreamFromExternal": lambda pointer, device: (pointer, device, cuda),
        "_cuda_getCurrentRawStream": driver.stream,
        "_cuda_setStream": lambda stream_id, device_index, device_type: driver.set_stream(
            device_index, stream_id
        ),
    }


class _Runtime:
    """Stands for a module of bindings of CUDA's runtime or of NVTX: every call has succeeded."""

    def __init__(self, driver: Driver, properties: Any) -> None:
        self.cudaError = type("cudaError", (), {"success": 0})
        self._driver, self._total = driver, properties.total_memory

    def cudaMemGetInfo(self, device: int) -> tuple[int, int]:  # noqa: N802 - as it is called
        """Return the bytes that are free, and those of the device."""
        return max(self._total - self._driver.memory(device)["reserved_bytes"][0], 0), self._total

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _constant(0)


class Fakes(NamedTuple):
    """Fake tensors of PyTorch: their mode, what leaves it, their class, and errors for what needs a value."""

    mode: Any
    off: Any
    tensor: Any
    unknown_value: Any
    unknown_shape: Any


def fakes() -> Fakes:
    """Return the classes of fake tensors, which ask no GPU for anything from now on."""
    from torch._subclasses import fake_tensor as of

    def start(device: Any) -> None:
        import torch

        torch.cuda.init()

    of.init_gpu_context = start
    of.FakeTensorMode.avoid_device_init = True  # also in the modes that the compiler makes
    return Fakes(
        of.FakeTensorMode,
        of.unset_fake_temporarily,
        of.FakeTensor,
        of.DataDependentOutputException,
        of.DynamicOutputShapeException,
    )


def lift_on_host() -> None:
    """Have ``torch.tensor`` make what it is given on the host, where it dispatches what follows."""
    import torch

    torch._C._set_only_lift_cpu_tensors(True)  # noqa: FBT003 - torch's own


def make_generators() -> None:
    """Replace ``torch.Generator`` where it would ask a GPU: before torch 2.7 it does not ask the hooks."""
    import torch

    try:
        torch.Generator("cuda:0")
    except RuntimeError:
        pass
    else:
        return

    class Generator(torch.Generator):  # type: ignore[misc]  # torch is untyped here
        """A generator of the CPU that says that it is on its device: no number of it is seen."""

        def __new__(cls, device: Any = "cpu") -> Any:
            made = super().__new__(cls)
            made.of = torch.device(device)
            return made

        device = property(lambda self: self.of)

        def set_state(self, state: Any) -> Any:
            """Leave it as it is: a state that a script has copied is fake."""
            return self if self.of.type == "cuda" else super().set_state(state)

    anywhere: Any = torch
    anywhere.Generator = anywhere._C.Generator = Generator


def start_device() -> None:
    """Have PyTorch's C++ start CUDA; for its Python it has not yet, as when a script begins."""
    import torch

    torch.empty(0, device="cuda")
    torch.cuda._initialized = False


def become_cpu_build() -> None:
    """Have PyTorch's Python be as in a build for processors, for a process without GPUs."""
    import torch
    import torch.distributed as dist

    anywhere: Any = torch
    anywhere.version.cuda = None
    anywhere._C._has_cuda = anywhere._C._has_cudnn = False
    anywhere.backends.cuda.is_built = anywhere.backends.cudnn.is_available = lambda: False
    anywhere.backends.cudnn.version = lambda: None
    anywhere._C._get_accelerator = lambda: torch.device("cpu")
    dist.is_nccl_available = lambda: False


def swap(one: Any, other: Any) -> None:
    """Swap what two tensors are in C++."""
    import torch

    torch._C._swap_tensor_impl(one, other)


def is_below_fakes() -> bool:
    """Whether this thread is inside an operator that leaves out fake tensors, and modes."""
    import torch

    return bool(torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python))


def has_new_abi(c: Any) -> bool:
    """Whether ``torch._C`` was compiled with the strings of C++11."""
    return bool(c._GLIBCXX_USE_CXX11_ABI)


def number_of_storage(storage: Any) -> int:
    """Return where C++ holds a storage."""
    number: int = storage._cdata
    return number


RELIED_ON: Final[Mapping[str, str]] = {
    "torch._C._dispatch_keyset_full_after": "pass a collective on below the recorder",
    "torch._C._VariableFunctions": "make tensors where a script has replaced the public functions",
    "torch._C._distributed_c10d._resolve_process_group": "find the group of a functional collective",
    "torch._C._current_graph_task_id": "tell whether a thread is inside a backward pass",
    "torch.autograd._engine_run_backward": "see every backward pass",
    "torch.autograd.Variable._execution_engine.queue_callback": "be called at the end of a backward pass",
    "torch.distributed.ProcessGroup._start_coalescing": "see batches of transfers begin",
    "torch.distributed.ProcessGroup._end_coalescing": "see batches of transfers end",
    "torch.distributed.ProcessGroup._device_types": "say for which devices a rehearsed group has a backend",
    "torch.distributed.distributed_c10d._get_default_store": "let ranks of a recording talk to each other",
    "torch.distributed._broadcast_coalesced": "time the buffers that DDP sends",
    "torch.distributed.Reducer._rebuild_buckets": "time how DDP agrees on its buckets",
    "torch.utils.checkpoint._CheckpointFrame": "tell recomputation from other work",
    "torch.distributed.pipelining.schedules._PipelineSchedule": "see the actions of a pipeline",
    "torch.distributed.pipelining.schedules._PipelineScheduleRuntime": "see custom actions of a pipeline",
    "torch.distributed.pipelining.stage._PipelineStageBase": "see the stages of a pipeline",
    "torch._C.Stream": "streams of the rehearsed device",
    "torch._C.Event": "events of the rehearsed device",
    "torch._C._GLIBCXX_USE_CXX11_ABI": "compile the rehearsed device as torch was compiled",
    "torch._C._set_only_lift_cpu_tensors": "make torch.tensor(..., device='cuda') without a GPU",
    "torch._C._dispatch_tls_is_dispatch_key_excluded": "tell what would ask a real GPU",
    "torch._subclasses.fake_tensor.init_gpu_context": "make fake tensors without asking a GPU",
    "torch._subclasses.fake_tensor.FakeTensorMode.avoid_device_init": "keep fake tensors from asking a GPU",
    "torch._subclasses.fake_tensor.DataDependentOutputException": "answer what reads a value",
    "torch._subclasses.fake_tensor.DynamicOutputShapeException": "answer what has a shape by values",
    "torch.cuda._lazy_init": "start the rehearsed device when it is first used",
}
"""Private names of torch, and what the tracer needs each for."""


def missing() -> list[tuple[str, str]]:
    """Return those of `RELIED_ON` that the torch of this process does not have, with what each is for."""
    return [(name, purpose) for name, purpose in RELIED_ON.items() if not _is_there(name)]


def _is_there(name: str) -> bool:
    """Whether a dotted *name* of a module, a class or an attribute can be followed to its end."""
    path, *rest = name.split(".")
    found: Any = import_module(path)
    for part in rest:
        path = f"{path}.{part}"
        if not hasattr(found, part):
            with suppress(ImportError):
                import_module(path)
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


OLDEST: Final = (2, 6)
"""The oldest torch that recording was tried with, as ``pyproject.toml`` says."""

TRIED: Final = "2.6 to 2.15"
"""Versions of torch that recording was tried with."""

NEEDED: Final = (
    "torch._C._dispatch_keyset_full_after",
    "torch.autograd._engine_run_backward",
    "torch.autograd.Variable._execution_engine.queue_callback",
    "torch.library.Library.impl",
    "torch.nn.modules.module.register_module_forward_hook",
)
"""Names of torch, public ones too, without which nothing is recorded."""

NEEDED_DISTRIBUTED: Final = (
    "torch.distributed.ProcessGroup.unbox",
    "torch.distributed.Work.unbox",
    "torch.distributed.distributed_c10d._get_default_store",
    "torch.ops._c10d_functional.wait_tensor",
)
"""The same for a process that has joined a process group."""


def check(*, in_group: bool) -> None:
    """Raise RecordError if torch is too old, or lacks a name that recording needs.

    Args:
        in_group: whether this process has joined a process group.
    """
    import torch

    if tuple(int(part) for part in str(torch.__version__).split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise RecordError(f"torch {torch.__version__} is too old: recording needs {oldest} or newer")
    for name in NEEDED + (NEEDED_DISTRIBUTED if in_group else ()):
        if not _is_there(name):
            raise RecordError(
                f"torch {torch.__version__} has no {name}, which recording needs; "
                f"it was tried with torch {TRIED}"
            )
