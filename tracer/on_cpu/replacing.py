"""What stands for GPUs and NCCL: where tensors go, groups, wrappers of models."""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

import functools
import importlib
import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

from foretrace.tracer import internals
from foretrace.tracer.guarded import everywhere
from foretrace.tracer.rehearse.device import compiling, stand_ins
from foretrace.tracer.rehearse.replacing import replaces

FOREIGN: Final = frozenset({"cuda", "xpu", "hpu", "npu", "mps", "mtia"})
"""Kinds of devices that are replaced by the CPU."""

CHECKPOINTS: Final = "torch.utils.checkpoint"  # module of the saved-tensor hooks that recompute

OF_THE_DRIVER: Final = ("utilization", "memory_usage", "temperature", "power_draw", "clock_rate")
"""Functions of ``torch.cuda`` that ask a real driver, in per cent, degrees, mW and MHz: all return 0."""

OF_STREAMS: Final = ("Stream", "Event", "stream", "current_stream", "synchronize")
"""What FSDP and others ask the module of their device for: that is the CPU, whose own of older torches lack
some methods."""

OWN_PLACE: Final = ("cuda", "pin_memory", "is_pinned")
"""Methods of tensors that have nothing to do where there is one memory."""


def is_foreign(device: Any) -> bool:
    """Whether *device* is one that is replaced by ``cpu``; a bare number means a GPU.

    ``cpu:0``, which Accelerate uses, is replaced too.
    """
    if isinstance(device, bool) or device is None:
        return False
    if isinstance(device, int):
        return True
    kind, _, number = str(device).partition(":")
    return kind in FOREIGN or (kind == "cpu" and bool(number))


def placed(device: Any) -> Any:
    """Return *device*, or the processor if it names a GPU, a bare number included."""
    import torch

    is_named = isinstance(device, str | int | torch.device) and is_foreign(device)
    return torch.device("cpu") if is_named else device


def replace_devices(torch: Any) -> None:
    """Replace devices in all that this process asks of *torch*, in all its threads."""
    mode = _mode(torch)
    _differentiate_in(mode)
    _save_in(mode, torch.autograd.graph)
    mode.__enter__()
    _in_threads(mode)
    _without_mode(torch)
    for name in OF_THE_DRIVER:
        setattr(torch.cuda, name, lambda device=None: 0)
    for name in OF_STREAMS:
        setattr(torch.cpu, name, getattr(torch.cuda, name))
    stand_ins.profile_host_only()


def _mode(torch: Any) -> Any:
    """Return the mode in which functions of torch take the processor for a GPU."""
    from torch.overrides import TorchFunctionMode

    kept = {getattr(torch.Tensor, name): name for name in OWN_PLACE}
    named = torch.device

    class OnCpu(TorchFunctionMode):  # type: ignore[misc]  # torch is untyped here
        """Replaces devices in arguments."""

        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            given = dict(kwargs or {})
            if func in kept:
                return True if kept[func] == "is_pinned" else args[0]
            if func is named:
                is_bare = len(args) == 1 and isinstance(args[0], int)
                return named(*(("cuda", *args) if is_bare else args), **given)
            if given.get("device") is not None:
                given["device"] = placed(given["device"])
            if given.get("pin_memory"):
                given["pin_memory"] = False
            if func is torch.Tensor.to and len(args) > 1 and type(args[1]) is int:
                args = (args[0], placed(args[1]), *args[2:])
            if func is torch.Tensor.type and len(args) > 1 and isinstance(args[1], str):
                args = (args[0], args[1].replace("torch.cuda.", "torch."), *args[2:])
            args = tuple(placed(one) if isinstance(one, str | torch.device) else one for one in args)
            return func(*args, **given)

    return OnCpu()


def _differentiate_in(mode: Any) -> None:
    """Run backward passes inside *mode*, which torch leaves during a call: recomputation needs it."""

    def around(run_backward: Callable[..., Any]) -> Callable[..., Any]:
        def run_backward_in_mode(*args: Any, **kwargs: Any) -> Any:
            with mode:
                return run_backward(*args, **kwargs)

        return run_backward_in_mode

    internals.around_backward(around)


