"""Every private name of torch that the tracer relies on, in one place: where a new version may break it.

Importing this module does not import torch. ``python -m foretrace.tracer.internals`` lists those that are
missing.
"""
# ruff: noqa: SLF001 - this is what the module is for

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from importlib import import_module
from operator import attrgetter, methodcaller
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

from foretrace.door import own_table
from foretrace.tracer.errors import RecordError

_LOOKED_UP: Final[dict[str, str]] = {}  # by `_named` and `_calling`, what each is for


def relied_on() -> dict[str, str]:
    """Return torch's private names, of here and ``internals.toml``, and what each is needed for."""
    return own_table("tracer/internals.toml") | _LOOKED_UP


def _follow(name: str) -> Any:
    """Return what a dotted *name* leads to, of a module, a class or an attribute; raises AttributeError."""
    path, *rest = name.split(".")
    found: Any = import_module(path)
    for part in rest:
        path = f"{path}.{part}"
        if not hasattr(found, part):
            with suppress(ImportError):
                import_module(path)
        # A package that is being imported does not name its modules yet.
        found = (
            getattr(found, part) if hasattr(found, part) else sys.modules.get(path) or getattr(found, part)
        )
    return found


def _named(path: str, purpose: str) -> Callable[[], Any]:
    """Return what looks *path* up whenever it is called; the tracer needs it to *purpose*."""
    _LOOKED_UP[path] = purpose
    return partial(_follow, path)


def _calling(path: str, purpose: str) -> Callable[..., Any]:
    """Return what calls the function, or makes an object of the class, at *path*; as `_named`."""
    _LOOKED_UP[path] = purpose
    found = cache(partial(_follow, path))
    return lambda *args, **kwargs: found()(*args, **kwargs)  # noqa: PLW0108 - not found before it is called


makers = _named(
    "torch._C._VariableFunctions", "make tensors where a script has replaced the public functions"
)
wait_tensor = _named(
    "torch.ops._c10d_functional.wait_tensor.default", "see functional collectives waited for"
)
queue_callback = _named(
    "torch.autograd.Variable._execution_engine.queue_callback", "be called at the end of a backward pass"
)
pipeline_stage = _named(
    "torch.distributed.pipelining.stage._PipelineStageBase", "see the stages of a pipeline"
)
pipeline_schedule = _named(
    "torch.distributed.pipelining.schedules._PipelineSchedule", "see the actions of a pipeline"
)
fake_tensor = _named("torch._subclasses.fake_tensor.FakeTensor", "tell tensors of a rehearsal from real ones")
fsdp2_sharding = _named("torch.distributed.fsdp._fully_shard._fsdp_common", "run FSDP2 on fake tensors")
fsdp2_parameters = _named("torch.distributed.fsdp._fully_shard._fsdp_param", "run FSDP2 on fake tensors")
operators_of_others = _named("torch._ops.HigherOrderOperator", "see operators that call others")
dispatch_mode = _named("torch.utils._python_dispatch.TorchDispatchMode", "see every operator")
fake_mode = _named("torch._subclasses.fake_tensor.FakeTensorMode", "make tensors fake")
without_functions = _named("torch._C.DisableTorchFunction", "leave out modes that replace functions")
make_subclass = _named("torch.Tensor._make_subclass", "make a tensor again that was made before")
keys_of = _named("torch._C._dispatch_keys", "tell tensors apart that operators treat differently")
pinning = _named("torch.ops.aten._pin_memory.default", "see what is pinned")
node_that_runs = _named("torch._C._current_autograd_node", "tell which forward a backward belongs to")
decompositions = _named("torch._decomp.decomposition_table", "mend gradients of empty inputs")
sharding_propagator = _named(
    "torch.distributed.tensor._sharding_prop.ShardingPropagator", "remember how DTensors are sharded"
)
places_of_random_numbers = _named(
    "torch.distributed.tensor._random.OffsetBasedRNGTracker", "draw numbers of a shard as of any tensor"
)
dtensor_spec = _named(
    "torch.distributed.tensor._dtensor_spec.DTensorSpec", "make DTensors without a look at their values"
)
fsdp_optimizers = _named("torch.distributed.fsdp._optim_utils", "save states of optimizers of the first FSDP")
state_dict_utils = _named("torch.distributed._state_dict_utils", "load and save states over ranks")
restore_location = _named(
    "torch.serialization._get_restore_location", "load a checkpoint to where the script says"
)
rebuilding = _named("torch._utils", "load a checkpoint without its bytes")
meta_registrations = _named("torch._meta_registrations", "answer shapes for operators of a GPU")
custom_operators = _named("torch._library.custom_ops", "see operators that libraries define")
nested_int = _named("torch.nested._internal.nested_int.NestedIntNode", "know the sizes of nested tensors")
compiled_module = _named("torch._dynamo.eval_frame.OptimizedModule", "wrap what is compiled as torch does")
tracing_state = _named("torch._C._get_tracing_state", "leave alone what torch.jit traces")
compile_by = _named("torch._C._dynamo.eval_frame.set_eval_frame", "keep the compiler from what hooks call")
loader_iterator = _named("torch.utils.data.dataloader._BaseDataLoaderIter", "see the batches of a loader")
profiler_base = _named("torch.profiler.profiler._KinetoProfile", "leave out the profiler of a script")
batch_norm = _named("torch.nn.modules.batchnorm._BatchNorm", "run norms that are synchronized")
fsdp_building = _named("torch.distributed.fsdp._init_utils", "shard without a GPU")
state_dict_of_users: Callable[[], Any] = partial(_follow, "torch.distributed.checkpoint.state_dict")
as_strided = _named("torch.ops.aten.as_strided.default", "make views of a memory for the partitioner")

