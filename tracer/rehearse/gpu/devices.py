"""Lets a script that uses ``cuda`` run on a machine without a GPU.

``torch.cuda`` answers as for a GPU with 80 GB. Tensors on that GPU are fake CPU tensors without memory. The
script's own ``torch.device("cuda")`` objects do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer import internals
from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.gpu import allocator, attention, autocast
from foretrace.tracer.rehearse.gpu.casting import OUTERMOST, SOFTMAX, softmax
from foretrace.tracer.rehearse.gpu.meter import CAPACITY_BYTES
from foretrace.tracer.rehearse.hints import OLD_TYPES
from foretrace.tracer.rehearse.ranks.launchers import on_node

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.gpu.meter import Meter
    from foretrace.tracer.rehearse.gpu.streams import Streams

GPU: Final = SimpleNamespace(
    name="rehearsed GPU",
    major=9,
    minor=0,
    total_memory=CAPACITY_BYTES,
    multi_processor_count=132,
    warp_size=32,
    is_integrated=0,
    gcnArchName="",
    L2_cache_size=50 * 2**20,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=48 * 2**10,
    shared_memory_per_block_optin=227 * 2**10,
    shared_memory_per_multiprocessor=228 * 2**10,
    clock_rate=1_980_000,
    memory_clock_rate=2_619_000,
    memory_bus_width=5120,
    is_multi_gpu_board=0,
    pci_bus_id=0,
    pci_device_id=0,
    pci_domain_id=0,
    uuid="00000000-0000-0000-0000-000000000000",
)
"""Properties of the GPU that the script sees: those of an H100. The script may choose by them. The times of
its work are those of the cluster for which it is simulated."""

FOREIGN: Final = frozenset({"cuda", "xpu", "hpu", "npu", "mps", "mtia"})
"""Kinds of devices that are replaced by the CPU."""


CHECKPOINTS: Final = "torch.utils.checkpoint"
"""Module of the saved-tensor hooks that recompute."""

COMMANDS: Final = (
    *("set_device", "ipc_collect", "init", "_lazy_init", "manual_seed", "manual_seed_all", "seed"),
    *("set_per_process_memory_fraction", "set_sync_debug_mode", "seed_all"),
    *("set_rng_state", "set_rng_state_all"),
)
"""Functions of ``torch.cuda`` that change a setting, and do nothing here."""


OF_THE_DRIVER: Final = ("utilization", "memory_usage", "temperature", "power_draw", "clock_rate")
"""Functions of ``torch.cuda`` that read the driver, in per cent, degrees, mW and MHz: all return 0."""


ASKING: Final = "_parse_to"
"""Function by which ``nn.Module.to`` parses its arguments; the device in them is not replaced."""


def local_rank() -> int:
    """Return the rank of this process on its node."""
    return on_node()[0]


def is_foreign(device: Any) -> bool:
    """Whether *device* is one that is replaced by ``cpu``; a bare number means a GPU.

    ``cpu:0``, which Accelerate uses, is replaced too: real tensors on it are on ``cpu``, but fake ones would
    keep the number and count as on another device.
    """
    if isinstance(device, bool) or device is None:
        return False
    if isinstance(device, int):
        return True
    kind, _, number = str(device).partition(":")
    return kind in FOREIGN or (kind == "cpu" and bool(number))


def is_gpu(device: Any) -> bool:
    """Whether *device* names a GPU."""
    return is_foreign(device) and not str(device).startswith("cpu")


def _numbered(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of ``torch.device``; a bare number is that of a GPU if there is one."""
    import torch

    is_bare = len(args) == 1 and isinstance(args[0], int) and torch.cuda.is_available()
    return ("cuda", *args) if is_bare else args


def device_mode(
    moving: Callable[..., Any], making: Callable[..., Any], is_written: Callable[[tuple[Any, ...]], bool]
) -> Any:
    """Return a mode in which functions of torch create and keep tensors on the CPU.

    Args:
        moving: replaces functions that move a tensor between host and device.
        making: replaces functions that take a device, also if none is given.
        is_written: writes a number to a tensor, with these arguments, if it can, and says whether.
    """
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils._device import _device_constructors

    moves = {torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu, torch.Tensor.pin_memory}
    moves.add(torch.Tensor.type_as)
    typed, named, written = torch.Tensor.type, torch.device, torch.Tensor.__setitem__
    makes, is_autocast = _device_constructors(), torch.is_autocast_enabled

    class DeviceMode(TorchFunctionMode):  # type: ignore[misc]  # torch is untyped here
        """Replaces devices in arguments."""

        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            if func is typed and "torch.cuda." in str((args[1:], kwargs)):
                raise RehearsalError(OLD_TYPES)
            if func in moves:
                return moving(func, args, kwargs or {})
            if func is written and is_written(args):
                return None
            if func is named:
                return named(*_numbered(args), **(kwargs or {}))
            if func in makes or (kwargs and "device" in kwargs and getattr(func, "__name__", "") != ASKING):
                return making(func, args, kwargs or {})
            name = getattr(func, "__name__", "")
            if name in OUTERMOST and args and not is_autocast("cpu"):
                args = (args[0].contiguous(), *args[1:])
            if name in SOFTMAX and (one := softmax(torch, name, args, kwargs or {})) is not None:
                return one
            return func(*args, **(kwargs or {}))

    mode = DeviceMode()
    differentiate_in(mode)
    save_in(mode, torch.autograd.graph)
    return mode