def _save_in(mode: Any, graph: Any) -> None:
    """Run saved-tensor hooks inside *mode*, which torch leaves before it calls them."""

    def in_mode(hook: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with mode:
                return hook(*args)

        return run

    @replaces(graph.saved_tensors_hooks, name="__init__")
    def init(original: Any, self: Any, *hooks: Callable[..., Any]) -> None:
        # Those of checkpoints recompute, in a backward that is inside the mode.
        is_inside = type(self).__module__ == CHECKPOINTS
        original(self, *(hooks if is_inside else map(in_mode, hooks)))


def _in_threads(mode: Any) -> None:
    """Run threads of Python inside *mode*, which torch keeps for each thread."""

    @replaces(threading.Thread)
    def run(original: Any, self: Any) -> None:
        with mode:
            original(self)


def _without_mode(torch: Any) -> None:
    """Replace devices in what torch does not offer to modes: defaults, files, storages, generators."""
    context: Any = importlib.import_module(internals.DEVICE_MODE).DeviceContext
    replaces(context, name="__init__")(lambda original, self, device: original(self, placed(device)))

    @replaces(torch)
    def load(original: Any, f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return original(f, _mapped(map_location), *args, **kwargs)

    class Generator(torch.Generator):  # type: ignore[misc]
        """A generator of the processor, whatever device is named."""

        def __new__(cls, device: Any = "cpu") -> Any:
            return super().__new__(cls, placed(device))

    torch.Generator = Generator
    torch.Tensor.record_stream = lambda tensor, stream: None  # is for the allocator only
    for kind in (torch.UntypedStorage, torch.TypedStorage):
        kind.cuda = kind.pin_memory = lambda self, *args, **kwargs: self


def _mapped(location: Any) -> Any:
    """Return where ``torch.load`` puts what a file holds, for its argument *location*."""
    if location is None:  # where it was, which may be a GPU
        return "cpu"
    if isinstance(location, Mapping):
        return lambda storage, _: storage
    return location if callable(location) else placed(location)


GLOO: Final = "gloo"

MAKERS: Final = (
    "init_process_group", "new_group", "new_subgroups", "new_subgroups_by_enumeration", "split_group",
)  # fmt: skip
"""Functions that make a process group."""

AVERAGING: Final = ("all_reduce", "reduce", "reduce_scatter_tensor", "reduce_scatter_single")
"""Functions that can average, which gloo cannot."""

GATHERING: Final = ("all_gather_into_tensor", "all_gather_single")
"""Functions that NCCL does below autograd, for tensors of any shape."""


def replace_groups() -> None:
    """Replace backends, devices and averages."""
    import torch.distributed as dist
    from torch.distributed import device_mesh, distributed_c10d

    for name in MAKERS:
        _replace(distributed_c10d, name, _of_gloo)
    for name in AVERAGING:
        _replace(distributed_c10d, name, _averaging)
    for name in GATHERING:
        _replace(distributed_c10d, name, _gathering)
    _replace(distributed_c10d, "barrier", _anywhere)
    everywhere(dist.is_nccl_available, lambda: True, "is_nccl_available")
    _meshes(device_mesh)


def _replace(module: Any, name: str, around: Callable[[Any], Any]) -> None:
    original = getattr(module, name, None)
    if original is not None:
        everywhere(original, functools.wraps(original)(around(original)), name)


def _of_gloo(original: Any) -> Any:
    """Return what makes a group of gloo in place of any that names another backend."""

    def made(*args: Any, **kwargs: Any) -> Any:
        if original.__name__ == MAKERS[0]:
            backend, *rest = args or (kwargs.pop("backend", None),)
            args = (_gloo(backend), *rest)
            kwargs.pop("device_id", None)
        elif kwargs.get("backend") is not None:
            kwargs["backend"] = _gloo(kwargs["backend"])
        kwargs.pop("pg_options", None)
        return original(*args, **kwargs)

    return made


def _gloo(backend: Any) -> Any:
    return GLOO if backend is None or "nccl" in str(backend).lower() else backend


def _averaging(original: Any) -> Any:
    """Return what sums parts of an average: each rank divides what it gives."""
    import torch.distributed as dist

    signature = inspect.signature(original)

    def averaged(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        found = given.arguments
        if found.get("op") == dist.ReduceOp.AVG:
            n_ranks = dist.get_world_size(found.get("group"))
            found["op"] = dist.ReduceOp.SUM
            if "tensor" in found:
                found["tensor"].div_(n_ranks)
            else:
                found["input"] = found["input"] / n_ranks
        return original(*given.args, **given.kwargs)

    return averaged


def _gathering(original: Any) -> Any:
    """Return what gathers numbers, of any shape, with gradients or without: gloo looks at both."""
    import torch

    signature = inspect.signature(original)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def gathered(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        for name in ("output_tensor", "input_tensor"):
            given.arguments[name] = given.arguments[name].view(-1)
        return original(*given.args, **given.kwargs)

    return gathered


def _anywhere(original: Any) -> Any:
    """Return a barrier that names no GPU: gloo refuses those."""

    def barrier(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_ids", None)
        return original(*args[:2], **kwargs)

    return barrier


def _meshes(module: Any) -> None:
    """Make meshes those of the processor, which use the group of all ranks where those of NCCL do."""

    @replaces(module)
    def get_backend(original: Any, group: Any = None) -> str:
        return "nccl" if (backend := original(group)) == GLOO else backend

    @replaces(module.DeviceMesh, name="__init__")
    def init(original: Any, self: Any, device_type: Any, *args: Any, **kwargs: Any) -> None:
        original(self, str(placed(device_type)), *args, **kwargs)


def replace_wrappers(torch: Any) -> None:
    """Replace wrappers of models, gradient scalers, norms over ranks, loaders."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.utils.data import DataLoader

    cpu = torch.device("cpu")
    _given(torch.nn.parallel.DistributedDataParallel, device_ids=None, output_device=None)
    _given(FullyShardedDataParallel, device_id=cpu)
    names: Any = internals.fsdp_building()
    names._check_module_states_for_sync_module_states = lambda module: None  # requires parameters on a GPU
    _given(DataLoader, pin_memory=False, pin_memory_device="")
    torch.compile, torch.nn.Module.compile = _compiled, lambda self, *args, **kwargs: None
    stand_ins.scaler()
    stand_ins.synced_norms()


def _compiled(model: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Return *model* as it is, or what ``torch.compile`` would put around a module; compile nothing."""
    import torch

    if model is None:
        return functools.partial(_compiled, **kwargs)
    return compiling.wrapper()(model) if isinstance(model, torch.nn.Module) else model


def _given(kind: Any, **values: Any) -> None:
    """Give the constructor of *kind* these *values*, whatever the script says; they are set by name."""
    names = list(inspect.signature(kind.__init__).parameters)

    @replaces(kind, name="__init__")
    def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        found = list(args)
        for name, value in values.items():
            at = names.index(name) - 1 if name in names else len(found)
            if at < len(found):
                found[at] = value
            elif name in names:
                kwargs[name] = value
        original(self, *found, **kwargs)


# Autocast of a GPU, done by autocast of the processor.

SETTERS: Final = ("set_autocast_enabled", "set_autocast_dtype", "set_autocast_gpu_dtype")
"""Functions of torch by which a script, or a region, sets it: for any device, or for CUDA alone."""


class _Host(threading.local):
    """Whether autocast of the processor was on before that of the GPU was turned on, and in what type."""

    before: tuple[bool, Any] | None = None


def follow_autocast(torch: Any) -> None:
    """Have autocast of the processor be that of the GPU while that is on; torch keeps both by thread."""
    host = _Host()
    enable, choose = torch.set_autocast_enabled, torch.set_autocast_dtype

    def follow(original: Any, *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        if torch.is_autocast_enabled("cuda"):
            host.before = host.before or (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
            is_on, dtype = True, torch.get_autocast_dtype("cuda")
        elif host.before:
            (is_on, dtype), host.before = host.before, None
        else:
            return
        enable("cpu", is_on)
        choose("cpu", dtype)

    for name in SETTERS:
        replaces(torch, name=name)(follow)