group_named = _calling(
    "torch._C._distributed_c10d._resolve_process_group", "find the group of a functional collective"
)
default_store = _calling(
    "torch.distributed.distributed_c10d._get_default_store", "let ranks of a recording talk to each other"
)
swap = _calling("torch._C._swap_tensor_impl", "swap what two tensors are in C++")
without_fakes = _calling("torch._subclasses.fake_tensor.unset_fake_temporarily", "compute with real tensors")
without_modes = _calling("torch.utils._python_dispatch._disable_current_modes", "compile beside a rehearsal")
sequence_number = _calling("torch._C._autograd._get_sequence_nr", "tell which nodes a compiled forward makes")
is_wrapped: Callable[[Any], bool] = _calling(
    "torch._C._functorch.is_functorch_wrapped_tensor", "tell tensors that have no memory"
)
fill_constructors = _calling(
    "torch.utils._device._device_constructors", "replace functions that make tensors"
)
map_only = _calling("torch.utils._pytree.tree_map_only", "make the batches of a loader fake")
without_dispatch = _calling("torch._C._DisableTorchDispatch", "make a fake tensor again that was made before")
buckets = _calling(
    "torch.distributed._compute_bucket_assignment_by_size", "send buffers of DDP in as many parts as torch"
)


schema_of = attrgetter("_schema")  # name, arguments and results of an operator, and which of them it writes

schema_arguments = attrgetter("_schema.arguments")
"""What an operator declares of each: ``name``, ``type``, ``kwarg_only``, its default."""

redispatch = attrgetter("_handle.redispatch_boxed")
"""What passes a call of an operator on below some keys: without a function of Python in between."""

destroy_library = methodcaller("_destroy")
"""Takes back the implementations that a ``torch.library.Library`` has registered."""

time_on_device = methodcaller("_enable_collectives_timing")
"""Has works of a group tell how long they ran, by an event at their start; RuntimeError: a backend cannot."""

n_microbatches = attrgetter("_n_microbatches")  # the micro-batches per step of a pipeline schedule

has_new_abi = attrgetter("_GLIBCXX_USE_CXX11_ABI")
"""Whether ``torch._C`` was compiled with the strings of C++11."""

number_of_storage = attrgetter("_cdata")  # where C++ holds a storage

seed_of_loader = attrgetter("_base_seed")
"""The number that an iterator of ``DataLoader`` has drawn to seed its workers."""