def differentiate_in(mode: Any) -> None:
    """Run backward passes inside *mode*, which torch leaves during a call: recomputation needs it."""
    run_backward = internals.swap_run_backward()

    def run_backward_in_mode(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return run_backward(*args, **kwargs)

    internals.swap_run_backward(run_backward_in_mode)


def save_in(mode: Any, graph: Any) -> None:
    """Run saved-tensor hooks inside *mode*, which torch leaves before it calls them."""
    hooks: Any = graph.saved_tensors_hooks
    made = hooks.__init__

    def in_mode(hook: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with mode:
                return hook(*args)

        return run

    def init(self: Any, pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
        if type(self).__module__ != CHECKPOINTS:  # those recompute, in a backward that is inside the mode
            pack, unpack = in_mode(pack), in_mode(unpack)
        made(self, pack, unpack)

    hooks.__init__ = init


def answers(meter: Meter) -> dict[str, Any]:
    """Return replacements of functions of ``torch.cuda``, by name.

    Args:
        meter: knows the memory.
    """

    def constant(value: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: value

    return {
        **dict.fromkeys(COMMANDS, constant(None)),
        **_of_memory(meter),
        "is_available": constant(True),  # noqa: FBT003 - a value, not a switch
        "is_initialized": constant(True),  # noqa: FBT003
        "is_bf16_supported": constant(True),  # noqa: FBT003
        "is_current_stream_capturing": constant(False),  # noqa: FBT003
        "device_count": constant(on_node()[1]),
        "current_device": local_rank,
        "get_device_properties": constant(GPU),
        "get_device_capability": constant((GPU.major, GPU.minor)),
        "get_device_name": constant(GPU.name),
        "get_arch_list": constant(["sm_90"]),
        "memory_summary": constant(""),
        "memory_snapshot": constant([]),
        "_snapshot": constant({"segments": [], "device_traces": []}),
        "get_allocator_backend": constant("native"),
        "get_per_process_memory_fraction": constant(1.0),
        "get_sync_debug_mode": constant(0),
        **dict.fromkeys(OF_THE_DRIVER, constant(0)),
        "can_device_access_peer": constant(True),  # noqa: FBT003
        "_exchange_device": lambda device: local_rank(),
        "_maybe_exchange_device": lambda device: local_rank(),
    }


def _of_memory(meter: Meter) -> dict[str, Any]:
    """Return those that report the memory of the device, or reset its peak."""

    def stats(device: Any = None) -> dict[str, int]:
        del device
        used, kept = (meter.now, meter.peak), (meter.reserved, meter.most_reserved)
        by_name = {"allocated_bytes.all": used, "active_bytes.all": used, "reserved_bytes.all": kept}
        found = {"num_alloc_retries": 0, "num_ooms": 0}
        for name, (now, peak) in by_name.items():
            found |= {f"{name}.current": now, f"{name}.peak": peak}
        return found

    return {
        **dict.fromkeys(("memory_reserved", "memory_cached"), lambda device=None: meter.reserved),
        "max_memory_reserved": lambda device=None: meter.most_reserved,
        **dict.fromkeys(("reset_peak_memory_stats", "reset_max_memory_allocated"), meter.reset),
        "memory_allocated": lambda device=None: meter.now,
        "max_memory_allocated": lambda device=None: meter.peak,
        "empty_cache": meter.empty,
        "mem_get_info": lambda device=None: (max(CAPACITY_BYTES - meter.reserved, 0), CAPACITY_BYTES),
        "memory_stats": stats,
    }


def install(streams: Streams, meter: Meter) -> None:
    """Replace GPUs in this process, also where they compute otherwise than processors.

    Args:
        streams: streams and events to offer.
        meter: knows the memory.
    """
    import torch

    stand_in(streams, meter)
    attention.install(torch)
    autocast.install(torch, is_foreign)


def stand_in(streams: Streams, meter: Meter) -> None:
    """Replace ``torch.cuda`` and ``torch.accelerator`` in this process, with arguments as for `install`."""
    import torch
    import torch.cuda.nvtx

    for name, function in answers(meter).items():
        setattr(torch.cuda, name, function)
    for name in ("memory_stats", "memory_allocated", "max_memory_allocated", "memory_reserved"):
        setattr(torch.cuda.memory, name, getattr(torch.cuda, name))
    raw: Any = torch._C  # noqa: SLF001 - where libraries set it
    memory: Any = torch.cuda.memory
    memory._set_allocator_settings = raw._accelerator_setAllocatorSettings = allocator.set_by_script  # noqa: SLF001
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, lambda *args, **kwargs: 0)
    torch.cuda.get_rng_state = lambda device=None: torch.random.get_rng_state()
    torch.cuda.get_rng_state_all = list
    streams.install(torch.cuda, torch.cpu)
    torch.cuda.StreamContext = streams.stream
    accelerator: Any = torch.accelerator
    for name in ("current_stream", "set_stream", "synchronize"):
        setattr(accelerator, name, getattr(streams, name))
    accelerator.current_device_index = local_rank
    accelerator.set_device_index = lambda device=None: torch.cuda.set_device(device)
    _numbers(torch)


def _numbers(torch: Any) -> None:
    """Accept a bare number in ``nn.Module.to``: it means a GPU."""
    nn: Any = torch._C._nn  # noqa: SLF001 - where nn.Module.to asks what its arguments mean
    parse = nn._parse_to  # noqa: SLF001

    @wraps(parse)  # torch passes the function of this name to modes
    def parse_to(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], int) and not isinstance(args[0], bool):
            args = (torch.device("cuda", args[0]), *args[1:])
        if isinstance(kwargs.get("device"), int):
            kwargs = {**kwargs, "device": torch.device("cuda", kwargs["device"])}
        return parse(*args, **kwargs)

    nn._parse_to = parse_to  # noqa: SLF001