def keys_after_backend_select() -> Any:
    """Return the dispatch keys that come after ``BackendSelect``: where an override passes a call on to."""
    import torch

    return torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


def loads_with_weights(name: str) -> bool:
    """Whether ``torch.load`` takes a class or function of this *name* for one that weights may be made of."""
    from torch import _weights_only_unpickler as reading

    return name in reading._get_allowed_globals() or name in reading._get_user_allowed_globals()


def compile_as(function: Any, other: Any) -> None:
    """Let ``torch.jit`` compile *other*, which stands in for *function*, as it compiles that."""
    from torch.jit import _builtins

    if name := _builtins._find_builtin(function):
        _builtins._register_builtin(other, name)


def be_worker(seed: int | None, dataset: Any = None) -> None:
    """Let ``get_worker_info`` tell of the only worker process of a loader, of none if *seed* is None."""
    from torch.utils.data._utils import worker

    alone = {"id": 0, "num_workers": 1, "seed": seed, "dataset": dataset}
    worker._worker_info = None if seed is None else worker.WorkerInfo(**alone)


def seed_of_numpy(seed: int) -> Any:
    """Return what NumPy is seeded with in the first worker process of a loader that has drawn *seed*."""
    from torch.utils.data._utils import worker

    return worker._generate_state(seed, 0)


NO_FLAG: Final = sys.maxsize  # position of an argument that an operator does not have


def async_flag(overload: Any) -> int:
    """Return which argument of an operator tells that it may run beside the current stream.

    Torch 2.8 brought it; before, and for operators without it, no collective runs on the current stream.
    """
    names = [argument.name for argument in overload._schema.arguments]
    return next((names.index(name) for name in ("async_op", "asyncOp") if name in names), NO_FLAG)


def position_of(overload: Any, name: str) -> int:
    """Return which argument of an operator bears *name*."""
    return [argument.name for argument in overload._schema.arguments].index(name)


def batching() -> tuple[Any, str, str]:
    """Return the class and the methods that begin and end a batch of transfers; the end returns its work."""
    import torch.distributed as dist

    return dist.ProcessGroup, "_start_coalescing", "_end_coalescing"


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


class _Engine:
    """Stands for the autograd engine, whose methods cannot be replaced; libraries ask it past torch, too."""

    def __init__(self, engine: Any, run_backward: Callable[..., Any]) -> None:
        self._engine, self.run_backward = engine, run_backward

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def around_backward(around: Callable[[Any], Any]) -> Callable[[], None]:
    """Put what *around* makes of it in place of the entry to the autograd engine; return what undoes that."""
    import torch

    variable: Any = torch.autograd.Variable
    engine = variable._execution_engine
    variable._execution_engine = _Engine(engine, around(engine.run_backward))

    def undo() -> None:
        variable._execution_engine = engine

    return undo


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


FSDP1: Final = "FullyShardedDataParallel"  # class of the wrapper of the first FSDP
FLAT: Final = "_flat_param"  # name of the parameter that the first FSDP makes of others


def flattened(module: Any) -> list[tuple[Any, str, list[int]]]:
    """Return the module, the name and the shape of each parameter that the first FSDP has flattened."""
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


C_OF_TORCH: Final = "torch._C"  # module that holds what PyTorch has in C++

_COUNTS: Final = (
    "allocation", "segment", "active", "inactive_split", "oversize_allocations", "oversize_segments",
)  # fmt: skip
_BYTES: Final = (
    "allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes", "requested_bytes",
)  # fmt: skip


def become_cuda_build(
    c: Any,
    driver: Any,
    properties: Any,
    wheel: Wheel,
    refuse: Callable[[str], Exception],
) -> None:
    """Give ``torch._C``, just loaded, the names of a build for CUDA; ``torch.cuda`` then runs as it is.

    A function that has no answer here raises when it is called, in a build for CUDA, too: its own would ask a
    driver that is not there.

    Args:
        c: the module ``torch._C``.
        driver: answers, as ``tracer.rehearse.device.driver.Driver`` does.
        properties: what ``torch.cuda.get_device_properties`` returns.
        wheel: the versions to tell; those of a build for CUDA stay its own.
        refuse: returns the error for a function that has no answer, by name.
    """
    for name in [name for name in vars(c) if name.startswith("_cuda_")]:
        delattr(c, name)
    told = own_table("tracer/cuda_build.toml")
    given: dict[str, Any] = {name: _constant(value) for name, value in told["constants"].items()}
    given |= {name: _constant(None) for name in told["settings"]}
    given |= {name: type(name, (), {"__new__": _refusing(refuse, name)}) for name in told["classes"]}
    for getter, (setter, value) in told["kept"].items():
        given |= dict(zip((getter, setter), _keeping(value), strict=True))
    given |= {name: _attending(driver, number) for name, number in told["attentions"].items()}
    given |= {"_graph_pool_handle": _refusing(refuse, "_graph_pool_handle")}
    given |= _of_devices(c, driver, properties, wheel) | _of_memory(driver)
    given |= {"_CudaDeviceProperties": type(properties)} | _of_streams(c, driver)
    given |= {"_cudart": _Runtime(driver, properties), "_nvtx": _Runtime(driver, properties)}
    major, nccl_minor, patch = wheel.nccl
    given |= {"_nccl_version": _constant((major << 32) | (nccl_minor << 16) | patch)}
    given |= {"_nccl_version_suffix": _constant(b"")}
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

    stubs = Path(c.__file__).parent / "_C" / "__init__.pyi"

    def absent(name: str) -> Any:  # a library may ask for names of an older torch, which are not there
        if name.startswith("_cuda_") and (not stubs.exists() or f"def {name}(" in stubs.read_text("utf-8")):
            return _refusing(refuse, name)
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


def _attending(driver: Any, kernel: int) -> Callable[..., bool]:
    def is_taken(params: Any, debug: Any = None) -> bool:
        tensors = (params.query, params.key, params.value, params.attn_mask)
        addresses = [None if one is None else one._cdata for one in tensors]
        return bool(driver.takes(kernel, *addresses, params.dropout, params.is_causal, params.enable_gqa))

    return is_taken


def _refusing(refuse: Callable[[str], Exception], name: str) -> Callable[..., Any]:
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise refuse(name)

    return refused


def _of_devices(c: Any, driver: Any, properties: Any, wheel: Wheel) -> dict[str, Any]:
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


def _of_memory(driver: Any) -> dict[str, Any]:
    def stats(device: int) -> dict[str, Any]:
        found: dict[str, Any] = {"num_alloc_retries": 0, "num_ooms": 0, "num_sync_all_streams": 0}
        found |= {"num_device_alloc": 0, "num_device_free": 0, "max_split_size": -1}
        told = driver.meter.told()
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
            lambda device: driver.meter.reset(),
        ),
        **dict.fromkeys(
            ("_cuda_cudaCachingAllocator_set_allocator_settings", "_accelerator_setAllocatorSettings"),
            driver.meter.configure,
        ),
        **dict.fromkeys(("_cuda_emptyCache", "_accelerator_emptyCache"), lambda *args: driver.meter.empty()),
    }


def _of_streams(c: Any, driver: Any) -> dict[str, Any]:
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

    def __init__(self, driver: Any, properties: Any) -> None:
        self.cudaError = type("cudaError", (), {"success": 0})
        self._driver, self._total = driver, properties.total_memory

    def cudaMemGetInfo(self, device: int) -> tuple[int, int]:  # noqa: N802 - as it is called
        """Return the bytes that are free, and those of the device."""
        return max(self._total - self._driver.meter.reserved, 0), self._total

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _constant(0)


class Fakes(NamedTuple):
    """Fake tensors of PyTorch: their mode and their class."""

    mode: Any
    tensor: Any


def fakes() -> Fakes:
    """Return the classes of fake tensors, which ask no GPU for anything from now on."""
    from torch._subclasses import fake_tensor as of

    def start(device: Any) -> None:
        import torch

        torch.cuda.init()

    of.init_gpu_context = start
    of.FakeTensorMode.avoid_device_init = True  # also in the modes that the compiler makes
    return Fakes(of.FakeTensorMode, of.FakeTensor)


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


def count_by_driver() -> None:
    """Have ``torch.cuda`` ask the driver alone how many devices there are: the machine may have real ones."""
    import torch

    torch.cuda._device_count_nvml = lambda: -1


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


def is_below_fakes() -> bool:
    """Whether this thread is inside an operator that leaves out fake tensors, and modes."""
    import torch

    return bool(torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python))


# ---- What a rehearsal asks of torch (tracer.rehearse) ----------------------------------------------------


_TOP: Final = "_top_saved_tensors_default_hooks"  # function of autograd in C++ that torch 2.6 lacks


def saved_tensor_hooks() -> Any:
    """Return the hooks to which autograd gives what it saves, as those of a checkpoint; None: it has none."""
    import torch

    top = getattr(torch._C._autograd, _TOP, None)
    return top and top(True)  # noqa: FBT003 - has no name


def is_composite(overload: Any) -> bool:
    """Whether autograd takes an operator apart."""
    import torch

    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return bool(has_kernel(overload.name(), "CompositeImplicitAutograd"))


def group_names() -> list[str]:
    """Return the names of all process groups."""
    from torch.distributed import distributed_c10d

    return list(distributed_c10d._world.pg_names.values())


def fused_adam(*, is_decoupled: bool) -> Any:
    """Return the operator of a fused Adam, or of a fused AdamW."""
    import torch

    return torch._fused_adamw_ if is_decoupled else torch._fused_adam_


def kinds_updated_together() -> tuple[list[Any], list[Any]]:
    """Return the lists of classes of tensors that optimizers, and clipping, update together."""
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    return optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types


def modes_in_force() -> list[Any]:
    """Return the modes of this thread that see operators, then those that see functions."""
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return [*_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack()]


def enter(mode: Any) -> None:
    """Enter a *mode* and never leave it."""
    from torch import overrides
    from torch.utils import _python_dispatch

    takes_functions = isinstance(mode, overrides.TorchFunctionMode)
    (overrides._push_mode if takes_functions else _python_dispatch._push_mode)(mode)


def allows_tf32(role: str, name: str) -> bool:
    """Whether products (*role* ``"matmul"``) or convolutions may compute in TensorFloat-32, called *name*."""
    import torch

    told = getattr(torch._C, "_get_fp32_precision_getter", None)  # torch 2.9 and newer
    if told is not None:
        return bool(told("cuda", role) == name)
    return bool(torch._C._get_cublas_allow_tf32() if role == "matmul" else torch._C._get_cudnn_allow_tf32())


DYNAMO: Final = "torch._dynamo"  # where torch has its compiler; it takes long to load

OF_COMPILERS: Final = (
    DYNAMO,
    *("torch._functorch.aot_autograd", "torch._functorch.partitioners"),
    *("torch._inductor.decomposition", "torch._inductor.pattern_matcher"),
)
"""What takes seconds to import, and only ranks that compile need: once one has, the next ones find it."""

EXPORTING: Final = "torch.export._trace"
"""Module of exports; takes a while to import, and most trainings never do."""

NESTED: Final = "torch.nested._internal.nested_tensor"  # module of nested tensors

SHARDED_TENSOR: Final = "torch.distributed._shard.sharded_tensor.api"
"""Module of the tensors that are sharded without DTensor."""


ASKS_FOR_HOOKS: Final = "_has_any_global_hook"
"""Function of torch's modules by which ``OptimizedModule`` alone asks whether to warn of hooks."""

_GLOBAL_HOOKS: Final = (
    "_global_backward_pre_hooks", "_global_backward_hooks", "_global_forward_pre_hooks",
    "_global_forward_hooks", "_global_forward_hooks_always_called", "_global_forward_hooks_with_kwargs",
)  # fmt: skip
"""Where it looks."""


def global_hooks() -> set[int]:
    """Return the numbers of the hooks on all modules, as their handles bear them."""
    from torch.nn.modules import module

    return {number for name in _GLOBAL_HOOKS for number in getattr(module, name, ())}


def forget_hook(number: int) -> None:
    """Remove what the handle of a hook with ``with_kwargs`` leaves, which torch would warn of ever after."""
    from torch.nn.modules import module

    module._global_forward_hooks_with_kwargs.pop(number, None)


def run_as_is(folder: str) -> Callable[[], None]:
    """Have the compiler run functions in *folder* as they are, but for those that what it compiles calls.

    Returns:
        What has it compile them again.
    """
    from torch._dynamo import trace_rules as rules

    if not hasattr(rules, "BUILTIN_INLINE_WHEN_CALLED"):  # an older torch: then each call would end a graph
        return lambda: None
    rules.SKIP_DIRS.append(folder)
    rules.BUILTIN_INLINE_WHEN_CALLED.add(folder)
    rules._recompile_re()

    def compile_again() -> None:
        rules.SKIP_DIRS.remove(folder)
        rules.BUILTIN_INLINE_WHEN_CALLED.discard(folder)
        rules._recompile_re()

    return compile_again


def fx_tracing() -> Callable[[], bool]:
    """Return what tells whether ``torch.fx`` traces; its first name now warns where there is the second."""
    from torch.fx import _symbolic_trace

    newer = getattr(_symbolic_trace, "is_fx_symbolic_tracing", None)
    told: Callable[[], bool] = newer or _symbolic_trace.is_fx_tracing
    return told


def mode_of_fakes() -> tuple[Callable[[Any], Any], Any]:
    """Return what tells the mode in force for a key, and the key of fake tensors."""
    import torch

    return torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE


@contextmanager
def without_cache() -> Iterator[None]:
    """Inside this context, torch's mode of fake tensors remembers no call of an operator."""
    mode_of, key = mode_of_fakes()
    if (mode := mode_of(key)) is None:
        yield
        return
    before, mode.cache_enabled = mode.cache_enabled, False
    try:
        yield
    finally:
        mode.cache_enabled = before


def put_off(tensor: Any, is_conjugate: bool, is_negative: bool) -> None:  # noqa: FBT001 - two bits
    """Have complex conjugation and sign of a *tensor* put off or not."""
    import torch

    torch._C._set_conj(tensor, is_conjugate)
    torch._C._set_neg(tensor, is_negative)


def guard_address(tensor: Any, mode: Any) -> None:
    """Have who asks for the address of a fake *tensor* warned or refused, as ``FakeTensor.__new__`` does."""
    import torch

    if mode._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(tensor)
    else:
        torch._C._set_throw_on_mutable_data_ptr(tensor)


def gradient_forms(stage: Any) -> Any:
    """Return what a pipeline stage tells of the gradients that it gets."""
    from torch.distributed.pipelining import stage as module

    return module._StageBackwardMeta(backward_metas=module._derive_grad_metas(stage._stage_meta.outputs))


def know_fake_groups() -> None:
    """Have torch know the backend of process groups that send nothing."""
    import_module("torch.testing._internal.distributed.fake_pg")


METHODS_OF_MESH: Final = frozenset({"_get_root_mesh", "_is_current_rank_part_of_mesh"})
"""Methods of a mesh, where torch has them, that make no tensor."""

JOINED: Final = "_concatenate"
"""That which joins meshes, where torch has it, anew for each parameter that FSDP2 cuts."""

GROUPED_PRODUCT: Final = "_meta_grouped_mm_common"
"""What describes the results of products of experts, from torch 2.8 on."""

DEVICE_MODE: Final = "torch.utils._device"  # module of the mode behind ``torch.set_default_device``


# ---- Asking PyTorch's partitioner (tracer.rehearse.tape.compiled_memory) ---------


class _CutError(Exception):
    """Ends a compilation once the partitioner has answered."""


def recomputing(*, is_kept: bool) -> Any:
    """Return what a node in a checkpoint is marked with, as TorchDynamo does."""
    from torch.utils.checkpoint import CheckpointPolicy

    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def joined() -> Callable[..., Any]:
    """Return a function that returns its first argument; the gradient of that goes to the others."""
    import torch

    class Joined(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
        """Stands for a function with a backward of its own."""

        @staticmethod
        def forward(ctx: Any, out: Any, *sources: Any) -> Any:
            ctx.forms = [(one.shape, one.dtype) for one in sources]
            return out.view_as(out)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return (None, *(gradient.sum().to(dtype).expand(shape) for shape, dtype in ctx.forms))

    applied: Callable[..., Any] = Joined.apply
    return applied


def partitioned(
    graph: Any, forms: Sequence[tuple[Any, ...]], free: Sequence[int]
) -> tuple[Any, Any, int] | None:
    """Return the graphs of forward and backward into which PyTorch cuts a *graph*, and the forward's results.

    Args:
        graph: a ``torch.fx.Graph`` of operators.
        forms: shape, stride, dtype and device of each input, and whether it has a gradient.
        free: numbers of the inputs that are there anyway.

    Returns:
        None if there is no backward.

    Raises:
        NotImplementedError: this torch tells no checkpoint from the work around it.
    """
    import torch
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx import traceback

    if not hasattr(torch._C._autograd, _TOP):
        raise NotImplementedError("torch 2.6 tells no checkpoints")
    found = list[tuple[Any, Any, int]]()

    def cut(joint: Any, inputs: Any, *, num_fwd_outputs: int, **how: Any) -> Any:
        if "static_lifetime_input_indices" in how:  # torch 2.6 has no such argument
            how["static_lifetime_input_indices"] = list(free)
        parts = min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **how)
        found.append((*parts, num_fwd_outputs))
        raise _CutError

    def run(*values: Any) -> Any:
        with traceback.preserve_node_meta():
            return torch.fx.Interpreter(torch.nn.Module(), graph=graph).run(*values)

    def as_it_is(module: Any, _: Any) -> Any:
        return module

    traced = aot_function(run, as_it_is, partition_fn=cut, decompositions=select_decomp_table())
    with (
        without_functions()(),
        without_modes(),
        torch.enable_grad(),
        torch.autocast("cuda", enabled=False),
        torch.autocast("cpu", enabled=False),
        fakes().mode(),
    ):
        values = [
            torch.empty_strided(shape, stride, dtype=dtype, device=device).requires_grad_(has_gradient)
            for shape, stride, dtype, device, has_gradient in forms
        ]
        try:
            traced(*values)
        except _CutError as done:
            done.__traceback__ = None  # else it keeps the caller's tensors, in a circle
    return found[0] if found else None


def missing() -> list[tuple[str, str]]:
    """Return those of `relied_on` that the torch of this process does not have, with what each is for."""
    return [(name, purpose) for name, purpose in relied_on().items() if not _is_there(name)]


def _is_there(name: str) -> bool:
    try:
        _follow(name)
    except AttributeError:
        return False
    return True


OLDEST: Final = (2, 6)  # the oldest torch that recording was tried with, as ``pyproject.toml`` says
TRIED: Final = "2.6 to 2.15"  # versions of torch that recording was tried with

NEEDED: Final = (
    "torch._C._dispatch_keyset_full_after", "torch.autograd.Variable._execution_engine.run_backward",
    "torch.autograd.Variable._execution_engine.queue_callback", "torch.library.Library.impl",
    "torch.nn.modules.module.register_module_forward_hook",
)  # fmt: skip
"""Names of torch, public ones too, without which nothing is recorded."""

NEEDED_DISTRIBUTED: Final = (
    "torch.distributed.ProcessGroup.unbox",
    "torch.distributed.Work.unbox",
    "torch.distributed.distributed_c10d._get_default_store",
    "torch.ops._c10d_functional.wait_tensor",
)
"""The same for a process that has joined a process group."""


def check(*, in_group: bool) -> None:
    """Raise RecordError if torch is too old, or lacks a name that recording needs."""
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


def main() -> None:
    """List the private names of torch that the tracer uses and that the torch of this environment lacks."""
    import torch

    lacking = missing()
    for name, purpose in lacking:
        sys.stdout.write(f"{name}: to {purpose}\n")
    sys.stdout.write(f"torch {torch.__version__} lacks {len(lacking)} of {len(relied_on())} names\n")
    raise SystemExit(bool(lacking))


if __name__ == "__main__":
    main()
